"""Local: what one rank has of a matmul and of a weight. Training and serving, on catalogue GPUs and
on probed machines, size them here.

    column, vocab   [T, k] x [k, n / t]
    row             [T, k / t] x [k, n]
    outside         whole on every rank
    heads           a weight of u units (key/value heads) is held in whole units: where t > u
                    several ranks hold the same one; a fused matrix has segments of both kinds

Legend: T tokens, t tensor ranks, u units of a weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hocket.spec.layout import Layout
from hocket.spec.model_shape import MatrixProduct, Weight


def together(products: Sequence[MatrixProduct]) -> list[list[MatrixProduct]]:
    """Matmuls in the order of their first; those that read one tensor and are split equally run as
    one, however a model's code stores their weights."""
    found: dict[tuple[Any, ...], list[MatrixProduct]] = {}
    for place, p in enumerate(products):
        # An adapter's matmul runs as often as there are adapters.
        key = (place if p.lora else p.input or place, p.split, p.k, p.count, p.groups)
        found.setdefault(key, []).append(p)
    return list(found.values())


def divided(split: str, n: Any, k: Any, ranks: Any) -> tuple[Any, Any]:
    """Columns n and inner size k of a matmul on one of `ranks` ranks; numbers or arrays."""
    if split in ("column", "vocab"):
        return n / ranks, k
    if split == "row":
        return n, k / ranks
    assert split == "outside", split
    return n, k


def tensor_elements(weight: Weight, tp: int) -> int:
    """Elements of a weight on the tensor rank with the most."""
    if weight.split == "outside" or tp == 1:
        return weight.elements
    return sum(count // units * max(1, -(-units // tp)) for count, units in weight.segments)


def held_elements(weight: Weight, layout: Layout, experts: tuple[str, ...] = ()) -> int:
    """Elements of a weight on the rank of a replica with the most.

    Args:
        experts: beginnings of the names of stacked experts, whatever their split.
    """
    if weight.split == "expert" or (experts and weight.name.startswith(experts)):
        return tensor_elements(weight, layout.expert_tp) // layout.ep
    return tensor_elements(weight, layout.tp)
