"""Terms: the sizes of a ModelShape as numbers that price quickly.

What is linear in tokens and split alike is summed beforehand; matrix products stay apart, since
their efficiency depends on their sizes. Several shapes of one structure stack into columns, one
column per row of a table, and are then priced at once.

Legend: r rows (1 for one shape), o operations of a block.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hocket.spec.model_shape import BlockShape, ModelShape

Floats = NDArray[np.float64]

INSIDE = ("inside", "column", "row", "vocab", "expert")
"""Splits that tensor parallelism divides always; `outside` only with sequence parallelism."""


@dataclasses.dataclass(frozen=True)
class Product:
    """A matrix product [tokens, k] x [k, n] with `count` equal ones; n, k, count: [r]."""

    split: str
    n: Floats
    k: Floats
    count: Floats


@dataclasses.dataclass(frozen=True)
class Core:
    """An attention core: query and value widths over all heads, [r] each."""

    heads: Floats
    kv_heads: Floats
    head_dim: Floats
    value_dim: Floats
    visible: Floats
    """Share of the S x S scores that is computed: 1/2 if causal."""
    window: Floats
    """Keys seen at most; infinity without a window."""


@dataclasses.dataclass(frozen=True)
class BlockTerms:
    """One kind of block. Elements are per token, [r]; `*_outside` is what tensor parallelism
    divides only with sequence parallelism.

    Attributes:
        forward, backward: elements read and written by memory-bound operations.
        kernels: kernels started by one forward, the attention core counted as one.
        saved: bytes held from forward to backward; `core` under selective recompute is not.
        weights: parameters by what divides them: tensor parallelism, nothing, experts.
    """

    products: tuple[Product, ...]
    cores: tuple[Core, ...]
    forward_inside: Floats
    forward_outside: Floats
    backward_inside: Floats
    backward_outside: Floats
    kernels: Floats
    saved_inside: Floats
    saved_outside: Floats
    saved_core: Floats
    saved_square: Floats
    weights_inside: Floats
    weights_outside: Floats
    weights_expert: Floats

    @property
    def reductions(self) -> int:
        """Partial sums of one forward under tensor parallelism: one for each half-layer."""
        return sum(1 for p in self.products if p.split == "row") + (
            1 if any(p.split == "expert" for p in self.products) else 0
        )


@dataclasses.dataclass(frozen=True)
class Terms:
    """A whole model, or as many models as there are rows.

    Attributes:
        kinds: (number of layers of this kind [r], the block).
    """

    hidden: Floats
    vocab: Floats
    layers: Floats
    experts: Floats
    experts_per_token: Floats
    tied: Floats
    kinds: tuple[tuple[Floats, BlockTerms], ...]
    embedding: BlockTerms
    head: BlockTerms


def terms(shape: ModelShape) -> Terms:
    """The terms of one model; every array holds one number."""
    kinds = tuple(
        (_one(shape.layers.count(kind)), _block(shape.blocks[kind]))
        for kind in dict.fromkeys(shape.layers)
    )
    return Terms(
        hidden=_one(shape.hidden),
        vocab=_one(shape.vocab),
        layers=_one(len(shape.layers)),
        experts=_one(shape.experts),
        experts_per_token=_one(shape.experts_per_token),
        tied=_one(shape.tied),
        kinds=kinds,
        embedding=_block(shape.blocks["embedding"]),
        head=_block(shape.blocks["head"]),
    )


def stack(parts: Sequence[Any]) -> Any:
    """Several dataclasses of arrays as one whose arrays have a number for each.

    Tuples must be equally long and text equal in all: shapes of one structure.
    """
    first = parts[0]
    if isinstance(first, np.ndarray):
        return np.concatenate([np.atleast_1d(p) for p in parts])
    if isinstance(first, tuple):
        assert all(len(p) == len(first) for p in parts), "shapes of different structure"
        return tuple(stack([p[i] for p in parts]) for i in range(len(first)))
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        names = [field.name for field in dataclasses.fields(first)]
        return type(first)(**{name: stack([getattr(p, name) for p in parts]) for name in names})
    assert all(p == first for p in parts), "shapes of different structure"
    return first


def _one(value: float) -> Floats:
    return np.array([float(value)])


def _block(block: BlockShape) -> BlockTerms:
    def elements(phase: str, outside: bool) -> Floats:
        chosen = [m for m in block.memory_bound if (m.split == "outside") == outside]
        return _one(sum(getattr(m, phase) for m in chosen))

    def held(outside: bool, *, core: bool = False, square: bool = False) -> Floats:
        chosen = [
            s
            for s in block.saved
            if s.view in ("fused", "both") or square
            if s.square == square and s.selective == core
            if square or core or (s.split == "outside") == outside
        ]
        return _one(sum(s.bytes for s in chosen))

    def weights(splits: tuple[str, ...]) -> Floats:
        return _one(sum(w.elements for w in block.weights if w.split in splits))

    kernels = len(block.products) + len(block.attention)
    kernels += sum(m.kernels for m in block.memory_bound)
    return BlockTerms(
        products=tuple(
            Product(p.split, _one(p.n), _one(p.k), _one(p.count)) for p in block.products
        ),
        cores=tuple(
            Core(
                heads=_one(a.heads),
                kv_heads=_one(a.kv_heads),
                head_dim=_one(a.head_dim),
                value_dim=_one(a.value_dim),
                visible=_one(0.5 if a.causal else 1.0),
                window=_one(np.inf if a.window is None else a.window),
            )
            for a in block.attention
        ),
        forward_inside=elements("forward", False),
        forward_outside=elements("forward", True),
        backward_inside=elements("backward", False),
        backward_outside=elements("backward", True),
        kernels=_one(kernels),
        saved_inside=held(False),
        saved_outside=held(True),
        saved_core=held(False, core=True),
        saved_square=held(False, core=True, square=True) + held(False, square=True),
        weights_inside=weights(("inside", "column", "row", "vocab")),
        weights_outside=weights(("outside",)),
        weights_expert=weights(("expert",)),
    )
