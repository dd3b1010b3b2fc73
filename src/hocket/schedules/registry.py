"""The schedules by name, and `build_schedule`: what a layout asks for, lowered and checked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hocket.schedules.file import load_schedule
from hocket.schedules.gpipe import gpipe
from hocket.schedules.lower import lower
from hocket.schedules.one_f_one_b import interleaved, one_f_one_b
from hocket.schedules.sequential import sequential
from hocket.schedules.validate import validate_schedule
from hocket.schedules.zb_v import v_shape, zb_v
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
    "zb-v": zb_v,
}

_PLACES: dict[str, Callable[[int, int], tuple[int, ...]]] = {"zb-v": v_shape}
"""Stage to pipeline rank (of pp and virtual stages), where it is not stage s on rank s mod pp."""

MOST_FORWARDS = 500_000
"""In a schedule; an action takes some 150 bytes."""

NAMES = tuple(_BUILDERS)
"""Every schedule that has a name."""


def build_schedule(layout: Layout, num_microbatches: int, *, checked: bool = True) -> Schedule:
    """The schedule that `layout.schedule` names, or reads it where that is the path of a file.

    Stage s lies on pipeline rank s mod pp, or as the schedule places it. The result is lowered, and
    checked unless the caller, a planner that looks at hundreds, says otherwise.

    Raises:
        ScheduleError: an unknown name, a count of microbatches that the schedule cannot take, or
            a file that cannot be read or does not run.
    """
    if num_microbatches < 1:
        raise ScheduleError(f"a step of {num_microbatches} microbatches; it needs at least 1")
    if layout.num_stages * num_microbatches > MOST_FORWARDS:
        raise ScheduleError(
            f"{num_microbatches:,} microbatches in {layout.num_stages:,} stages; a step has at "
            f"most {MOST_FORWARDS:,} forwards, all stages' together",
            hint=f"--microbatches {max(1, MOST_FORWARDS // layout.num_stages)}",
        )
    name = layout.schedule
    if name not in _BUILDERS:
        if Path(name).is_file():
            return load_schedule(name, layout=layout, num_microbatches=num_microbatches)
        message, hint = unknown("schedule", name, NAMES)
        raise ScheduleError(message + ", or the path of a schedule file", hint=hint)
    schedule = lower(compute(layout, num_microbatches))
    if checked:
        validate_schedule(schedule, layout=layout)
    return schedule


def compute(layout: Layout, num_microbatches: int) -> Schedule:
    """The compute actions alone of a schedule that has a name.

    Raises:
        ScheduleError: stages on a rank, or microbatches, that the schedule cannot take.
    """
    ranks = _BUILDERS[layout.schedule](layout.pp, layout.virtual_stages, num_microbatches)
    return Schedule(
        name=layout.schedule,
        num_microbatches=num_microbatches,
        stage_ranks=stage_ranks(layout),
        ranks=ranks,
    )


def stage_ranks(layout: Layout) -> tuple[int, ...]:
    """Stage to the pipeline rank that holds it, for a schedule that has a name."""
    if layout.schedule in _PLACES:
        return _PLACES[layout.schedule](layout.pp, layout.virtual_stages)
    return tuple(s % layout.pp for s in range(layout.num_stages))
