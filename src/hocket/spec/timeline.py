"""Timeline: what ran when, on each rank's compute and communication lane.

Predicted (by `simulation`) and measured (by `runtime`) timelines are this same type.
"""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from hocket.spec.files import parse_json

LANES = ("compute", "communication")

_PIPELINE = ("F", "B", "I", "W")
_BLOCKING = ("tp", "cp")
"""Axes whose collectives stand between two operations of one action."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Event:
    """One span on one lane of one rank. Times in seconds since the window's start.

    `kind` is a schedule letter (`F`, `B`, `SEND_F` ...), a collective's name (`all-reduce`), or
    `optimizer`; `name` is what to print (`1F0`); `axis` the mesh axis a collective ran over;
    `bytes` its message size on this rank.
    """

    rank: int
    lane: str
    kind: str
    name: str
    start: float
    end: float
    stage: int | None = None
    microbatch: int | None = None
    axis: str | None = None
    bytes: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timeline:
    """A window of events.

    Attributes:
        source: `predicted` or `measured`.
        num_ranks: ranks in the window.
        events: ordered by rank, then start.
        peak_bytes: counted tensor bytes at the worst moment, per rank; empty if unknown.
    """

    source: str
    num_ranks: int
    events: tuple[Event, ...]
    peak_bytes: tuple[int, ...] = ()

    @classmethod
    def of(
        cls, source: str, num_ranks: int, events: Iterable[Event], peak_bytes: Iterable[int] = ()
    ) -> Timeline:
        """Order the events and let the window begin at 0."""
        found = sorted(events, key=lambda e: (e.rank, e.start, e.end))
        first = min((e.start for e in found), default=0.0)
        moved = tuple(
            dataclasses.replace(e, start=e.start - first, end=e.end - first) for e in found
        )
        return cls(source=source, num_ranks=num_ranks, events=moved, peak_bytes=tuple(peak_bytes))

    @property
    def duration(self) -> float:
        """Seconds from the first event's start to the last one's end."""
        return max((e.end for e in self.events), default=0.0)

    def busy(self, rank: int, kinds: Iterable[str] = _PIPELINE) -> float:
        """Seconds that `rank` spends in pipeline compute of the given kinds."""
        wanted = set(kinds)
        return sum(e.end - e.start for e in self.events if e.rank == rank and e.kind in wanted)

    @property
    def pipeline_span(self) -> float:
        spans = [e for e in self.events if e.kind in _PIPELINE]
        if not spans:
            return 0.0
        return max(e.end for e in spans) - min(e.start for e in spans)

    @property
    def bubble(self) -> float:
        """Idle share of the pipeline: 1 - busy / (ranks x span), 0 for an empty window."""
        span = self.pipeline_span
        if span <= 0:
            return 0.0
        each: dict[int, float] = defaultdict(float)  # equal ranks add up to no rounding
        for event in self.events:
            if event.kind in _PIPELINE:
                each[event.rank] += event.end - event.start
        busy = sum(each[rank] for rank in sorted(each))
        return max(0.0, 1 - busy / (self.num_ranks * span))  # sums may end a rounding above

    @property
    def idle(self) -> float:
        """Share of the window in which ranks, on average, do not compute; 0 for an empty window.

        Nothing computes while a rank waits inside an action for the collectives of tensor or
        context parallelism; overlapped collectives (gradient buckets) cost nothing here.
        """
        if self.duration <= 0:
            return 0.0
        busy = 0.0
        by_rank: dict[int, list[Event]] = defaultdict(list)
        for event in self.events:
            by_rank[event.rank].append(event)
        for mine in by_rank.values():
            waits = [(e.start, e.end) for e in mine if e.axis in _BLOCKING]
            work = [(e.start, e.end) for e in mine if e.lane == LANES[0]]
            busy += _covered(work + waits) - _covered(waits)
        return max(0.0, 1 - busy / (self.num_ranks * self.duration))

    def to_json(self) -> str:
        """A JSON form with an exact inverse."""
        return json.dumps(
            {
                "source": self.source,
                "num_ranks": self.num_ranks,
                "peak_bytes": list(self.peak_bytes),
                "events": [dataclasses.asdict(e) for e in self.events],
            }
        )

    @classmethod
    def from_json(cls, text: str) -> Timeline:
        """The inverse of `to_json`.

        Raises:
            ValueError, TypeError, KeyError: it is not a timeline, or holds an event that cannot be.
        """
        data: dict[str, Any] = parse_json(text)
        found = cls(
            source=str(data["source"]),
            num_ranks=data["num_ranks"],
            events=tuple(Event(**e) for e in data["events"]),
            peak_bytes=tuple(data["peak_bytes"]),
        )
        most = len(found.events) + IDLE_RANKS
        if type(found.num_ranks) is not int or not 0 <= found.num_ranks <= most:
            raise ValueError(
                f"num_ranks is {found.num_ranks!r:.40}; with {len(found.events):,} events it "
                f"must be a whole number of at most {most:,}"
            )
        if not all(map(_is_count, found.peak_bytes)):
            raise ValueError(f"peak_bytes is {found.peak_bytes!r:.60}")
        for event in found.events:
            if not _can_be(event) or event.rank >= found.num_ranks:
                raise ValueError(
                    f"the event {event.name!r:.40} of rank {event.rank!r:.40} cannot be"
                )
        return found


IDLE_RANKS = 1_000
"""Ranks of a window without an event: a report makes a line of each rank."""


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _can_be(event: Event) -> bool:
    """Whether each value of an event is of its type, and its end not before its start."""
    numbers = (event.start, event.end)
    texts = (event.lane, event.kind, event.name)
    optional = (event.stage, event.microbatch)
    return (
        all(type(n) in (int, float) and 0 <= n <= _LONGEST for n in numbers)
        and event.start <= event.end
        and all(type(text) is str for text in texts)
        and (event.axis is None or type(event.axis) is str)
        and all(number is None or _is_count(number) for number in optional)
        and _is_count(event.rank)
        and _is_count(event.bytes)
    )


_LONGEST = 1e12
"""Seconds; neither infinity nor no number at all is within."""


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    """Seconds that lie in at least one of the spans."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total
