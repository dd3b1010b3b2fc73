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

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from hocket.spec.model_shape import BlockShape, MatrixProduct, Weight

INSIDE, OUTSIDE, WHOLE = "inside", "outside", "whole"

Shards = Sequence[tuple[Any, Any]]
"""(elements of a unit, number of units) of what tensor ranks divide in whole units."""


Degrees = Any
"""Over how many ranks tensors are divided: a `Layout`, or arrays of many (`layout_batch.Layouts`);
`tp`, `ep`, `expert_tp` and `sequence_parallel` of it."""


def stream_ranks(at: Degrees) -> Any:
    """That divide the tokens outside split layers: tp under sequence parallelism, else 1."""
    return 1 + (at.tp - 1) * (at.sequence_parallel > 0)


def tensor_sums(
    block: BlockShape, *, dense: bool = True, experts: bool = True
) -> tuple[int, int, int]:
    """Hidden states that tensor ranks sum in a block and microbatch, of `dense` matmuls, of stacked
    `experts`: forward, of matmuls split by rows and a split embedding; backward, gradients of what
    matmuls split by columns and a split head read; and those of a forward that is run again."""
    products = [p for p in block.products if not p.lora and (experts if p.groups > 1 else dense)]
    rows = [p for p in products if p.split == "row"]
    looked_up = block.kind == "embedding" and any(w.split == "vocab" for w in block.weights)
    head = block.kind == "head" and any(p.split == "vocab" for p in products)
    entered = {p.input or p.name for p in products if p.split == "column"}
    return len(rows) + (dense and looked_up), len(entered) + head, sum(not p.ends for p in rows)


def tensor_gathers(block: BlockShape) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Elements per token of each output that tensor ranks gather in a block's forward, and of each
    gradient of an input in its backward; the other way each rank takes its part."""
    found = [p for p in block.products if p.gathered]
    forward = tuple(p.n * p.count for p in found if p.split == "column")
    return forward, tuple(p.k * p.count for p in found if p.split == "row")


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
    one: Any, tokens: Any, at: Degrees, *, shards: Shards = (), imbalance: Any = 1.0
) -> tuple[Any, Any, Any, Any]:
    """m, n, k and their number on one rank: `cost.device.Device.matmul` is asked for these.

    Args:
        one: a `MatrixProduct`, or a `cost.terms.Matmul` of arrays.
        tokens: of a rank. shards: of its weight.
        imbalance: of experts, tokens of the most loaded rank over the mean.
    """
    rows = tokens * one.count
    if np.any(one.groups > 1):
        matrices = np.maximum(one.groups / at.ep, 1)
        rows = rows * imbalance / np.where(at.expert_tp < at.tp, at.tp, 1) / matrices
        return rows, *divided(one.split, one.n, one.k, at.expert_tp), matrices
    if one.split == OUTSIDE and not one.lora:
        rows = rows / stream_ranks(at)
    n, k = divided(one.split, one.n, one.k, at.tp)
    if shards and one.split == "row":
        k = shard_width(shards, at.tp)
    elif shards:
        n = shard_width(shards, at.tp)
    return rows, n, k, 1


def shard_width(shards: Shards, ranks: Any) -> Any:
    """Columns of a matmul (inner elements, if `row`) on the rank with the most."""
    return sum(width * units_on_rank(units, ranks) for width, units in shards)


def units_on_rank(units: Any, ranks: Any) -> Any:
    """Of the units of a weight, those on the rank with the most; several may hold the same one."""
    return -(-units // ranks) if isinstance(ranks, int) else np.ceil(units / ranks)


def matmul_shards(block: BlockShape, product: MatrixProduct) -> Shards:
    """The shards of the dimension of a matmul that tensor ranks divide, as its weight has them;
    none where there is no such weight in the block, or experts lie over ranks."""
    prefix = weight_prefix(block, product)
    own = next((w for w in block.weights if w.name.startswith(prefix)), None)
    if own is None or OUTSIDE in (own.split, product.split) or product.groups > 1:
        return ()
    whole = product.k if product.split == "row" else product.n
    rows = [(whole * count, own.elements * units, units) for count, units in own.segments]
    if any(part % each for part, each, _ in rows):
        return ()
    return tuple((part // each, units) for part, each, units in rows)


def weight_prefix(block: BlockShape, product: MatrixProduct) -> str:
    """How the names of a matmul's weight and bias begin. A tied head's matrix has the name of the
    embedding's."""
    prefix = f"{product.name}."
    if block.kind == "head" and not any(w.name.startswith(prefix) for w in block.weights):
        return next((w.name for w in block.weights if w.split == "vocab"), prefix)
    return prefix


def visible_share(sequence: Any, window: Any, causal: Any) -> Any:
    """Which part of S x S scores is seen: of a causal mask half, less what a window of w keys cuts
    off, w (2S - w) / 2 S^2; without a mask w / S. The diagonal, 1 / 2S, counts as half of it.

    `window` is infinite without one; `causal` 1 or 0.
    """
    part = np.minimum(window / sequence, 1.0)
    return part * np.where(causal, (2.0 - part) / 2.0, 1.0)


def divided_by(split: str) -> str:
    """What divides an activation: tensor ranks (`inside`), those that divide the sequence
    (`outside`), or nothing (`whole`)."""
    return split if split in (OUTSIDE, WHOLE) else INSIDE


def activation_ranks(split: str, at: Degrees) -> Any:
    """Over how many ranks an activation is divided."""
    return {INSIDE: at.tp, OUTSIDE: stream_ranks(at), WHOLE: 1}[divided_by(split)]


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


def tensor_elements(weight: Weight, tp: Any) -> Any:
    """Elements of a weight on the tensor rank with the most; a number, or an array as `tp` is."""
    if weight.split == "outside":
        return weight.elements
    return sum(n * units_on_rank(units, tp) // units for n, units in weight.segments)


def held_elements(weight: Weight, at: Degrees, experts: tuple[str, ...] = ()) -> Any:
    """Elements of a weight on the rank of a replica with the most.

    Args:
        experts: beginnings of the names of stacked experts, whatever their split.
    """
    if is_expert(weight, experts):
        return tensor_elements(weight, at.expert_tp) // at.ep
    return tensor_elements(weight, at.tp)


def is_expert(weight: Weight, experts: tuple[str, ...]) -> bool:
    """Whether a weight is of experts that may lie over ranks, whatever its split."""
    return weight.split == "expert" or bool(experts and weight.name.startswith(experts))


def stacked_experts(products: Iterable[MatrixProduct]) -> tuple[str, ...]:
    """How the names of stacked experts' weights begin."""
    return tuple({p.name: None for p in products if p.groups > 1})
