"""A stage on a measured machine: seconds of its forward and backward for one microbatch.

Operation by operation, as the model's own code runs without a compiler:

    products      x W^T forward; g W for the input and g^T x for the weight backward
    attention     one flash kernel each way
    the rest      one call each, of so many bytes
    recompute     in backward, before the input's gradient: a layer's forward again but for the
                  product it ends in, or its attention's alone
    gradients     added to those of the microbatch before, or copied into their bucket

Legend: B rows of a microbatch, S sequence, T = B S tokens, t tensor ranks.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

from hocket.cost.device import ATTENTION_BACKWARD, linear_seconds
from hocket.cost.local import (
    activation_ranks,
    local_matmul,
    matmul_shards,
    tensor_elements,
    visible_share,
    weight_prefix,
)
from hocket.cost.measured_rates import BYTES, Rates
from hocket.cost.recomputed import feed_forward_part, latent
from hocket.spec.layout import Layout
from hocket.spec.model_shape import (
    Attention,
    BlockShape,
    MatrixProduct,
    MemoryBound,
    ModelShape,
    Saved,
    Weight,
)
from hocket.spec.plan import AFTER, BEFORE
from hocket.spec.precision import state_bytes

GRADIENT_BYTES = int(state_bytes("fp32").gradient)
"""Of an element: gradients are summed in fp32."""

TIMED = ("eager",)
KEPT = ("eager", "both")
"""Views of rows that an uncompiled model has."""
SHARED = "shared"

ENDS = {"embedding": BEFORE, "head": AFTER}
"""Kinds of blocks that are no layers, with the block in which ZeRO-3 gathers them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seconds:
    """A processor's seconds of one microbatch: F, I, W, and what W takes more in a step's first."""

    forward: float = 0.0
    input: float = 0.0
    weight: float = 0.0
    first_weight: float = 0.0

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(**{k: v + getattr(other, k) for k, v in vars(self).items()})

    def times(self, count: int) -> Seconds:
        """As often."""
        return Seconds(**{k: v * count for k, v in vars(self).items()})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Microbatch:
    """What one forward is given: B rows of S tokens, over the ranks of a layout; experts with even
    routing."""

    batch: int
    sequence: int
    layout: Layout

    @property
    def tokens(self) -> int:
        """T, of one rank."""
        return self.batch * self.sequence // self.layout.cp


def stage_blocks(shape: ModelShape, layers: Iterable[int], first: bool, last: bool) -> list[str]:
    found = ["embedding"] if first else []
    found += [shape.layers[index] for index in layers]
    return found + (["head"] if last else [])


def placed_weights(shape: ModelShape, blocks: Iterable[str]) -> list[tuple[int, Weight]]:
    """The parameters of a stage in the order of use, each with the number of its block; a tied one
    where it comes first."""
    found: dict[str, tuple[int, Weight]] = {}
    for number, kind in enumerate(blocks):
        for weight in shape.blocks[kind].weights:
            name = weight.name if kind in ENDS else f"{number}.{weight.name}"
            found.setdefault(name, (number, weight))
    return list(found.values())


def weights(shape: ModelShape, blocks: Iterable[str]) -> list[Weight]:
    """The same without their blocks."""
    return [weight for _, weight in placed_weights(shape, blocks)]


def trained_weights(held: Iterable[Weight]) -> list[Weight]:
    """Those that have a gradient."""
    return [weight for weight in held if not weight.frozen]


def stage_seconds(
    shape: ModelShape,
    blocks: Iterable[str],
    microbatch: Microbatch,
    rates: Rates,
    *,
    full: Sequence[str] = (),
    selective: Sequence[str] = (),
    modules: Mapping[str, Sequence[str]] | None = None,
) -> Seconds:
    """Of all blocks of a stage, of which some are recomputed `full` or in their attention alone, or
    in norms, activations and up-projections: `modules`, by kind."""
    kinds = list(blocks)
    total = Seconds()
    for kind in dict.fromkeys(kinds):
        total += block_seconds(shape.blocks[kind], microbatch, rates).times(kinds.count(kind))
    for again, seconds in ((full, _layer_again), (selective, _attention_again)):
        for kind in dict.fromkeys(again):
            once = seconds(shape.blocks[kind], microbatch, rates)
            total += Seconds(input=once).times(again.count(kind))
    for module, again in (modules or {}).items():
        for kind in dict.fromkeys(again):
            once = _module_again(shape.blocks[kind], module, microbatch, rates)
            total += Seconds(input=once).times(again.count(kind))
    return total + _gradients(weights(shape, kinds), microbatch, rates)


