"""Local: what one rank has of a matmul, of its tensors and of a weight. Training and serving, on
catalogue GPUs and on probed machines, size them here, in numbers or in arrays of many layouts.

    column, vocab   [T, k] x [k, n / t]
    row             [T, k / t] x [k, n]
    outside         whole on every rank
    heads           a weight of u units (key/value heads) is held in whole units: where t > u
                    several ranks hold the same one; a fused matrix has segments of both kinds

Of experts, [E, T c / E, k] x [E, k, n]: a rank has E / ep matrices, and the tokens of all expert
ranks that chose them, which tensor ranks share out where an expert is narrower than they are many.

Legend: T tokens of a rank, t tensor ranks, u units of a weight, E experts, c chosen by a token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from hocket.spec.layout import Layout
from hocket.spec.model_shape import BlockShape, MatrixProduct, Weight

INSIDE, OUTSIDE, WHOLE = "inside", "outside", "whole"


class Degrees(Protocol):
    """Over how many ranks tensors are divided: numbers of one layout, or arrays of many.

    Attributes:
        tp: tensor ranks. ep: ranks over which experts lie. expert_tp: that divide one expert.
        stream_ranks: over which the tokens outside split layers are divided: tp under sequence
            parallelism, else 1.
    """

    @property
    def tp(self) -> Any: ...
    @property
    def ep(self) -> Any: ...
    @property
    def expert_tp(self) -> Any: ...
    @property
    def stream_ranks(self) -> Any: ...


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


def local_matmul(
    one: Any, tokens: Any, at: Degrees, *, ranks: Any = None, imbalance: Any = 1.0
) -> tuple[Any, Any, Any, Any]:
    """m, n, k and their number on one rank: `cost.device.Device.matmul` is asked for these.

    Args:
        one: a `MatrixProduct`, or a `cost.terms.Matmul` of arrays.
        tokens: of a rank. ranks: that divide it, where not all tensor ranks do.
        imbalance: of experts, tokens of the most loaded rank over the mean.
    """
    rows = tokens * one.count
    if np.any(one.groups > 1):
        matrices = np.maximum(one.groups / at.ep, 1)
        rows = rows * imbalance / np.where(at.expert_tp < at.tp, at.tp, 1) / matrices
        return rows, *divided(one.split, one.n, one.k, at.expert_tp), matrices
    if one.split == OUTSIDE and not one.lora:
        rows = rows / at.stream_ranks
    return rows, *divided(one.split, one.n, one.k, at.tp if ranks is None else ranks), 1


def visible_share(sequence: Any, window: Any, causal: Any) -> Any:
    """Which part of S x S scores is seen: of a causal mask half, less what a window of w keys cuts
    off, w (2S - w) / 2 S^2; without a mask w / S. The diagonal, 1 / 2S, counts as half of it.

    Args:
        sequence: S. window: w; infinite without one. causal: 1 or 0.
    """
    part = np.minimum(window / sequence, 1.0)
    return part * np.where(causal, (2.0 - part) / 2.0, 1.0)


def divided_by(split: str) -> str:
    """What divides an activation: tensor ranks (`inside`), those that divide the sequence
    (`outside`), or nothing (`whole`)."""
    return split if split in (OUTSIDE, WHOLE) else INSIDE


def activation_ranks(split: str, at: Degrees) -> Any:
    """Over how many ranks an activation is divided."""
    return {INSIDE: at.tp, OUTSIDE: at.stream_ranks, WHOLE: 1}[divided_by(split)]


def output_split(split: str) -> str:
    """How the output of a matmul is divided; partial sums (`row`) are not."""
    return {"column": INSIDE, "vocab": INSIDE, OUTSIDE: OUTSIDE}.get(split, WHOLE)


def weight_gradient_operands(
    block: BlockShape,
) -> Iterator[tuple[MatrixProduct, tuple[str, float], tuple[str, float]]]:
    """What the gradients of linear layers' weights are computed from: the matmul, then the gradient
    of its output and its input, each with its split and its elements per token. Of an input that
    several matmuls read, elements are those of the first."""
    inputs = set()
    for p in block.products:
        if p.frozen or p.bare:
            continue
        source = p.input or p.name
        width = 0.0 if source in inputs else p.k * p.count
        inputs.add(source)
        of_input = INSIDE if p.split == "row" else OUTSIDE
        yield p, (output_split(p.split), p.n * p.count), (of_input, width)


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
