"""Slow ranks: a rank that takes longer than its peers, the share of time it costs, and the cause.

    every 50 steps one is recorded on all ranks -> seconds of compute, of input, of each collective
    -> the median of the last 6 such steps -> compared with the ranks that do the same work
    -> named, if 4 more of them find the same than find others

Ranks that wait look busy, so that a step's length tells nothing of a rank. Compute is what is left
of the step without the input and without waiting in collectives; of a collective all ranks but the
last to come wait, so that the shortest of its times is that of the link. Nothing is read from a
device but between steps. A stage of a pipeline without another rank is compared with the other
stages, by seconds for each parameter that a token is multiplied with. A `RankSeconds` is plain
data; `diagnose` never sees a device.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections import deque
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from hocket.spec.layout import Layout
from hocket.spec.process_groups import named_groups
from hocket.training import timeline

if TYPE_CHECKING:
    from hocket.launch import RankContext
    from hocket.runtime.mesh import Mesh

_Key = tuple[tuple[int, ...], str]

BLOCKING = ("tp", "cp", "expert")
"""Axes whose collectives stand between two operations of one action."""
EVERY = 50
"""Steps between two that are recorded."""
KEPT, AGREEING = 6, 4
"""Recorded steps whose median counts, and how many more of them find a rank than find others in its
place before it is named: on cores that are shared with other work, each step finds another."""
STAGES = 2.0
"""Least factor between two stages of a pipeline: what they compute differs in more than size."""
LEAST = 0.02
"""Share of a step that a slow rank costs at least, to be named."""


@dataclasses.dataclass(frozen=True)
class RankSeconds:
    """One rank's seconds in one step.

    Attributes:
        step: the whole step. compute: without collectives. input: making the batch.
        links: of each collective in their order, by axis.
        work: parameters of its stages that a token is multiplied with; 0: not known.
    """

    step: float
    compute: float
    input: float
    work: float = 0.0
    links: dict[str, list[float]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class SlowRank:
    """A finding.

    Attributes:
        ranks: one, or those that share a slow link. cause: `compute`, `input` or `link`.
        factor: times the median of the peers. share: of the step's time that it costs everyone.
    """

    ranks: tuple[int, ...]
    cause: str
    factor: float
    share: float

    def __str__(self) -> str:
        who = f"rank {self.ranks[0]} is" if len(self.ranks) == 1 else f"ranks {self.ranks} are"
        what = {
            "compute": "its compute takes",
            "input": "its input (making the batch) takes",
            "link": "the link between them takes",
        }[self.cause]
        return (
            f"{who} slow: {what} {self.factor:.1f} times the median of its peers, which costs all "
            f"ranks {self.share:.0%} of the time"
        )


def rank_seconds(
    events: Sequence[Any],
    step: float,
    input_seconds: float,
    work: float = 0.0,
    waits: Sequence[tuple[float, float]] = (),
) -> RankSeconds:
    """A rank's RankSeconds of the events of one step (`spec.timeline.Event`), and of the blocks in
    which it waited for collectives that run alongside compute."""
    links: dict[str, list[float]] = {}
    for one in events:
        if one.lane == "communication" and one.axis is not None:
            links.setdefault(one.axis, []).append(one.end - one.start)
    return RankSeconds(step, _busy(events, waits), input_seconds, work, links)


def _busy(events: Sequence[Any], waits: Sequence[tuple[float, float]]) -> float:
    """Seconds from the first event to the last in which the rank did not wait: for a collective
    that stands inside an action, or for one that overlaps with no compute."""
    edges: list[tuple[float, int, int]] = []
    for one in events:
        lane = 0 if one.lane == "compute" else 1 if one.axis in BLOCKING else 2
        edges += [(one.start, lane, 1), (one.end, lane, -1)]
    for start, end in waits:
        edges += [(start, 1, 1), (end, 1, -1)]
    edges.sort()
    depth, busy, last = [0, 0, 0], 0.0, edges[0][0] if edges else 0.0
    for moment, lane, change in edges:
        if not depth[1] and not (depth[2] and not depth[0]):
            busy += moment - last
        depth[lane] += change
        last = moment
    return busy


def diagnose(samples: Sequence[RankSeconds], layout: Layout, factor: float) -> list[SlowRank]:
    """Who is slow, by one RankSeconds of each rank; the costliest first."""
    found: list[SlowRank] = []
    step = max(one.step for one in samples)
    stages = [layout.coordinate(rank)["pp"] for rank in range(len(samples))]
    for cause in ("compute", "input"):
        seconds = [getattr(one, cause) for one in samples]
        for rank, own in enumerate(seconds):
            peers = [s for r, s in enumerate(seconds) if stages[r] == stages[rank] and r != rank]
            least = factor
            if not peers and cause == "compute":
                peers, least = _of_other_stages(samples, rank), max(factor, STAGES)
            peers = peers or [s for r, s in enumerate(seconds) if cause == "input" and r != rank]
            if not peers:
                continue
            usual = statistics.median(peers)
            share = (own - usual) / step
            if own > least * usual and share > LEAST:
                found.append(SlowRank((rank,), cause, own / max(usual, 1e-9), share))
    for axis in ("dp", "tp", "cp"):
        groups = [tuple(group) for group in named_groups(layout, axis)]
        seconds = [_transfer([samples[rank].links.get(axis, []) for rank in g]) for g in groups]
        for number, own in enumerate(seconds):
            peers = [s for n, s in enumerate(seconds) if n != number]
            if not peers:
                continue
            usual = statistics.median(peers)
            share = (own - usual) / step
            if own > factor * usual and share > LEAST:
                found.append(SlowRank(groups[number], "link", own / max(usual, 1e-9), share))
    return sorted(found, key=lambda one: -one.share)


def _of_other_stages(samples: Sequence[RankSeconds], rank: int) -> list[float]:
    """Seconds of compute that the other ranks would need for the work of `rank`."""
    own = samples[rank].work
    return [s.compute * own / s.work for r, s in enumerate(samples) if r != rank and s.work and own]


def _transfer(rows: Sequence[Sequence[float]]) -> float:
    """Seconds of the collectives of one group without waiting: the shortest of each."""
    if not rows or len({len(row) for row in rows}) != 1:
        return 0.0
    return sum(map(min, zip(*rows, strict=True)))


class SlowRanks:
    """Records a step now and then, and reports who is slow. All ranks call it together.

    Args:
        context: of this rank.
        mesh: its recorder records.
        factor: times the median of the peers.
        work: as of `RankSeconds`.
    """

    def __init__(self, context: RankContext, mesh: Mesh, factor: float, work: float = 0.0) -> None:
        self._context, self._mesh, self._factor, self._work = context, mesh, factor, work
        self._kept: list[deque[RankSeconds]] = [
            deque(maxlen=KEPT) for _ in range(context.world_size)
        ]
        self._named: set[tuple[tuple[int, ...], str]] = set()
        self._began = 0.0

    def due(self, step: int) -> bool:
        """Whether `step` (1 is the first) is one to record."""
        return self._context.world_size > 1 and step % EVERY == 0

    def begin(self, stack: ExitStack) -> None:
        """Record until `stack` ends."""
        stack.enter_context(timeline.recorded(self._mesh, self._context.one_machine))
        self._began = time.perf_counter()

    def after(self, step: int, input_seconds: float) -> str | None:
        """On rank 0, who is slow by the steps recorded so far, the costliest of each cause; None:
        none, or the same as before."""
        events = self._mesh.recorder.timeline_events()
        seconds = time.perf_counter() - self._began
        waits = self._mesh.recorder.waits()
        mine = rank_seconds(events, seconds, input_seconds, self._work, waits)
        rows = timeline.gather_values(self._context, f"slow/{step}", dataclasses.asdict(mine))
        if rows is None:
            return None
        for kept, row in zip(self._kept, rows, strict=True):
            kept.append(RankSeconds(**row))
        if len(self._kept[0]) < AGREEING:
            return None
        layout, factor = self._mesh.layout, self._factor
        found = diagnose([_median(kept) for kept in self._kept], layout, factor)
        steps = [
            {_key(one) for one in diagnose(rows, layout, factor)}
            for rows in zip(*self._kept, strict=True)
        ]
        found = [one for one in found if _agreement(_key(one), steps) >= AGREEING]
        costliest = {one.cause: one for one in reversed(found)}  # a slow link hides no slow rank
        new = [one for one in found if one is costliest[one.cause] and _key(one) not in self._named]
        self._named = {_key(one) for one in costliest.values()}
        return f"step {step}: " + "; ".join(map(str, new)) if new else None


def _key(found: SlowRank) -> _Key:
    return found.ranks, found.cause


def _agreement(key: _Key, steps: Sequence[Collection[_Key]]) -> int:
    """Steps that found what `key` says, less those that found others for the same cause."""
    others = (key not in step and any(cause == key[1] for _, cause in step) for step in steps)
    return sum(key in step for step in steps) - sum(others)


def _median(samples: Sequence[RankSeconds]) -> RankSeconds:
    axes = set.intersection(*(set(one.links) for one in samples))
    links = {}
    for axis in axes:
        rows = [one.links[axis] for one in samples]
        if len({len(row) for row in rows}) == 1:
            links[axis] = [statistics.median(each) for each in zip(*rows, strict=True)]
    return RankSeconds(
        statistics.median(one.step for one in samples),
        statistics.median(one.compute for one in samples),
        statistics.median(one.input for one in samples),
        samples[-1].work,
        links,
    )
