"""Decomposition: where a step goes, on each rank, in parts that add up to the step.

    compute        forward, backward, weight gradients and optimizer, less what they wait inside
    communication  messages and collectives while the rank computes nothing
    bubble         waiting that the schedule has even where all ranks are equally fast
    imbalance      waiting for a slower rank: at a collective that others reach late, and in the
                   pipeline beyond the schedule's own bubble
    other          between the recorded spans: input, bookkeeping

A collective ends together, so a rank waits in it until the last of its group has come; the rest is
communication. A receive waits until its message is sent. What waits for nobody and overlaps compute
(sends, gradient sums over data ranks) counts only where nothing is computed at the same time.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from hocket.spec.layout import Layout
from hocket.spec.process_groups import DATA_AXES, named_groups
from hocket.spec.schedule import (
    COMPUTE,
    RECEIVES,
    RECV_F,
    REDUCE_GRAD,
    RESHARD,
    SEND_B,
    SEND_F,
    SENDS,
    UNSHARD,
)
from hocket.spec.timeline import Event, Timeline

PARTS = ("compute", "communication", "bubble", "imbalance", "other")

_OVERLAPS = (*SENDS, REDUCE_GRAD, UNSHARD, RESHARD)
"""Kinds of communication that run alongside compute; so do collectives of `DATA_AXES`."""

Span = tuple[float, float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decomposition:
    """Seconds of one step.

    Attributes:
        duration: of the step.
        ranks: for each rank, seconds by part; they add up to `duration`.
        axes: seconds of communication by mesh axis, averaged over the ranks.
    """

    duration: float
    ranks: tuple[Mapping[str, float], ...]
    axes: Mapping[str, float]

    @property
    def mean(self) -> dict[str, float]:
        """Seconds by part, averaged over the ranks."""
        count = max(1, len(self.ranks))
        return {part: sum(rank[part] for rank in self.ranks) / count for part in PARTS}


def decompose(
    timeline: Timeline,
    layout: Layout | None = None,
    *,
    own_bubble: float | None = None,
) -> Decomposition:
    """Split a step into its parts.

    Args:
        timeline: predicted or measured.
        layout: says which ranks share a collective. None: no waiting is found inside them.
        own_bubble: idle share of the schedule where all stages are equal. None: all waiting in the
            pipeline counts as bubble.
    """
    waits = _waits(timeline, layout)
    stages = {e.stage for e in timeline.events if e.kind in COMPUTE and e.stage is not None}
    computing = [e for e in timeline.events if e.kind in COMPUTE]
    pipeline = (
        (min(e.start for e in computing), max(e.end for e in computing))
        if len(stages) > 1
        else (0.0, 0.0)
    )
    rows: list[dict[str, float]] = []
    piped: list[float] = []
    axes: dict[str, float] = defaultdict(float)
    by_rank: list[list[Event]] = [[] for _ in range(timeline.num_ranks)]
    for event in timeline.events:
        if event.rank < timeline.num_ranks:
            by_rank[event.rank].append(event)
    for events in by_rank:
        row, waited, shares = _rank(events, waits, timeline.duration, pipeline, timeline.source)
        rows.append(row)
        piped.append(waited)
        for axis, seconds in shares.items():
            axes[axis] += seconds / timeline.num_ranks
    _share_bubble(rows, piped, own_bubble)
    return Decomposition(duration=timeline.duration, ranks=tuple(rows), axes=dict(axes))


def _rank(
    events: Sequence[Event],
    waits: Mapping[int, float],
    duration: float,
    pipeline: Span,
    source: str,
) -> tuple[dict[str, float], float, dict[str, float]]:
    """One rank: its parts, how much of them is waiting in the pipeline, communication by axis."""
    transfers = [e for e in events if e.lane == "communication"]
    compute = union((e.start, e.end) for e in events if e.lane == "compute")
    blocking = union((e.start, e.end) for e in transfers if not _overlaps(e, source))
    exposed = subtract(union((e.start, e.end) for e in transfers if _overlaps(e, source)), compute)
    communication = union([*blocking, *exposed])
    busy = union([*compute, *communication])
    idle = subtract([(0.0, duration)], busy)
    at_pipeline = sum(waits.get(id(e), 0.0) for e in transfers if e.kind in RECEIVES)
    at_collective = sum(waits.get(id(e), 0.0) for e in transfers if e.kind not in RECEIVES)
    in_flight = max(0.0, length(communication) - at_pipeline - at_collective)
    in_pipeline = length(clip(idle, pipeline))
    shares: dict[str, float] = defaultdict(float)
    for event in transfers:
        own = [(event.start, event.end)]
        seconds = length(subtract(own, compute)) if _overlaps(event, source) else length(own)
        shares[_axis(event)] += max(0.0, seconds - waits.get(id(event), 0.0))
    total = sum(shares.values())
    scale = in_flight / total if total else 0.0
    row = {
        "compute": length(subtract(compute, blocking)),
        "communication": in_flight,
        "bubble": 0.0,
        "imbalance": at_collective,
        "other": length(idle) - in_pipeline,
    }
    # What overlapping spans count twice is taken off the waiting, so that the parts add up.
    waited = max(0.0, duration - sum(row.values()))
    return row, waited, {axis: seconds * scale for axis, seconds in shares.items()}


def _share_bubble(
    rows: Sequence[dict[str, float]], piped: Sequence[float], own_bubble: float | None
) -> None:
    """Divide the waiting in the pipeline between the schedule and what is uneven."""
    if not rows:
        return
    waiting = sum(piped) / len(rows)
    busy = sum(row["compute"] + row["communication"] for row in rows) / len(rows)
    share = 1.0
    if own_bubble is not None and waiting > 0:
        share = min(1.0, busy * own_bubble / max(1e-9, 1 - own_bubble) / waiting)
    for row, seconds in zip(rows, piped, strict=True):
        row["bubble"] += share * seconds
        row["imbalance"] += (1 - share) * seconds


def _overlaps(event: Event, source: str) -> bool:
    """Whether communication runs alongside compute. A simulated step waits for the values that it
    gathers; the runtime gathers them ahead."""
    if event.axis in DATA_AXES and event.kind not in RECEIVES:
        return source == "measured" or event.kind != "all-gather"
    return event.kind in _OVERLAPS


def _axis(event: Event) -> str:
    if event.axis is not None:
        return event.axis
    if event.kind in (*SENDS, *RECEIVES):
        return "pp"
    return "dp" if event.kind in _OVERLAPS else "other"


def _waits(timeline: Timeline, layout: Layout | None) -> dict[int, float]:
    """Seconds that each communication event (by its `id`) waits for other ranks."""
    if layout is None or timeline.num_ranks != layout.world_size:
        return {}
    found: dict[int, float] = {}
    sent = {(e.rank, e.kind, e.stage, e.microbatch): e for e in timeline.events if e.kind in SENDS}
    lanes: dict[tuple[str, str], dict[int, list[Event]]] = defaultdict(lambda: defaultdict(list))
    for event in timeline.events:
        if event.lane != "communication":
            continue
        if event.kind in RECEIVES and event.stage is not None:
            forward = event.kind == RECV_F
            key = (SEND_F if forward else SEND_B, event.stage + (-1 if forward else 1))
            for rank in layout.group(event.rank, "pp"):
                message = sent.get((rank, *key, event.microbatch))
                if message is not None:
                    found[id(event)] = _until(event, message.start)
        elif event.kind not in _OVERLAPS and event.axis is not None:
            lanes[event.axis, event.kind][event.rank].append(event)
    for (axis, _), ranks in lanes.items():
        for group in groups(layout, axis):
            rows = [ranks.get(rank, []) for rank in group]
            if len(group) < 2 or len({len(row) for row in rows}) != 1:
                continue
            for together in zip(*rows, strict=True):
                last = max(e.start for e in together)
                if not _overlaps(together[0], timeline.source):
                    found.update({id(e): _until(e, last) for e in together})
    return found


def _until(event: Event, moment: float) -> float:
    return min(max(0.0, moment - event.start), event.end - event.start)


def groups(layout: Layout, axis: str) -> tuple[tuple[int, ...], ...]:
    """The groups of ranks that a collective named by `axis` runs over; none if it is not known."""
    try:
        return named_groups(layout, axis)
    except (KeyError, ValueError):  # a timeline of another release
        return ()


# --- spans ---------------------------------------------------------------------------------


def union(spans: Iterable[Span]) -> list[Span]:
    """Ordered and disjoint spans that cover the same."""
    found: list[Span] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        elif end > start:
            found.append((start, end))
    return found


def subtract(spans: Iterable[Span], holes: Sequence[Span]) -> list[Span]:
    """What of `spans` no hole covers; both ordered and disjoint."""
    found = []
    first = 0
    for start, end in spans:
        while first < len(holes) and holes[first][1] <= start:
            first += 1
        index = first
        while index < len(holes) and holes[index][0] < end:
            hole = holes[index]
            if hole[0] > start:
                found.append((start, hole[0]))
            start = max(start, hole[1])
            index += 1
        if end > start:
            found.append((start, end))
    return found


def clip(spans: Iterable[Span], window: Span) -> list[Span]:
    """The part of the spans inside a window."""
    cut = ((max(a, window[0]), min(b, window[1])) for a, b in spans)
    return [(a, b) for a, b in cut if b > a]


def length(spans: Iterable[Span]) -> float:
    """Seconds that spans take together."""
    return sum(end - start for start, end in spans)
