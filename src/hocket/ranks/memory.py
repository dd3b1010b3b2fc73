"""Memory: a process that executes a step of each rank on tensors without memory, and counts."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Any

from hocket.spec.allowed_memory import MOST_RANKS, Allowed
from hocket.spec.errors import HocketError
from hocket.spec.layout import Layout
from hocket.spec.run import RunSpec

if TYPE_CHECKING:
    from hocket.launch import RankContext

SEARCH = 20.0
"""Seconds after which no larger worlds are looked at."""


def main(context: RankContext, payload: dict[str, Any]) -> None:
    """Emit the peaks of the run's own layout, and of others if it does not fit.

    Payload: `spec`, `schedule`, `allowed` (fields of an Allowed), `others` (layouts to look at,
    the fewest ranks first).
    """
    from hocket.spec.schedule import Schedule
    from hocket.training.memory_forecast import forecast_memory

    spec, schedule = RunSpec.from_json(payload["spec"]), Schedule.parse(payload["schedule"])
    may = Allowed(**payload["allowed"])
    event = "memory forecast"
    try:
        rows = [m.to_json() for m in forecast_memory(spec, schedule)]
    except HocketError:
        raise
    except Exception as error:  # fake tensors do not know every operation of every family
        context.emit({"event": event, "error": f"{type(error).__name__}: {error}"})
        return
    context.emit({"event": event, "layout": str(spec.layout), "ranks": rows})
    if may.need([row["total"] for row in rows]) <= may.bytes:
        return
    standing = sum(row["total"] - row["activations"] for row in rows) / spec.layout.dp
    most = may.bytes if may.together else MOST_RANKS * may.bytes
    if standing > most:
        return
    ranks, fits = 0, False
    end = time.monotonic() + SEARCH
    fit: set[str] = set()
    for text in payload["others"]:
        layout = Layout.parse(text)
        size = layout.world_size
        if size > ranks and (fits or time.monotonic() > end):
            return
        # With ZeRO data ranks share a state; what they share of it is at most all.
        least = standing * (1 if layout.zero else layout.dp)
        if (least if may.together else least / size) > may.bytes:
            continue
        if layout.axes_text() in fit:
            continue  # a lower stage, or fewer microbatches, is enough
        ranks = size
        need = may.need(_totals(spec, layout))
        context.emit({"event": event, "layout": str(layout), "need": need})
        if need <= may.bytes:
            fits = True
            fit.add(layout.axes_text())


def _totals(spec: RunSpec, layout: Layout) -> list[int]:
    from hocket.schedules.registry import build_schedule
    from hocket.training.memory_forecast import forecast_memory

    schedule = build_schedule(layout, layout.microbatches or 1)
    other = dataclasses.replace(spec, layout=layout)
    return [memory.total for memory in forecast_memory(other, schedule)]
