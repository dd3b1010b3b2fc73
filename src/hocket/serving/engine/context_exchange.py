"""What context ranks share of a served step, and what they exchange in each layer.

    BlockPart    which tokens of each block a rank holds
    TokenShare   which tokens of a step it computes: a part of a prompt's step, all of a small one
    Exchange     queries, keys and values of all tokens; then what each rank attended to, merged

Legend: T tokens of a step, t of this rank, A query heads, E value size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hocket.runtime.collectives import all_gather, all_reduce, reduce_scatter
from hocket.runtime.mesh import Axis
from hocket.runtime.record import Recorder
from hocket.serving.engine.attention import Options
from hocket.serving.engine.attention_chunks import sunk
from hocket.spec.serving import SPLIT_TOKENS


@dataclasses.dataclass(frozen=True, slots=True)
class BlockPart:
    """Tokens of each block that a rank holds: `size` of `span`, from `begin` on."""

    span: int
    size: int
    begin: int

    @classmethod
    def of(cls, block_size: int, axis: Axis) -> BlockPart:
        """That of this rank of the axis."""
        size = block_size // axis.size
        return cls(block_size, size, size * axis.index)

    def positions(self, first: int, columns: int, device: torch.device) -> Tensor:
        """Positions in the sequence of the held tokens of blocks `first` and so many: [n]."""
        block = torch.arange(first, first + columns, device=device).unsqueeze(1) * self.span
        return (block + self.begin + torch.arange(self.size, device=device)).view(-1)

    def own(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """Which places of whole blocks are held [T] bool, and where in the held parts [T]."""
        blocks = places // self.span
        at = places - blocks * self.span - self.begin
        return (at >= 0) & (at < self.size), blocks * self.size + at


@dataclasses.dataclass(frozen=True, slots=True)
class TokenShare:
    """The tokens of a step that one of `ranks` context ranks computes: `each` of `count`, from
    `first` on, the last padded."""

    count: int
    each: int
    first: int
    ranks: int

    @classmethod
    def of(cls, count: int, axis: Axis, *, whole: bool = False) -> TokenShare:
        """This rank's. Of few tokens it is all, as it is of `whole` steps: gathering costs more
        than computing them on every rank."""
        if whole or count < SPLIT_TOKENS * axis.size:
            return cls(count, count, 0, axis.size)
        each = -(-count // axis.size)
        return cls(count, each, each * axis.index, axis.size)

    @property
    def split(self) -> bool:
        return self.each < self.count

    def part(self, whole: Tensor) -> Tensor:
        """This rank's entries of [T]: [t], zeros where it has none."""
        found = whole[self.first : self.first + self.each]
        return nn.functional.pad(found, (0, self.each - found.shape[0]))

    def wanted(self, tokens: Sequence[int]) -> list[int]:
        """Of some tokens of the step those that this rank computes, counted from its first."""
        return [at - self.first for at in tokens if 0 <= at - self.first < self.each]

    def counts(self, tokens: Sequence[int]) -> list[int]:
        """How many of some tokens of the step each rank computes."""
        found = [0] * self.ranks
        for at in tokens:
            found[at // self.each] += 1
        return found


class Exchange:
    """Collectives of the layers of one step.

    Args:
        axis: the context ranks. recorder: of their collectives.
        share: of the step.
    """

    def __init__(self, axis: Axis, recorder: Recorder, share: TokenShare) -> None:
        self.axis, self.recorder, self.share = axis, recorder, share

    def gathered(
        self, query: Tensor, key: Tensor, value: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value [heads, t, size], of all tokens: [heads, T, size]."""
        given = [query, key] if value is None else [query, key, value]
        if not self.share.split:
            return query, key, key if value is None else value
        flat = torch.cat([one.transpose(0, 1).flatten(1) for one in given], 1)
        whole = all_gather(flat, self.axis, self.recorder)[: self.share.count]
        sizes = [one.shape[0] * one.shape[2] for one in given]
        found = [
            each.reshape(-1, one.shape[0], one.shape[2]).transpose(0, 1)
            for each, one in zip(whole.split(sizes, 1), given, strict=True)  # type: ignore[no-untyped-call]
        ]
        return found[0], found[1], found[-1]

    def merged(self, mixed: Tensor, weight: Tensor, options: Options, dtype: torch.dtype) -> Tensor:
        """Attended values [T, A, E] of all ranks in fp32, each with its logarithm [T, A], as one,
        of the tokens that this rank computes: [1, t, A, E]."""
        every = all_gather(weight.unsqueeze(0), self.axis, self.recorder)
        total = every.logsumexp(0)
        parts = mixed * torch.exp(weight - total).unsqueeze(-1)
        found = sunk(parts, total, options.sinks).contiguous()
        share = self.share
        if share.split:
            missing = share.each * self.axis.size - found.shape[0]
            padded = nn.functional.pad(found, (0, 0, 0, 0, 0, missing))
            return reduce_scatter(padded, self.axis, self.recorder).to(dtype).unsqueeze(0)
        all_reduce(found, self.axis, self.recorder)
        return found.to(dtype).unsqueeze(0)

    def logits(self, output: Tensor, counts: Sequence[int]) -> Tensor:
        """Logits [N, V] of all of a step, of which each rank made as many as `counts` says."""
        if not self.share.split:
            return output
        return all_gather(output, self.axis, self.recorder, sizes=counts)
