"""Terms: the sizes of a ModelShape as numbers that price quickly.

What is linear in tokens and split equally is summed beforehand; matrix products stay apart, since
their efficiency depends on their sizes. Matmuls that read the same tensor and are split equally run
as one (query, key and value; gate and up), and the sums of their input's gradients go with them:
so a model costs the same however its code stores these matrices. Several shapes of one structure
stack into columns, one column per row of a table, and are then estimated at once.

Legend: r rows (1 for one shape), o operations of a block.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hocket.cost.local import (
    INSIDE,
    OUTSIDE,
    WHOLE,
    Degrees,
    divided_by,
    is_expert,
    matmul_shards,
    stacked_experts,
    stream_ranks,
    tensor_gathers,
    tensor_sums,
    together,
    units_on_rank,
    weight_gradient_operands,
)
from hocket.cost.recomputed import feed_forward_part, freed, freed_fused, latent
from hocket.spec.model_shape import PREDICTION, BlockShape, MatrixProduct, ModelShape
from hocket.spec.recompute import MADE_AGAIN

Floats = NDArray[np.float64]

GRADIENT_SUMS = "gradient sums"
"""The entry of a shape that adds gradients of a tensor with several readers: three elements each,
two read and one written."""


@dataclasses.dataclass(frozen=True)
class Matmul:
    """[tokens x count, k] x [k, n], the rows divided among `groups` matrices (experts); [r]."""

    split: str
    n: Floats
    k: Floats
    count: Floats
    groups: Floats
    frozen: bool = False
    lora: bool = False
    latent: bool = False
    """Whether it projects a latent vector up (MLA), which recompute of modules runs again."""
    feed_forward: bool = False
    """Whether it is of a feed-forward layer without experts, which recompute of `mlp` repeats."""
    stops: bool = False
    """Whether hocket runs that layer again only up to it."""
    shards: tuple[tuple[Floats, Floats], ...] = ()
    """As `cost.local.Shards` of its weight, [r] each; of matmuls that run as one, all of theirs."""


@dataclasses.dataclass(frozen=True)
class WeightTerms:
    """Weights that tensor ranks hold in equal units, [r] each.

    Attributes:
        expert: of stacked experts, divided by ep as well.
        divided: whether tensor ranks divide them at all. units: how many there are.
        stored: elements of a unit, as stored. trained: those of them that are not frozen.
    """

    expert: bool
    divided: bool
    units: Floats
    stored: Floats
    trained: Floats

    def units_on_rank(self, ranks: Floats) -> Floats:
        """Of its units, those on the rank with the most."""
        found: Floats = units_on_rank(self.units, ranks) if self.divided else self.units
        return found


@dataclasses.dataclass(frozen=True)
class Core:
    """An attention core: query and value widths over all heads, [r] each."""

    heads: Floats
    kv_heads: Floats
    head_dim: Floats
    value_dim: Floats
    causal: Floats
    """1 where a query sees no later key, else 0."""
    window: Floats
    """Keys seen at most; infinity without a window."""
    passes: Floats
    """Elements read and written per score, forward, where attention is no fused kernel."""
    passes_backward: Floats
    split: str
    """`inside` where heads are divided over tensor ranks, else `outside`."""


@dataclasses.dataclass(frozen=True)
class Divided:
    """Sums of elements or bytes per token, by what divides them (`cost.local.divided_by`), [r]."""

    inside: Floats
    outside: Floats
    whole: Floats

    @classmethod
    def of(cls, rows: Iterable[tuple[str, float]]) -> Divided:
        """Of the rows of one shape: their split and size."""
        sums = {INSIDE: 0.0, OUTSIDE: 0.0, WHOLE: 0.0}
        for split, size in rows:
            sums[divided_by(split)] += size
        return cls(*map(_one, sums.values()))

    def on_rank(self, at: Degrees) -> Floats:
        """What a rank has of all of them."""
        found: Floats = self.inside / at.tp + self.outside / stream_ranks(at) + self.whole
        return found


@dataclasses.dataclass(frozen=True)
class BlockTerms:
    """One kind of block. Elements are per token, [r].

    Attributes:
        layer: False for the embedding and the head, which are not recomputed.
        handed_inputs, handed_state: of a row, what recurrent layers hand on along the sequence.
        sums, expert_sums: as `cost.local.tensor_sums`, of dense matmuls and of experts.
            `feed_forward_sums`: of those in a feed-forward layer without experts.
        gathers: as `cost.local.tensor_gathers`.
        forward, backward: elements read and written by memory-bound operations.
        kernels: kernels started by one forward, the attention core counted as one.
        kernels_backward: by one backward.
        saved: bytes held from forward to backward; `core` under selective recompute is not.
            `expert_outputs`, which only the gradient of the routing weights needs, are apart.
            `inputs`: of `saved`, inputs of products that nothing else needs, less half of those
            that attention needs too: what is freed twice over where inputs are saved in 8 bits.
        saved_square_own: scores that the model's own code saves where its attention is not a
            flash kernel (gpt-oss, whose attention has sinks), times the sequence.
        saved_routed: of `saved`, rows of tokens on the ranks of their experts.
        freed: of `saved`, what recompute of each kind of module makes again.
        deferred: elements that the gradients of linear layers' weights are computed from: inputs,
            once each, and gradients of outputs.
        working: gradients of the widest inner tensors at once, in its backward; 0 where kernels are
            fused, whose memory is fitted.
        weights: parameters by what divides them.
        buffers: elements of tensors that are no parameters, whole on every rank.
    """

    layer: bool
    sums: tuple[int, int, int]
    expert_sums: tuple[int, int, int]
    feed_forward_sums: tuple[int, int, int]
    gathers: tuple[tuple[Floats, ...], tuple[Floats, ...]]
    products: tuple[Matmul, ...]
    cores: tuple[Core, ...]
    handed_inputs: Floats
    handed_state: Floats
    forward: Divided
    backward: Divided
    kernels: Floats
    kernels_backward: Floats
    saved: Divided
    saved_expert_outputs: Floats
    saved_inputs: Divided
    saved_core: Floats
    saved_square: Floats
    saved_square_own: Floats
    freed: tuple[tuple[str, Divided], ...]
    saved_routed: Divided
    deferred: Divided
    working: Divided
    weights: tuple[WeightTerms, ...]
    buffers: Floats

    @property
    def has_experts(self) -> bool:
        return any(each.expert for each in self.weights)

    @property
    def has_feed_forward(self) -> bool:
        """Whether recompute of `mlp` runs something of it again."""
        return any(p.feed_forward for p in self.products)


@dataclasses.dataclass(frozen=True)
class Terms:
    """A whole model, or as many models as there are rows.

    Attributes:
        kinds: (number of layers of this kind [r], the block).
    """

    hidden: Floats
    layers: Floats
    experts_per_token: Floats
    tied: Floats
    kinds: tuple[tuple[Floats, BlockTerms], ...]
    embedding: BlockTerms
    head: BlockTerms
    prediction: tuple[tuple[Floats, BlockTerms], ...]
    """Layers for multi-token prediction, behind the last one: as `kinds`; none, or one kind."""

    @property
    def predictions(self) -> Floats:
        """Layers for multi-token prediction, [r]."""
        found: Floats = sum((count for count, _ in self.prediction), np.zeros_like(self.hidden))
        return found


def terms(shape: ModelShape, *, eager: bool = False) -> Terms:
    """The terms of one model; every array holds one number.

    Args:
        eager: bytes saved for backward are those of the model's own code, operation by operation;
            else those of fused kernels.
    """
    kinds = tuple(
        (_one(shape.layers.count(kind)), _block(shape.blocks[kind], layer=True, eager=eager))
        for kind in dict.fromkeys(shape.layers)
    )
    return Terms(
        hidden=_one(shape.hidden),
        layers=_one(len(shape.layers)),
        experts_per_token=_one(shape.experts_per_token),
        tied=_one(shape.tied),
        kinds=kinds,
        embedding=_block(shape.blocks["embedding"], eager=eager),
        head=_block(shape.blocks["head"], eager=eager),
        prediction=(
            (
                _one(shape.prediction_layers),
                _block(shape.blocks[PREDICTION], layer=True, eager=eager),
            ),
        )
        if shape.prediction_layers
        else (),
    )


def stack_terms(parts: Sequence[Any]) -> Any:
    """Several dataclasses of arrays as one whose arrays have a number for each.

    Tuples must be equally long and text equal in all: shapes of one structure.
    """
    first = parts[0]
    if isinstance(first, np.ndarray):
        return np.concatenate([np.atleast_1d(p) for p in parts])
    if isinstance(first, tuple):
        assert all(len(p) == len(first) for p in parts), "shapes of different structure"
        return tuple(stack_terms([p[i] for p in parts]) for i in range(len(first)))
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        names = [field.name for field in dataclasses.fields(first)]
        return type(first)(
            **{name: stack_terms([getattr(p, name) for p in parts]) for name in names}
        )
    assert all(p == first for p in parts), "shapes of different structure"
    return first


def _one(value: float) -> Floats:
    return np.array([float(value)])


def structure(model: Terms) -> tuple[Any, ...]:
    """What must be equal for `stack_terms`."""
    blocks = [block for _, block in (*model.kinds, *model.prediction)]
    blocks += [model.embedding, model.head]
    return tuple(
        (
            b.sums,
            b.expert_sums,
            b.feed_forward_sums,
            tuple(map(len, b.gathers)),
            tuple((p.split, len(p.shards), p.feed_forward, p.stops) for p in b.products),
            tuple((w.expert, w.divided) for w in b.weights),
            tuple(c.split for c in b.cores),
        )
        for b in blocks
    )


def has_latent(shape: ModelShape) -> bool:
    """Whether a model has latent attention (MLA): keys and values projected up from a vector."""
    return any(latent(p) for block in shape.blocks.values() for p in block.products)


def _freed(block: BlockShape, kind: str, eager: bool) -> Divided:
    """What recompute of one kind of module frees, in bytes."""
    if eager:
        parts = dict(freed(block, (kind,)))
        rows = [(row, parts.get(row.name, 0.0)) for row in block.saved]
    else:
        rows = [(row, 1.0) for row in freed_fused(block, kind)]
    return Divided.of(
        (row.split, part * row.bytes)
        for row, part in rows
        if row.view in ("eager" if eager else "fused", "both") and not row.square
    )


def _expert_outputs(block: BlockShape) -> float:
    """Bytes of what a token's experts return, saved where it is weighted and added up."""
    last = next((p for p in reversed(block.products) if p.groups > 1), None)
    if last is None:
        return 0.0
    size = 2.0 * last.n * last.count
    found = any(
        row.name == "add" and row.bytes >= size and row.split == "outside"
        for row in block.saved
        if row.view in ("fused", "both")
    )
    return size if found else 0.0


