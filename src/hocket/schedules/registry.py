"""The schedules by name, and `build`: what a layout asks for, lowered and checked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hocket.schedules.file import load
from hocket.schedules.gpipe import gpipe
from hocket.schedules.lower import lower
from hocket.schedules.one_f_one_b import interleaved, one_f_one_b
from hocket.schedules.sequential import sequential
from hocket.schedules.validate import validate
from hocket.schedules.zero_bubble import zero_bubble
from hocket.spec.errors import ScheduleError, unknown
from hocket.spec.layout import Layout
from hocket.spec.schedule import Action, Schedule

Builder = Callable[[int, int, int], tuple[tuple[Action, ...], ...]]

_BUILDERS: dict[str, Builder] = {
    "sequential": sequential,
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zero-bubble": zero_bubble,
}

NAMES = tuple(_BUILDERS)
"""Every schedule that has a name."""


def build(layout: Layout, num_microbatches: int, *, checked: bool = True) -> Schedule:
    """The schedule that `layout.schedule` names, or reads it where that is the path of a file.

    Stage s lies on pipeline rank s mod pp. The result is lowered, and checked unless the caller,
    a planner that looks at hundreds, says otherwise.

    Raises:
        ScheduleError: an unknown name, a count of microbatches that the schedule cannot take, or
            a file that cannot be read or does not run.
    """
    if num_microbatches < 1:
        raise ScheduleError(f"a step of {num_microbatches} microbatches; it needs at least 1")
    name = layout.schedule
    if name not in _BUILDERS:
        if Path(name).is_file():
            return load(name, layout=layout, num_microbatches=num_microbatches)
        message, hint = unknown("schedule", name, NAMES)
        raise ScheduleError(message + ", or the path of a schedule file", hint=hint)
    compute = Schedule(
        name=name,
        num_microbatches=num_microbatches,
        stage_ranks=tuple(s % layout.pp for s in range(layout.num_stages)),
        ranks=_BUILDERS[name](layout.pp, layout.virtual_stages, num_microbatches),
    )
    schedule = lower(compute)
    if checked:
        validate(schedule, layout=layout)
    return schedule
