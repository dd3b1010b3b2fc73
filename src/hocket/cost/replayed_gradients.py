"""Replayed gradients: when a stage's gradients take memory, and when they are freed.

    one replica     each where it is made, until the next step
    replicas        in flat buckets
    ZeRO-1          in buckets, until the step's last backward has filled one; then a shard of it
    ZeRO-2          in buckets, which each backward fills; then a shard
    ZeRO-3          block by block, each until the next block's backward begins; then a shard

A bucket has memory from the first gradient that is copied into it, and while its reduce-scatter is
under way; the shard of a later microbatch is added to the first one's when that ends. It follows
`runtime.data_parallel`.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Sequence

from hocket.cost.communication_table import bucket_members
from hocket.spec.schedule import BACKWARD, WEIGHT

UNDER_WAY = {1: 2, 2: 2, 3: 1}
"""ZeRO stage to the buckets whose reduction may be under way at once (`runtime.data_parallel`)."""


class ReplayedBytes:
    """Bytes that are alive, and the most so far."""

    def __init__(self) -> None:
        self.now = self.peak = 0

    def take(self, nbytes: int) -> None:
        """Allocate; a negative number frees."""
        self.now += nbytes
        self.peak = max(self.peak, self.now)

    def touch(self, nbytes: int) -> None:
        """Allocate, and free at once."""
        self.peak = max(self.peak, self.now + nbytes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gradient:
    """One parameter's gradient.

    Attributes:
        block: index of its block in the stage.
        nbytes: in fp32. made: in the dtype in which backward makes it, 0 where that is fp32.
        late: reduced last, after a sum over other axes.
        ranks: that share its optimizer state; fewer of experts over ranks.
    """

    block: int
    nbytes: int
    made: int
    late: bool
    ranks: int = 1


class Gradients:
    """Gradients of one replica: each takes memory when it first comes."""

    def __init__(self, live: ReplayedBytes, gradients: Sequence[Gradient]) -> None:
        self.live, self.gradients = live, list(gradients)
        self.opened: set[int] = set()

    def begins(self, kind: str) -> None:
        """A forward or backward of the stage begins, that of an action of this kind."""

    def ends(self, kind: str) -> None:
        """It is over."""

    def last(self) -> None:
        """The backward that begins now is the step's last."""

    def layer_begins(self, block: int) -> None:
        """The backward of a layer begins."""

    def launch(self) -> None:
        """All gradients have come."""

    def finish(self) -> None:
        """The step's reductions end."""

    def arrive(self, index: int, *, apart: bool = False) -> None:
        """A gradient was made, in the dtype of the parameter: it is widened, then added to the one
        of the microbatches before or kept. `apart`: not by a backward, but in W, where it is added
        as it is."""
        found = self.gradients[index]
        if apart and index in self.opened:
            self.live.touch(found.made or found.nbytes)
        else:
            self.live.touch(found.made + found.nbytes)
        self._keep(index, found)

    def _keep(self, index: int, found: Gradient) -> None:
        if index not in self.opened:
            self.opened.add(index)
            self.live.take(found.nbytes)


@dataclasses.dataclass(eq=False)
class _Bucket:
    """Gradients that are reduced together; `shard` is that of all microbatches so far."""

    members: list[int]
    nbytes: int
    late: bool
    ranks: int
    block: int = -1
    open: bool = False
    shard: bool = False
    missing: set[int] = dataclasses.field(default_factory=set)


class _Buckets(Gradients):
    """What all buckets have in common. `gradients` are in the order of the module."""

    def __init__(
        self, live: ReplayedBytes, gradients: Sequence[Gradient], buckets: list[_Bucket]
    ) -> None:
        super().__init__(live, gradients)
        self.buckets = buckets
        self.owner = {index: bucket for bucket in buckets for index in bucket.members}
        for bucket in buckets:
            bucket.missing = set(bucket.members)

    def _keep(self, index: int, found: Gradient) -> None:
        bucket = self.owner[index]
        first = index not in self.opened
        self.opened.add(index)
        if first:  # copied into the bucket
            self.live.take(found.nbytes)
        self._open(bucket)
        if first:
            self.live.take(-found.nbytes)

    def _open(self, bucket: _Bucket) -> None:
        if not bucket.open:
            bucket.open = True
            self.live.take(bucket.nbytes)


class FlatBuckets(_Buckets):
    """Gradients of replicas. On a GPU buckets have memory from the start; on a CPU from the first
    gradient: zeros take none until they are written."""

    def __init__(
        self, live: ReplayedBytes, gradients: Sequence[Gradient], bucket_mb: float, *, cuda: bool
    ) -> None:
        every = list(range(len(gradients)))
        super().__init__(live, gradients, list(_filled(gradients, every, bucket_mb)))
        if cuda:
            for bucket in self.buckets:
                self._open(bucket)


