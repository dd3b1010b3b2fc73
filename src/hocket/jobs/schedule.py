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

    Raises:
        ScheduleError: it cannot be read, or does not run; the board is printed.
    """
    from hocket.schedules.registry import build
    from hocket.simulation.simulate import simulate

    count = layout.microbatches or (2 * layout.pp if layout.num_stages > 1 else 1)
    found = build(dataclasses.replace(layout, microbatches=count), count)
    return found, simulate(found)
