"""One step seen whole: every rank's events and counted collectives, brought together on rank 0.

The ranks of one machine share its monotonic clock, so their times need no correction. On several
machines each clock starts at a barrier, which is right to about a message's latency.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hocket.runtime.collectives import barrier
from hocket.runtime.mesh import Mesh
from hocket.spec.collectives import total
from hocket.spec.files import write_text
from hocket.spec.run import RunFolder, TrainOptions
from hocket.spec.timeline import Event, Timeline

if TYPE_CHECKING:
    from hocket.launch import RankContext


@contextmanager
def recorded(mesh: Mesh, one_machine: bool) -> Iterator[None]:
    """Record the step that runs within; all ranks enter together."""
    recorder = mesh.recorder
    barrier(mesh.axis("world"), recorder)
    recorder.clear()
    recorder.origin = 0.0 if one_machine else time.perf_counter()
    recorder.recording = True
    try:
        yield
    finally:
        recorder.recording = False


def recorded_steps(options: TrainOptions, first: int) -> range:
    """The steps to record (counted from 1): as asked, else from the middle, but not the first
    unless so many are asked for that there is no other way."""
    steps, count, start = options.steps, options.timeline_steps, options.timeline_step
    if start is None:
        start = max(first + 2, (first + steps) // 2 + 1)
        start = max(first + 1, min(start, steps - count + 1))
    return range(start, min(start + count, steps + 1))


def gather_values(context: RankContext, name: str, value: Any) -> list[Any] | None:
    """Every rank's `value` (plain data), by rank, on rank 0; None on the others.

    Goes through the store and not through a collective: nothing is counted, nothing waits but
    rank 0.
    """
    if context.world_size == 1:
        return [value]
    store = context.store()
    key = f"training/{name}"
    if context.rank > 0:
        store.set(f"{key}/{context.rank}", json.dumps(value))
        return None
    others = range(1, context.world_size)
    return [value, *(json.loads(store.get(f"{key}/{rank}")) for rank in others)]


def write_record(context: RankContext, path: Path, text: str) -> None:
    """Write what is recorded of a run and read by no rank. Where that fails, as on a full disk, a
    note gives the reason, and training continues."""
    try:
        write_text(path, text)
    except OSError as error:
        reason = error.strerror or error
        context.emit({"event": "note", "text": f"{path}: {reason}; training continues without it"})


def write_timeline(
    folder: RunFolder,
    context: RankContext,
    mesh: Mesh,
    step: int,
    peak_bytes: list[int],
    *,
    later: bool = False,
) -> Timeline | None:
    """Write timeline.json and communication.json of the step recorded last; rank 0 returns it.

    `later`: it is not the first that was recorded, and is added to timeline.later.json instead.
    """
    mine = {
        "events": [dataclasses.asdict(event) for event in mesh.recorder.timeline_events()],
        "collectives": mesh.recorder.collectives(),
    }
    rows = gather_values(context, f"timeline/{step}", mine)
    if rows is None:
        return None
    events = [Event(**event) for row in rows for event in row["events"]]
    timeline = Timeline.of("measured", context.world_size, events, peak_bytes)
    if later:
        file = folder.later_file
        steps = json.loads(file.read_text()) if file.exists() else []
        steps.append({"step": step, "timeline": json.loads(timeline.to_json())})
        write_record(context, file, json.dumps(steps))
        return timeline
    folder.later_file.unlink(missing_ok=True)  # of an earlier start
    write_record(context, folder.timeline_file, timeline.to_json())
    communication = {
        "step": step,
        "layout": str(mesh.layout),
        "ranks": [row["collectives"] for row in rows],
        "total": total(row["collectives"] for row in rows),
    }
    write_record(context, folder.communication_file, json.dumps(communication, indent=1))
    return timeline
