"""The schedule of a layout, on its own: to look at, or to write to a file and edit by hand."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from hocket.spec.layout import Layout
from hocket.spec.schedule import Schedule

if TYPE_CHECKING:
    from hocket.spec.timeline import Timeline


def schedule(layout: Layout) -> tuple[Schedule, Timeline]:
    """The schedule that a layout asks for, and its timeline where a backward takes two forwards.

    Microbatches that are left open are two for each pipeline rank.

    Raises:
        ScheduleError: it cannot be read, or does not run; the board is printed.
    """
    from hocket.schedules.registry import build_schedule
    from hocket.simulation import simulate

    count = layout.microbatches or (2 * layout.pp if layout.num_stages > 1 else 1)
    found = build_schedule(dataclasses.replace(layout, microbatches=count), count)
    return found, simulate(found)


def picture(
    found: Schedule,
    timeline: Timeline,
    *,
    width: int = 100,
    color: bool = False,
    unicode: bool = True,
) -> str:
    """The schedule drawn rank by time, one forward two columns wide where that fits."""
    from hocket.reporting import timeline_text

    title = ", ".join(
        (
            f"{found.name}",
            f"{_count(found.num_stages, 'stage')} on {_count(found.num_ranks, 'rank')}",
            _count(found.num_microbatches, "microbatch", "es"),
        )
    )
    unit = "forwards"
    return timeline_text(timeline, width, title=title, unit=unit, color=color, unicode=unicode)


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{plural * (number != 1)}"
