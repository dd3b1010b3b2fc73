"""Placement: where one parameter of one rank lies in the whole.

A rank's local tensor is a set of blocks, each a box of the global tensor. That covers plain
slices, fused projections split segment by segment (several blocks), key/value heads held by
several ranks (a block with copies), uneven vocabularies, and what is simply replicated (one block
that is everything).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

_LARGEST = 2**62


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorBlock:
    """A box of the global tensor and where it lies in the local one.

    Attributes:
        start: first index in the global tensor, per dim.
        local: first index in the local tensor, per dim.
        size: extent per dim.
        copies: ranks of the tensor axis that hold this same box (1: only this one). Those ranks
            are consecutive along the axis: `index // copies` is equal for all of them.
    """

    start: tuple[int, ...]
    local: tuple[int, ...]
    size: tuple[int, ...]
    copies: int = 1

    @property
    def in_global(self) -> tuple[slice, ...]:
        """Index of the box in the global tensor."""
        return tuple(slice(s, s + n) for s, n in zip(self.start, self.size, strict=True))

    @property
    def in_local(self) -> tuple[slice, ...]:
        """Index of the box in the local tensor."""
        return tuple(slice(s, s + n) for s, n in zip(self.local, self.size, strict=True))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
    """One parameter on one rank.

    Attributes:
        name: global name, as Hugging Face writes it in a checkpoint.
        shape: global shape.
        local_shape: shape of this rank's tensor.
        blocks: which boxes of the global tensor the local one holds; together they tile it.
        sharded: mesh axes over which ranks hold different parts.
        replicated: mesh axes over which ranks hold the same part.
        grad_sum: mesh axes over which this rank's gradient is only a part of the sum, and must be
            summed once a step (besides dp, over which every gradient is summed).
        tie: name of the parameter that this one shares its values with, or None. Tied copies on
            several stages have their gradients summed; the norm counts the tie's name once.
    """

    name: str
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    blocks: tuple[TensorBlock, ...]
    sharded: tuple[str, ...] = ()
    replicated: tuple[str, ...] = ()
    grad_sum: tuple[str, ...] = ()
    tie: str | None = None

    def __post_init__(self) -> None:
        held = sum(math.prod(b.size) for b in self.blocks)
        assert held == math.prod(self.local_shape), (self.name, held, self.local_shape)

    @property
    def is_expert(self) -> bool:
        """Whether ep and etp place it, and the ranks of `expert_data` hold copies of it."""
        return "ep" in self.sharded

    @property
    def has_copies(self) -> bool:
        """Whether some block is held by several ranks of the tensor axis."""
        return any(b.copies > 1 for b in self.blocks)

    def pairs(self) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
        """(index in the global tensor, index in the local tensor) of each block."""
        for block in self.blocks:
            yield block.in_global, block.in_local

    @classmethod
    def whole(
        cls,
        name: str,
        shape: tuple[int, ...],
        *,
        grad_sum: tuple[str, ...] = (),
        tie: str | None = None,
    ) -> Placement:
        """A parameter replicated."""
        zeros = (0,) * len(shape)
        return cls(
            name=name,
            shape=shape,
            local_shape=shape,
            blocks=(TensorBlock(start=zeros, local=zeros, size=shape),),
            grad_sum=grad_sum,
            tie=tie,
        )

    def to_json(self) -> dict[str, object]:
        """A JSON form with an exact inverse."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, object]) -> Placement:
        """The inverse of `to_json`. Raises ValueError for blocks outside of their tensors."""

        def ints(values: object) -> tuple[int, ...]:
            found = tuple(int(v) for v in values)  # type: ignore[attr-defined]
            if any(not 0 <= value <= _LARGEST for value in found):
                raise ValueError(f"{found} are not sizes")
            return found

        def words(values: object) -> tuple[str, ...]:
            return tuple(str(v) for v in values)  # type: ignore[attr-defined]

        blocks = tuple(
            TensorBlock(
                start=ints(b["start"]),
                local=ints(b["local"]),
                size=ints(b["size"]),
                copies=int(b["copies"]),
            )
            for b in data["blocks"]  # type: ignore[attr-defined]
        )
        tie = data.get("tie")
        shape, local_shape = ints(data["shape"]), ints(data["local_shape"])
        for block in blocks:
            for start, within in ((block.start, shape), (block.local, local_shape)):
                fits = len(start) == len(block.size) == len(within) and all(
                    first + size <= end
                    for first, size, end in zip(start, block.size, within, strict=True)
                )
                if not fits:
                    raise ValueError(f"{data['name']!r:.60}: {block} is outside of {within}")
        return cls(
            name=str(data["name"]),
            shape=shape,
            local_shape=local_shape,
            blocks=blocks,
            sharded=words(data["sharded"]),
            replicated=words(data["replicated"]),
            grad_sum=words(data["grad_sum"]),
            tie=None if tie is None else str(tie),
        )
