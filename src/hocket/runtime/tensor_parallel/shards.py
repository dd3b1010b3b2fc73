"""Shards: which rows of one dim each tensor rank holds, and the way there and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hocket.spec.placement import Placement
from hocket.spec.plan import WeightSegment


class Shards:
    """The rows of a dim made of `segments`, dealt over `degree` ranks.

    Attributes:
        sizes: rows held by each rank.
        rows: per rank, the global row numbers in local order.
        has_copies: whether some row is held by several ranks.
    """

    def __init__(self, segments: Sequence[WeightSegment], index: int, degree: int) -> None:
        self.index = index
        self.rows: list[list[int]] = []
        for rank in range(degree):
            first = 0
            held: list[int] = []
            for segment in segments:
                start, count, _ = segment.slice(rank, degree)
                held += range(first + start, first + start + count)
                first += segment.rows
            self.rows.append(held)
        self.sizes = [len(held) for held in self.rows]
        self.total = sum(segment.rows for segment in segments)
        self.has_copies = sum(self.sizes) != self.total
        gathered = [row for held in self.rows for row in held]
        where = {row: at for at, row in reversed(list(enumerate(gathered)))}
        order = [where[row] for row in range(self.total)]
        self._order = None if order == list(range(len(gathered))) else torch.tensor(order)
        mine = self.rows[index]
        self._contiguous = mine == list(range(mine[0], mine[0] + len(mine))) if mine else True
        self._mine = torch.tensor(mine)

    def take(self, whole: Tensor) -> Tensor:
        """This rank's part along the last dim."""
        if self._contiguous:
            mine = self.rows[self.index]
            return whole.narrow(-1, mine[0] if mine else 0, len(mine)).contiguous()
        return whole.index_select(-1, self._mine.to(whole.device))

    def order(self, gathered: Tensor) -> Tensor:
        """The global order of what all ranks' parts hold side by side along the last dim."""
        if self._order is None:
            return gathered
        return gathered.index_select(-1, self._order.to(gathered.device))


def take(whole: Tensor, placement: Placement) -> Tensor:
    """A copy of the part of the global tensor `whole` that `placement` puts on this rank."""
    assert tuple(whole.shape) == placement.shape, (placement.name, whole.shape, placement.shape)
    local = whole.new_empty(placement.local_shape)
    if not whole.is_meta:
        for source, target in placement.pairs():
            local[target] = whole[source]
    return local