class ShardedGradients(_Buckets):
    """Gradients under ZeRO-1 and ZeRO-2."""

    def __init__(
        self,
        live: ReplayedBytes,
        gradients: Sequence[Gradient],
        buckets: list[_Bucket],
        *,
        zero: int,
    ) -> None:
        super().__init__(live, gradients, buckets)
        self.zero = zero
        self.is_last = False
        self.reducing: deque[tuple[_Bucket, bool]] = deque()  # and whether a shard was there

    @classmethod
    def of_stage(
        cls, live: ReplayedBytes, gradients: Sequence[Gradient], bucket_mb: float, zero: int
    ) -> ShardedGradients:
        """In the buckets of a stage; what is reduced late or over other ranks has its own."""
        found: list[_Bucket] = []
        for kind in dict.fromkeys((g.late, g.ranks) for g in gradients):
            members = [i for i, g in enumerate(gradients) if (g.late, g.ranks) == kind]
            found += _filled(gradients, members, bucket_mb)
        return cls(live, gradients, found, zero=zero)

    def begins(self, kind: str) -> None:
        while self.reducing:
            self._end()

    def last(self) -> None:
        self.is_last = True

    def arrive(self, index: int, *, apart: bool = False) -> None:
        super().arrive(index, apart=apart)
        bucket = self.owner[index]
        if self.zero < 3 and not bucket.late and (self.is_last or self.zero == 2):
            bucket.missing.discard(index)
            if not bucket.missing:
                self._reduce(bucket)

    def launch(self) -> None:
        for bucket in self.buckets:
            if not bucket.late and (bucket.open or not self._reduced(bucket)):
                self._reduce(bucket)

    def finish(self) -> None:
        self.launch()
        for bucket in self.buckets:
            if bucket.late:
                self._reduce(bucket)
        self.begins("")

    def _reduced(self, bucket: _Bucket) -> bool:
        return bucket.shard or any(under_way is bucket for under_way, _ in self.reducing)

    def _reduce(self, bucket: _Bucket) -> None:
        self._open(bucket)  # of zeros, where no gradient has come
        bucket.open = False
        bucket.missing = set(bucket.members)
        self.opened -= set(bucket.members)
        while len(self.reducing) >= UNDER_WAY[self.zero]:
            self._end()
        self.live.take(bucket.nbytes // bucket.ranks)
        self.reducing.append((bucket, bucket.shard))
        bucket.shard = True

    def _end(self) -> None:
        bucket, added = self.reducing.popleft()
        self.live.take(-bucket.nbytes - (bucket.nbytes // bucket.ranks if added else 0))


class BlockGradients(ShardedGradients):
    """Gradients under ZeRO-3: a block's are reduced when the backward of the next one begins, what
    is not a layer's when the backward is over. `after`: the block behind the layers."""

    def __init__(
        self,
        live: ReplayedBytes,
        gradients: Sequence[Gradient],
        *,
        after: int | None,
    ) -> None:
        members: dict[tuple[int, bool, int], list[int]] = {}
        for index, found in enumerate(gradients):
            members.setdefault((found.block, found.late, found.ranks), []).append(index)
        buckets = [
            _Bucket(held, sum(gradients[i].nbytes for i in held), late, ranks, block)
            for (block, late, ranks), held in members.items()
        ]
        super().__init__(live, gradients, buckets, zero=3)
        self.after, self.reduces = after, False
        self.due: set[_Bucket] = set()
        self.entered: int | None = None

    def begins(self, kind: str) -> None:
        super().begins(kind)
        self.entered = None
        self.reduces = kind in (BACKWARD, WEIGHT)
        self.due = {bucket for bucket in self.buckets if not bucket.late}

    def layer_begins(self, block: int) -> None:
        over, self.entered = self.entered, block
        self._reduce_block(self.after if over is None else over)

    def ends(self, kind: str) -> None:
        for block in sorted({bucket.block for bucket in self.buckets}, reverse=True):
            self._reduce_block(block)

    def _reduce_block(self, block: int | None) -> None:
        if not self.reduces:  # half a backward: the weights' own is still to come
            return
        for bucket in reversed([b for b in self.buckets if b.block == block]):
            if not bucket.late and (bucket in self.due or bucket.open):
                self.due.discard(bucket)
                self._reduce(bucket)


def _filled(
    gradients: Sequence[Gradient], members: Sequence[int], bucket_mb: float
) -> list[_Bucket]:
    sizes = [gradients[index].nbytes for index in members]
    found: list[_Bucket] = []
    for places in bucket_members(sizes, bucket_mb * 1e6):
        own = [members[place] for place in places]
        first, nbytes = gradients[own[0]], sum(sizes[place] for place in places)
        found.append(_Bucket(own, nbytes, first.late, first.ranks))
    return found