def _module_again(block: BlockShape, kind: str, microbatch: Microbatch, rates: Rates) -> float:
    """At most: all operations of forward that tensor ranks do not share (norms), or that they do
    (activation functions, also those of a feed-forward layer, with its matmuls)."""
    matmuls = 0.0
    if kind in ("mla_up", "mlp"):
        part = feed_forward_part(block).products
        up = [p for p in block.products if latent(p)] if kind == "mla_up" else part
        matmuls = sum(_product(p, block, microbatch, rates).forward for p in up if not p.ends)
        if kind == "mla_up" or not part:
            return matmuls
    outside = kind == "norm"
    rows = [row for row in block.unfused if row.view in TIMED and not row.square]
    return matmuls + sum(
        _memory_bound(row, microbatch, rates).forward
        for row in rows
        if (row.split == "outside") == outside
    )


def _layer_again(block: BlockShape, microbatch: Microbatch, rates: Rates) -> float:
    forward = block_seconds(block, microbatch, rates).forward
    products = [p for p in block.products if not p.lora]
    if products:
        forward -= _product(products[-1], block, microbatch, rates).forward
    return forward


def _attention_again(block: BlockShape, microbatch: Microbatch, rates: Rates) -> float:
    return sum(_attention(core, microbatch, rates).forward for core in block.attention)


def block_seconds(block: BlockShape, microbatch: Microbatch, rates: Rates) -> Seconds:
    """Of one block, without its gradients' accumulation."""
    total = Seconds()
    for product in block.products:
        total += _product(product, block, microbatch, rates)
    for attention in block.attention:
        total += _attention(attention, microbatch, rates)
    loss = block.kind == "head"
    for row in block.unfused:
        if row.view in TIMED and not (loss and row.split == "vocab"):
            total += _memory_bound(row, microbatch, rates)
    if loss:
        total += _loss(block, microbatch, rates)
    if block.kind == "embedding":
        total += _embedding(block, microbatch, rates)
    modules = len(block.products) + len(block.memory_bound)
    return total + Seconds(forward=modules * rates.call("module"))


def _product(
    product: MatrixProduct, block: BlockShape, microbatch: Microbatch, rates: Rates
) -> Seconds:
    shards = matmul_shards(block, product)
    sizes = local_matmul(product, microbatch.tokens, microbatch.layout, shards=shards)
    m, n, k, batch = (max(1, round(float(size))) for size in sizes)
    forward, of_input, of_weight = linear_seconds(rates, m, n, k, batch, frozen=product.frozen)
    return Seconds(forward=forward, input=of_input, weight=of_weight)


