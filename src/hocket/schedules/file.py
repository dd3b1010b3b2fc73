"""Schedules in files: the text form of `spec.Schedule`, checked when it is read."""

from __future__ import annotations

import os
from pathlib import Path

from hocket.schedules.lower import has_communication, lower
from hocket.schedules.validate import validate_schedule
from hocket.spec.errors import ScheduleError
from hocket.spec.layout import Layout
from hocket.spec.schedule import Schedule


def load_schedule(
    path: str | os.PathLike[str],
    *,
    layout: Layout | None = None,
    num_microbatches: int | None = None,
) -> Schedule:
    """Read, lower where it holds no sends and receives, and check.

    Raises:
        ScheduleError: the file cannot be read, does not run, or does not fit `layout` or
            `num_microbatches`, each where given.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ScheduleError(f"the schedule file {path} cannot be read: {error}") from None
    try:
        schedule = Schedule.parse(text)
    except ScheduleError as error:
        raise ScheduleError(f"{path}: {error.message}", hint=error.hint) from None
    if not has_communication(schedule):
        validate_schedule(schedule, compute_only=True)
        schedule = lower(schedule)
    validate_schedule(schedule, layout=layout, num_microbatches=num_microbatches)
    return schedule