def _routed(block: BlockShape, views: Sequence[str]) -> Divided:
    """Bytes of what routed experts save on the ranks that hold them."""
    experts = {p.name for p in block.products if p.groups > 1}
    return Divided.of(
        # Whole inputs are divided with the sequence, as what other ranks' tokens bring is not.
        (INSIDE if divided_by(row.split) == INSIDE else OUTSIDE, row.bytes)
        for row in block.saved
        if row.name.removesuffix(" input").partition(":")[0] in experts
        and row.view in views
        and not row.square
    )


def _working(block: BlockShape) -> Divided:
    """Bytes of the gradients of the widest inner tensors at once, as the replay of a step takes
    them (`cost.replayed_blocks`), by what divides them: of two, or of an experts' output that is
    weighted in fp32, which every tensor rank has of all tokens."""
    rows = [p for p in block.products if p.split in ("row", "outside")]
    last = {p.name.rpartition(".")[0] or p.name: p for p in block.products if p.groups > 1}
    found = {"inside": 0.0, "outside": 0.0, "whole": 0.0}
    for p in rows:
        split = "inside" if p.split == "row" else "whole"
        found[split] = max(found[split], 2.0 * 2.0 * p.k * p.count)
    weighted = [p.n * p.count * (3 * 4 + 2.0) for p in last.values() if p in rows]
    found["whole"] = max(found["whole"], *weighted, 0.0)
    for row in block.saved:
        shown = row.view in ("eager", "both") and not row.square
        if shown and not row.name.startswith(("input", *last)):
            split = divided_by(row.split)
            found[split] = max(found[split], 2.0 * row.bytes)
    return Divided.of(found.items())