def _attention(core: Attention, microbatch: Microbatch, rates: Rates) -> Seconds:
    heads = core.heads if core.split == "outside" else max(1, core.heads // microbatch.layout.tp)
    shape = (microbatch.batch, heads, microbatch.sequence, core.head_dim)
    known = rates.kernel("attention", shape)
    if known is None:  # as its four products, forward two
        b, s = microbatch.batch * heads, microbatch.sequence
        forward = b * 2 * rates.product("nn", s, s, core.head_dim) / microbatch.layout.cp
        return Seconds(forward=forward, input=ATTENTION_BACKWARD * forward)
    forward, backward = known
    # Measured causal and without a window: half of the scores.
    seen = 2 * float(visible_share(microbatch.sequence, core.window or math.inf, True))
    seen /= microbatch.layout.cp
    return Seconds(forward=forward * seen, input=backward * seen)


def _memory_bound(row: MemoryBound, microbatch: Microbatch, rates: Rates) -> Seconds:
    split = activation_ranks(row.split, microbatch.layout)
    # Elements are of 16 bits, whatever they stand for.
    forward = 2.0 * row.forward * microbatch.tokens / split
    backward = 2.0 * row.backward * microbatch.tokens / split
    return Seconds(
        forward=rates.layer("forward", forward, row.kernels),
        input=rates.layer("backward", backward, row.backward_kernels),
    )


def _loss(block: BlockShape, microbatch: Microbatch, rates: Rates) -> Seconds:
    """The runtime's own cross-entropy, over this rank's part of the vocabulary."""
    rows = max(1, round(logits_width(block, microbatch)))
    known = rates.kernel("cross-entropy", (microbatch.tokens, rows))
    if known is None:
        nbytes = float(microbatch.tokens * rows * BYTES[rates.dtype])
        return Seconds(forward=rates.streams(6 * nbytes, 3), input=rates.streams(2 * nbytes, 1))
    return Seconds(forward=known[0], input=known[1])


def _embedding(block: BlockShape, microbatch: Microbatch, rates: Rates) -> Seconds:
    total = Seconds()
    for weight in block.weights:
        if weight.split != "vocab" and weight.units <= 1:
            continue
        rows = max(1, weight.units)
        width = max(1, weight.elements // rows)
        held = max(1, tensor_elements(weight, microbatch.layout.tp) // width)
        known = rates.kernel("embedding", (microbatch.tokens, held, width))
        if known is None:
            read = 2.0 * microbatch.tokens * width * BYTES[rates.dtype]
            dense = float(held * width * GRADIENT_BYTES)
            known = rates.stream(read), rates.stream(read + dense)
        total += Seconds(forward=known[0], input=0.0 if weight.frozen else known[1])
    return total


def _gradients(held: list[Weight], microbatch: Microbatch, rates: Rates) -> Seconds:
    """Adding to the gradients of the microbatches before; the first are taken as they come, or
    copied into the bucket that is summed over the replicas."""
    sizes = [
        tensor_elements(w, microbatch.layout.tp) * GRADIENT_BYTES for w in trained_weights(held)
    ]
    added = sum(rates.stream(3.0 * size) for size in sizes)
    copied = sum(rates.stream(2.0 * size) for size in sizes) if microbatch.layout.dp > 1 else 0.0
    calls = len(sizes) * rates.backward("add")
    return Seconds(weight=added + calls, first_weight=copied - added)


def saved_rows(
    shape: ModelShape, kind: str, microbatch: Microbatch, element_bytes: int
) -> list[tuple[str, int]]:
    """What a block holds of one microbatch from forward to backward: tensors' names and bytes."""
    block = shape.blocks[kind]
    found = [
        (row.name, round(row_bytes(row, microbatch)))
        for row in block.saved
        if row.view in KEPT and not (kind == "head" and row.split == "vocab")
    ]
    if kind == "head":  # the logits, which the loss overwrites by their gradient
        rows = logits_width(block, microbatch)
        found.append(("logits", round(rows * element_bytes * microbatch.tokens)))
    return found


def head_product(block: BlockShape) -> MatrixProduct:
    """The matmul that makes the logits: the widest, but for a vocabulary that is smaller than what
    a head has before it (RemBERT's own width)."""
    return max(block.products, key=lambda p: (p.split == "vocab", p.n))


def table_bytes(shape: ModelShape, blocks: Iterable[str], microbatch: Microbatch) -> int:
    """What all blocks of a stage save together of one microbatch: cosines and sines."""
    rows = {row.name: row for kind in blocks for row in shape.blocks[kind].saved}
    return round(sum(row_bytes(row, microbatch) for row in rows.values() if row.view == SHARED))


def behind_first_adapter(block: BlockShape, rows: dict[str, int]) -> dict[str, int]:
    """What the first layer saves of a model whose adapters alone are trained: nothing that leads to
    the first adapter's input has a gradient."""
    names = {p.name for p in block.products}
    first = next((p.input for p in block.products if f"{p.name}.lora_A" in names), "")
    before = first.partition(":")[0]
    return {
        name: nbytes
        for name, nbytes in rows.items()
        if name == first or name.partition(":")[0] not in ("input", before)
    }


def narrowing(block: BlockShape) -> str:
    """How the names of the weights begin that take a block's widest inner tensor, or make the
    logits: theirs are its first gradients."""
    if block.kind == "head":
        return weight_prefix(block, head_product(block))
    rows = [p for p in block.products if p.split in ("row", "outside")]
    return weight_prefix(block, max(rows, key=lambda p: p.k * p.count)) if rows else ""


def logits_width(block: BlockShape, microbatch: Microbatch) -> float:
    """Rows of the vocabulary on one rank, as a head's matmul has them."""
    head = head_product(block)
    return float(local_matmul(head, 1, microbatch.layout, shards=matmul_shards(block, head))[1])


def row_bytes(row: Saved, microbatch: Microbatch) -> float:
    """Bytes on one rank of what a block saves of one microbatch."""
    split = activation_ranks(row.split, microbatch.layout)
    square = microbatch.sequence if row.square else 1
    return row.bytes * microbatch.tokens * square / split
