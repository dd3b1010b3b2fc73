"""ModelShape: what one model costs, as data.

One instance of each kind of block is described: its operations with their sizes, its parameters,
and what it saves for backward. Sizes are per token (times S where a size grows with the sequence),
so that one description serves every batch, sequence length and layout.

`split` says how tensor parallelism divides a thing over t ranks, and sequence parallelism:

    column   outputs n / t            row   inputs k / t          vocab  vocabulary rows / t
    inside   between column and row: everything / t
    outside  replicated: whole on every rank, / t under sequence parallelism
    expert   over expert parallelism, then t
"""

from __future__ import annotations

import dataclasses
from typing import Any

SPLITS = ("column", "row", "vocab", "inside", "outside", "expert")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatrixProduct:
    """[tokens, k] x [k, n]; `count` equal ones (experts reached by each token)."""

    name: str
    n: int
    k: int
    split: str
    count: float = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attention:
    """Softmax(QK^T)V: heads, key/value heads, widths, and the window (None: all)."""

    name: str
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    causal: bool = True
    window: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryBound:
    """An operation limited by memory: elements read and written per token, forward and backward."""

    name: str
    forward: float
    backward: float
    split: str
    kernels: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Saved:
    """Bytes held per token from forward to backward (`square`: times sequence length as well).

    `view`: `fused` (flash attention, fused norms and activations), `eager`, or `both`.
    `selective`: not held under selective recompute (the attention core).
    """

    name: str
    bytes: float
    split: str
    square: bool = False
    view: str = "both"
    selective: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Weight:
    """One parameter: elements, how it is split, and the units that must divide (heads)."""

    name: str
    elements: int
    split: str
    units: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockShape:
    """One kind of block."""

    kind: str
    products: tuple[MatrixProduct, ...] = ()
    attention: tuple[Attention, ...] = ()
    memory_bound: tuple[MemoryBound, ...] = ()
    saved: tuple[Saved, ...] = ()
    weights: tuple[Weight, ...] = ()

    @property
    def num_parameters(self) -> int:
        return sum(w.elements for w in self.weights)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A whole model: the kinds of its blocks, and which kind each layer is.

    Attributes:
        layers: kind of each layer, in order.
        blocks: kind to shape; holds every kind in `layers`, and `embedding` and `head`.
        heads, kv_heads: what tensor parallelism must divide (kv_heads may be held by several).
        experts, experts_per_token: 0 for dense models.
    """

    name: str
    hidden: int
    vocab: int
    heads: int
    kv_heads: int
    layers: tuple[str, ...]
    blocks: dict[str, BlockShape]
    tied: bool = False
    experts: int = 0
    experts_per_token: int = 0

    @property
    def num_parameters(self) -> int:
        """Parameters, tied ones once."""
        total = sum(self.blocks[kind].num_parameters for kind in self.layers)
        total += self.blocks["embedding"].num_parameters
        head = self.blocks["head"]
        tied = sum(w.elements for w in head.weights if w.split == "vocab") if self.tied else 0
        return total + head.num_parameters - tied

    def to_json(self) -> dict[str, Any]:
        """A JSON form with an exact inverse."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> ModelShape:
        """The inverse of `to_json`."""
        kinds: dict[str, type[Any]] = {
            "products": MatrixProduct,
            "attention": Attention,
            "memory_bound": MemoryBound,
            "saved": Saved,
            "weights": Weight,
        }
        blocks = {
            name: BlockShape(
                kind=block["kind"],
                **{f: tuple(kind(**row) for row in block[f]) for f, kind in kinds.items()},
            )
            for name, block in data["blocks"].items()
        }
        return cls(**{**data, "blocks": blocks, "layers": tuple(data["layers"])})