def _inputs(block: BlockShape) -> Divided:
    """Bytes of products' inputs; an output of attention is saved in 8 bits as well."""
    names = {f"{p.name} input" for p in block.products if not p.frozen}
    own = [
        (row.split, row.bytes)
        for row in block.saved
        if row.name in names and row.view in ("fused", "both") and not row.square
    ]
    again = [
        (p.split, -2.0 * p.k * p.count)
        for p in block.products
        if p.input.rpartition(":")[2] == "attention"
    ]
    return Divided.of(
        (OUTSIDE if split == OUTSIDE else INSIDE, size) for split, size in (*own, *again)
    )


def _shards(block: BlockShape, same: Sequence[MatrixProduct]) -> tuple[tuple[Floats, Floats], ...]:
    """Of matmuls that run as one."""
    found: dict[int, float] = {}
    each = [matmul_shards(block, p) for p in same]
    if not all(each):
        return ()
    for width, units in itertools.chain(*(each[:1] if same[0].split == "row" else each)):
        found[units] = found.get(units, 0.0) + width
    return tuple((_one(width), _one(units)) for units, width in found.items())


def _weights(block: BlockShape) -> tuple[WeightTerms, ...]:
    experts = stacked_experts(block.products)
    found: dict[tuple[bool, bool, int], list[float]] = {}
    for w in block.weights:
        for count, units in w.segments:
            divided = w.split != OUTSIDE
            key = is_expert(w, experts), divided, units if divided else 1
            row = found.setdefault(key, [0.0, 0.0])
            row[0] += count * w.stored / key[2]
            row[1] += 0.0 if w.frozen else count * w.stored / key[2]
    return tuple(
        WeightTerms(expert, divided, _one(units), _one(stored), _one(trained))
        for (expert, divided, units), (stored, trained) in found.items()
    )


