"""Processors: ranks that share a machine's cores, and what they wait for, simulated event by event.

A rank is a line of steps, done one after the other:

    Work(seconds)      needs a processor for that long, alone on the machine
    Pause(seconds)     needs none: a message's way, a sleeper's waking
    Post(key)          tells the world; costs nothing
    Await(key, count)  sleeps until `key` was posted `count` times

While n ranks work, each takes `slowdown(n)` times as long as it would alone: at first because
they share caches and memory, and beyond the number of cores because they take turns. What the
turns are like is left out: everyone goes on, evenly slower, as an operating system's scheduler
makes it look over some milliseconds (generalised processor sharing, Parekh and Gallager 1993). A
rank that waits costs nothing, as those of the shared-memory backend do: they sleep in the kernel.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from hocket.spec.errors import ScheduleError
from hocket.spec.timeline import Event


@dataclasses.dataclass(frozen=True, slots=True)
class ProcessorWork:
    """A processor's time, in seconds of a rank that is alone."""

    seconds: float


@dataclasses.dataclass(frozen=True, slots=True)
class Pause:
    """Time that needs no processor."""

    seconds: float


@dataclasses.dataclass(frozen=True, slots=True)
class Post:
    """`key` has happened once more."""

    key: Hashable


@dataclasses.dataclass(frozen=True, slots=True)
class Await:
    """Go on once `key` has happened `count` times."""

    key: Hashable
    count: int = 1


@dataclasses.dataclass(frozen=True, slots=True)
class Begin:
    """A span begins; `name` is any value that its End repeats."""

    name: Hashable


@dataclasses.dataclass(frozen=True, slots=True)
class End:
    """A span ends and becomes an event of these fields (all of `Event` but rank and times)."""

    name: Hashable
    fields: dict[str, Any]


Step = ProcessorWork | Pause | Post | Await | Begin | End
Slowdown = Callable[[int], float]


def alone(_: int) -> float:
    """A processor for every rank, and nothing that they share."""
    return 1.0


@dataclasses.dataclass(frozen=True)
class Cores:
    """The slow-down of n ranks at once on `cores` equal cores, from what was measured.

    Attributes:
        cores: processors that the ranks have.
        measured: ranks to how many times longer each of them takes; 1 is 1. Between them the
            cores' worth of work done, n / slowdown, runs straight; beyond, it stays.
    """

    cores: int
    measured: tuple[tuple[int, float], ...] = ()

    def __call__(self, ranks: int) -> float:
        """How many times longer each of `ranks` ranks takes."""
        points = {1: 1.0, **{n: n / max(slow, 1.0) for n, slow in self.measured if n > 1}}
        if len(points) == 1:
            return max(1.0, ranks / self.cores)
        if ranks in points:
            return max(1.0, ranks / points[ranks])
        known = sorted(points)
        low = max(n for n in known if n <= ranks)
        above = [n for n in known if n > ranks]
        if not above:
            # More than were ever tried: no more is done at once than by all cores.
            more = ranks if low >= self.cores else min(ranks, self.cores)
            done = points[low] * (1.0 if low >= self.cores else more / low)
            return max(1.0, ranks / done)
        high = above[0]
        share = (ranks - low) / (high - low)
        return max(1.0, ranks / (points[low] + share * (points[high] - points[low])))


def play(lines: Sequence[Sequence[Step]], slowdown: Slowdown = alone) -> list[Event]:
    """The events of all ranks, in the order in which they end.

    Args:
        lines: of each rank, its steps.
        slowdown: how many times longer each of n working ranks takes.

    Raises:
        ScheduleError: some rank waits for what is never posted.
    """
    found = _Play(lines, slowdown)
    found.run()
    return found.events


class _Play:
    """One run. `self.work` is the clock of those that work: a rank alone advances it by a second
    a second, n of them by 1 / slowdown(n)."""

    def __init__(self, lines: Sequence[Sequence[Step]], slowdown: Slowdown) -> None:
        self.lines = lines
        self.slowdown = slowdown
        self.now = 0.0
        self.work = 0.0
        self.at = [0] * len(lines)
        self.working: list[tuple[float, int]] = []  # (work clock at the end, rank)
        self.pausing: list[tuple[float, int]] = []  # (time of the end, rank)
        self.posts: dict[Hashable, int] = defaultdict(int)
        self.waiting: dict[Hashable, list[int]] = defaultdict(list)
        self.begun: list[dict[Hashable, float]] = [{} for _ in lines]
        self.events: list[Event] = []

    def run(self) -> None:
        ready = list(range(len(self.lines)))
        while True:
            while ready:
                self._advance(ready.pop(), ready)
            if not self.working and not self.pausing:
                break
            ready = self._pass()
        stuck = [rank for rank, line in enumerate(self.lines) if self.at[rank] < len(line)]
        if stuck:
            step = self.lines[stuck[0]][self.at[stuck[0]]]
            raise ScheduleError(f"rank {stuck[0]} waits without end for {step}")

    def _pass(self) -> list[int]:
        """Let time pass until the next end; the ranks that go on."""
        factor = self.slowdown(len(self.working)) if self.working else 1.0
        ends = []
        if self.working:
            ends.append(self.now + (self.working[0][0] - self.work) * factor)
        if self.pausing:
            ends.append(self.pausing[0][0])
        then = min(ends)
        if self.working:
            self.work += (then - self.now) / factor
            if then == ends[0]:
                self.work = self.working[0][0]  # exactly
        self.now = then
        ready = []
        while self.working and self.working[0][0] <= self.work:
            ready.append(heapq.heappop(self.working)[1])
        while self.pausing and self.pausing[0][0] <= self.now:
            ready.append(heapq.heappop(self.pausing)[1])
        return ready

    def _advance(self, rank: int, ready: list[int]) -> None:
        """Do a rank's steps until one takes time or waits."""
        line = self.lines[rank]
        for index in itertools.count(self.at[rank]):
            self.at[rank] = index
            if index == len(line):
                return
            step = line[index]
            if isinstance(step, ProcessorWork):
                if step.seconds > 0:
                    heapq.heappush(self.working, (self.work + step.seconds, rank))
                    self.at[rank] = index + 1
                    return
            elif isinstance(step, Pause):
                if step.seconds > 0:
                    heapq.heappush(self.pausing, (self.now + step.seconds, rank))
                    self.at[rank] = index + 1
                    return
            elif isinstance(step, Post):
                self.posts[step.key] += 1
                ready += self.waiting.pop(step.key, ())
            elif isinstance(step, Await):
                if self.posts[step.key] < step.count:
                    self.waiting[step.key].append(rank)
                    return
            elif isinstance(step, Begin):
                self.begun[rank][step.name] = self.now
            else:
                start = self.begun[rank].pop(step.name)
                self.events.append(Event(rank=rank, start=start, end=self.now, **step.fields))
