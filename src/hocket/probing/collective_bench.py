"""Talking: one collective or message between ranks, as the runtime performs it, timed.

A round takes a sample of each case, and a sample repeats its case some times; how often is agreed
among all ranks beforehand. A sample's seconds are those of the slowest rank. A message's are half
of what there and back takes.

On a machine that others use as well, a rank that is woken waits until a core is free. The kernel
tells how long; of a case's samples the half that waited least is kept.
"""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from hocket.probing.repeats import enough, repeat_summary, rounded
from hocket.runtime import collectives
from hocket.runtime.mesh import Axis, make_groups
from hocket.runtime.native.kernels import CpuKernels
from hocket.runtime.native.sums import Sums
from hocket.runtime.record import Recorder

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")

_SAMPLE = 1.5e-3
"""Seconds of a sample: well above the time-slice noise of waking ranks, and short."""


@dataclasses.dataclass(frozen=True)
class Talk:
    """Seconds of one call, their spread, and the processor seconds of one rank in it."""

    seconds: float
    spread: float
    busy: float


class _Sample(NamedTuple):
    """Of one call: how long ranks waited for a core, the slowest rank's seconds, the processor
    seconds of all ranks together. They sort by the first."""

    waited: float
    seconds: float
    busy: float


class Room:
    """All ranks of a run, and the groups among them that talk.

    Attributes:
        rank, size: of the whole run, whose own group ranks wait and agree over.
    """

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        self.rank, self.size, self.device = rank, size, device
        self.recorder = Recorder(rank, device)
        self._groups: dict[tuple[tuple[int, ...], str], dist.ProcessGroup | None] = {}
        self._kernels = CpuKernels.load() if device.type == "cpu" else None

    @property
    def summed(self) -> int:
        """Bytes up to which a kernel sums; 0: there is none."""
        from hocket.runtime.shm.segment import PART  # not where there are no futexes

        return PART if self._kernels is not None else 0

    def axis(self, world: int, ranks: int, backend: str) -> Axis:
        """This rank's group where the first `world` ranks are cut into groups of `ranks`.

        Called by all ranks of the run; those beyond `world` get an axis of themselves.
        """
        rows = [tuple(range(first, first + ranks)) for first in range(0, world, ranks)]
        new = [row for row in rows if (row, backend) not in self._groups]
        if new:
            mine = make_groups(new, self.rank, f"probe{ranks}", backend)
            self._groups |= {(row, backend): mine if self.rank in row else None for row in new}
        for row in rows:
            if self.rank in row:
                group = self._groups[row, backend]
                return Axis("world", ranks, row.index(self.rank), row, group)
        return Axis("world", ranks=(self.rank,))

    def wait(self) -> None:
        """Until every rank is here."""
        self.agree(0.0)

    def total(self, value: float) -> float:
        """The sum of all ranks' values, on all ranks."""
        return sum(row[0] for row in self.exchange(value))

    def agree(self, value: float) -> float:
        """The largest value of all ranks, on all ranks."""
        return max(row[0] for row in self.exchange(value))

    def exchange(self, *values: float) -> list[list[float]]:
        """Every rank's values, on all ranks."""
        device = self.device if dist.get_backend() == "nccl" else "cpu"
        mine = torch.tensor(values, dtype=torch.float64, device=device)
        rows = mine.new_empty(self.size, len(values))
        dist.all_gather_single(rows.view(-1), mine)
        return rows.tolist()

    def curves(
        self,
        axis: Axis,
        sizes: Mapping[str, Sequence[int]],
        *,
        seconds: float,
        least: int,
    ) -> dict[tuple[str, int], Talk]:
        """Seconds of each operation at its sizes on this rank's group, by interleaved rounds.

        Called by all ranks of the run; those whose axis has no other rank only keep step.
        """
        calls = {
            (operation, size): self._call(axis, operation, size)
            for operation, some in sizes.items()
            for size in some
        }
        communicating = self.total(float(axis.group is not None))
        return self.rounds(calls, communicating=communicating, seconds=seconds, least=least)

    def rounds(
        self,
        calls: Mapping[tuple[str, int], Callable[[], None]],
        *,
        communicating: float,
        seconds: float,
        least: int,
    ) -> dict[tuple[str, int], Talk]:
        """Seconds of each call, the slowest rank's; a `send` is half of its call.

        `communicating`: how many ranks do something in it.
        """
        begin, number = time.perf_counter(), 0
        counts = {key: self._count(call) for key, call in calls.items()}
        samples: dict[tuple[str, int], list[_Sample]] = {key: [] for key in calls}
        while not enough(number, least, self.agree(time.perf_counter() - begin), seconds):
            for key, call in calls.items():
                samples[key].append(self._sample(call, counts[key]))
            number += 1
        found = {}
        for key, taken in samples.items():
            kept = sorted(taken)[: (len(taken) + 1) // 2]
            share = 0.5 if key[0] == "send" else 1.0
            whole = repeat_summary([share * one.seconds for one in kept])
            busy = share * repeat_summary([one.busy for one in kept]).seconds / communicating
            found[key] = Talk(whole.seconds, whole.spread, rounded(busy))
        return found

    def _count(self, call: Callable[[], None]) -> int:
        """How often a sample repeats a case: the same on all ranks."""
        self._sample(call, 1)
        took = self._sample(call, 2).seconds
        return max(1, min(100, round(_SAMPLE / max(took, 1e-7))))

    def _sample(self, call: Callable[[], None], count: int) -> _Sample:
        # All ranks are here: they have just exchanged the sample before this one.
        waited = _waited()
        start, own = time.perf_counter(), time.process_time()
        for _ in range(count):
            call()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        took, own = (time.perf_counter() - start) / count, (time.process_time() - own) / count
        rows = self.exchange(_waited() - waited, took, own)
        waits, seconds, used = zip(*rows, strict=True)
        return _Sample(sum(waits), max(seconds), sum(used))

    def _call(self, axis: Axis, operation: str, size: int) -> Callable[[], None]:
        if axis.group is None:
            return lambda: None
        recorder, group = self.recorder, axis.group
        numel = max(axis.size, size // 4 // axis.size * axis.size)
        whole = torch.zeros(numel, device=self.device)
        piece = torch.zeros(numel // axis.size, device=self.device)
        match operation:
            case "all-reduce":
                return lambda: _none(collectives.all_reduce(whole, axis, recorder))
            case "all-gather":
                return lambda: _none(collectives.all_gather(piece, axis, recorder))
            case "reduce-scatter":
                return lambda: _none(collectives.reduce_scatter(whole, axis, recorder))
            case "all-to-all":
                out = torch.empty_like(whole)
                return lambda: _none(dist.all_to_all_single(out, whole, group=group))
            case "sum":
                assert self._kernels is not None
                sums = Sums.of(axis, recorder, self._kernels)
                assert sums is not None
                return lambda: _none(sums(whole))
            case "broadcast":
                return lambda: _none(collectives.broadcast(whole, axis, recorder))
        assert operation == "send", operation
        return self.there_and_back(axis, 0, 1, size)

    def there_and_back(self, axis: Axis, first: int, second: int, size: int) -> Callable[[], None]:
        """A message of `size` bytes from one index of the axis to another, and one back."""
        if axis.index not in (first, second) or axis.group is None:
            return lambda: None
        message = torch.zeros(max(1, size // 4), device=self.device)
        peer = second if axis.index == first else first
        order = (collectives.isend, collectives.irecv)
        if axis.index == second:
            order = (collectives.irecv, collectives.isend)

        def call() -> None:
            for action in order:
                action(message, axis, peer, self.recorder).wait()

        return call


def _waited() -> float:
    """Seconds that this process's threads stood ready for a core that was not free."""
    waited = 0
    for file in glob.glob("/proc/self/task/*/schedstat"):
        with contextlib.suppress(OSError, ValueError, IndexError), open(file) as opened:
            waited += int(opened.read().split()[1])
    return waited / 1e9


def _none(_: object) -> None:
    return None
