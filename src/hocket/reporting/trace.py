"""Trace: a run's timelines as the trace-event JSON that Perfetto and chrome://tracing open.

A rank is a process, a lane is a thread; the predicted timeline is a second group of processes, so
that both lie on one scale. Spans are complete events (`ph` "X", microseconds), messages between
stages are flows (`s`, `f`) from the send to its receive.

Spans of one thread must be disjoint or nested, so a lane whose spans overlap (buckets that are
reduced while others are sent) is laid over as many threads as it needs.

Format: "Trace Event Format", Chromium project.
"""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from hocket.reporting.record import RunRecord
from hocket.spec.layout import Layout
from hocket.spec.schedule import RECV_F, SEND_F, SENDS
from hocket.spec.timeline import Event, Timeline

TraceEvent = dict[str, Any]

_COMMUNICATION = 10
"""Thread id of the first communication lane; compute has those below."""


def trace_json(records: Sequence[RunRecord]) -> str:
    """The timelines of some runs, merged into one trace."""
    events: list[TraceEvent] = []
    first = 0
    for record in records:
        for timeline in (record.predicted, record.measured):
            if timeline is None:
                continue
            name = timeline.source if len(records) == 1 else f"{record.name} {timeline.source}"
            events += trace_events(timeline, record.layout, name=name, first_process=first)
            if timeline is record.measured:
                events += _later(record, name, first)
            first += timeline.num_ranks
    runs = [{"name": r.name, "layout": str(r.layout or "")} for r in records]
    return json.dumps(
        {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"hocket": runs}}
    )


def _later(record: RunRecord, name: str, first: int) -> list[TraceEvent]:
    """The further steps that were recorded, on the same processes, one behind the other.

    Each began at a barrier, with files written between: no gap is drawn that nobody measured.
    """
    events: list[TraceEvent] = []
    assert record.measured is not None
    after = record.measured.duration
    for number, (_, timeline) in enumerate(record.later, start=1):
        if timeline.num_ranks != record.measured.num_ranks:
            continue  # of another start
        moved = dataclasses.replace(
            timeline,
            events=tuple(
                dataclasses.replace(e, start=e.start + after, end=e.end + after)
                for e in timeline.events
            ),
        )
        events += trace_events(moved, record.layout, name=name, first_process=first, number=number)
        after = moved.duration
    return events


def trace_events(
    timeline: Timeline,
    layout: Layout | None = None,
    *,
    name: str = "",
    first_process: int = 0,
    number: int = 0,
) -> list[TraceEvent]:
    """One timeline as trace events.

    Args:
        timeline: predicted or measured.
        layout: says which ranks a message goes between. None: no flows are drawn.
        name: what the processes are called, before their rank.
        first_process: process id of rank 0.
        number: of the step among those on the same processes.
    """
    found: list[TraceEvent] = []
    by_rank: list[list[Event]] = [[] for _ in range(timeline.num_ranks)]
    for event in timeline.events:
        by_rank[event.rank].append(event)
    places: dict[tuple[Any, ...], tuple[int, int, Event]] = {}
    for rank, events in enumerate(by_rank):
        process = first_process + rank
        found += [
            _about("process_name", process, name=f"{name} rank {rank}".strip()),
            _about("process_sort_index", process, sort_index=process),
        ]
        for lane, first in (("compute", 0), ("communication", _COMMUNICATION)):
            threads = _threads(e for e in events if e.lane == lane)
            for offset, spans in enumerate(threads):
                thread = first + offset
                label = lane if offset == 0 else f"{lane} {offset + 1}"
                found.append(_about("thread_name", process, thread, name=label))
                found.append(_about("thread_sort_index", process, thread, sort_index=thread))
                for event in spans:
                    found.append(_span(event, process, thread))
                    places[rank, event.kind, event.stage, event.microbatch] = (
                        process,
                        thread,
                        event,
                    )
    if layout is not None and layout.world_size == timeline.num_ranks:
        found += _flows(places, layout, first_process, number)
    return found


def _about(what: str, process: int, thread: int = 0, **values: Any) -> TraceEvent:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "ts": 0, "args": values}


def _span(event: Event, process: int, thread: int) -> TraceEvent:
    details = {
        key: value
        for key in ("stage", "microbatch", "axis", "bytes")
        if (value := getattr(event, key)) is not None
    }
    return {
        "ph": "X",
        "name": event.name,
        "cat": event.kind,
        "pid": process,
        "tid": thread,
        "ts": round(event.start * 1e6, 3),
        "dur": round((event.end - event.start) * 1e6, 3),
        "args": details,
    }


def _threads(events: Iterable[Event]) -> list[list[Event]]:
    """Events on as few threads as keep those of each disjoint or nested."""
    threads: list[list[Event]] = [[]]
    open_until: list[list[float]] = [[]]  # ends of the spans that are still open, outermost first
    for event in sorted(events, key=lambda e: (e.start, -e.end)):
        fits = None
        for number, ends in enumerate(open_until):
            while ends and ends[-1] <= event.start:
                ends.pop()
            if not ends or event.end <= ends[-1]:
                fits = number
                break
        if fits is None:
            fits = len(threads)
            threads.append([])
            open_until.append([])
        threads[fits].append(event)
        open_until[fits].append(event.end)
    return threads


def _flows(
    places: dict[tuple[Any, ...], tuple[int, int, Event]],
    layout: Layout,
    first_process: int,
    number: int,
) -> list[TraceEvent]:
    """An arrow from each send to its receive."""
    found: list[TraceEvent] = []
    numbers: dict[str, int] = defaultdict(int)
    for (rank, kind, stage, microbatch), (process, thread, sent) in list(places.items()):
        if kind not in SENDS or stage is None:
            continue
        forward = kind == SEND_F
        other = (RECV_F if forward else "RECV_B", stage + (1 if forward else -1), microbatch)
        for peer in layout.group(rank, "pp"):
            place = places.get((peer, *other))
            if place is None:
                continue
            numbers["flow"] += 1
            shared = {
                "cat": "message",
                "name": sent.name,
                "id": (first_process * 100 + number) * 10**6 + numbers["flow"],
            }
            found.append(
                {
                    "ph": "s",
                    "pid": process,
                    "tid": thread,
                    "ts": round(sent.start * 1e6, 3),
                    **shared,
                }
            )
            # Bound to the receive that encloses its end.
            end = max(sent.start, place[2].end)
            found.append(
                {
                    "ph": "f",
                    "bp": "e",
                    "pid": place[0],
                    "tid": place[1],
                    "ts": round(end * 1e6, 3),
                    **shared,
                }
            )
    return found