def _block(block: BlockShape, *, layer: bool = False, eager: bool = False) -> BlockTerms:
    merged = together(block.products)
    products = [dataclasses.replace(same[0], n=sum(p.n for p in same)) for same in merged]
    joined = len(block.products) - len(products)
    summed = sum(p.k for p in block.products) - sum(p.k for p in products)
    sums = sum(m.backward for m in block.memory_bound if m.name == GRADIENT_SUMS)

    views = ("eager" if eager else "fused", "both")

    def held(split: str, *, core: bool = False, square: bool = False) -> Floats:
        chosen = [
            s
            for s in block.saved
            if s.view in views or (square and s.view == "core")
            if s.square == square and s.selective == core
            if square or core or divided_by(s.split) == split
        ]
        return _one(sum(s.bytes for s in chosen))

    outputs = 0.0 if eager else _expert_outputs(block)
    squares = [m for m in block.unfused if m.square]
    heads = max(sum(a.heads for a in block.attention), 1)
    passes = sum(m.forward for m in squares) / heads
    passes_backward = sum(m.backward for m in squares) / heads
    others = len(products) + len(block.attention)
    operands = (side for _, *both in weight_gradient_operands(block) for side in both)
    rows = block.memory_bound
    joint = (OUTSIDE, -min(3.0 * summed, sums))
    part = feed_forward_part(block) if layer else dataclasses.replace(block, products=())
    again = {p.name: p.ends for p in part.products}
    whole, gradients = tensor_gathers(block)
    return BlockTerms(
        layer=layer,
        sums=tensor_sums(block, experts=False),
        expert_sums=tensor_sums(block, dense=False),
        feed_forward_sums=tensor_sums(part),
        gathers=(tuple(map(_one, whole)), tuple(map(_one, gradients))),
        products=tuple(
            Matmul(
                p.split,
                _one(p.n),
                _one(p.k),
                _one(p.count),
                _one(p.groups),
                p.frozen,
                p.lora,
                latent(p),
                p.name in again,
                again.get(p.name, False),
                _shards(block, names),
            )
            for p, names in zip(products, merged, strict=True)
        ),
        cores=tuple(
            Core(
                heads=_one(a.heads),
                kv_heads=_one(a.kv_heads),
                head_dim=_one(a.head_dim),
                value_dim=_one(a.value_dim),
                causal=_one(a.causal),
                window=_one(np.inf if a.window is None else a.window),
                passes=_one(passes),
                passes_backward=_one(passes_backward),
                split=a.split,
            )
            for a in block.attention
        ),
        handed_inputs=_one(sum(each.inputs for each in block.handed)),
        handed_state=_one(sum(each.state for each in block.handed)),
        forward=Divided.of((m.split, m.forward) for m in rows),
        backward=Divided.of([*((m.split, m.backward) for m in rows), joint]),
        kernels=_one(others + sum(m.kernels for m in block.memory_bound)),
        kernels_backward=_one(
            others
            + sum(not p.frozen for p in products)
            + sum(m.backward_kernels for m in block.memory_bound)
            - (joined if sums else 0)
        ),
        saved=Divided(held(INSIDE), held(OUTSIDE) - outputs, held(WHOLE)),
        saved_expert_outputs=_one(outputs),
        saved_inputs=_inputs(block),
        saved_core=held("inside", core=True),
        saved_square=held("inside", core=True, square=True) + held("inside", square=True),
        saved_square_own=_one(
            sum(s.bytes for s in block.saved if s.square and s.view == "eager" and eager)
        ),
        freed=tuple((kind, _freed(block, kind, eager)) for kind in MADE_AGAIN if layer),
        saved_routed=_routed(block, views),
        deferred=Divided.of(operands),
        working=_working(block) if eager and layer else Divided.of(()),
        weights=_weights(block),
        buffers=_one(block.buffers),
    )
