"""The table of GPU checks: every row in the order in which a report card executes it.

The report card, the GPU tests and their rehearsals are all generated from it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from hocket.doctor import (
    attention,
    checkpoints,
    compiling,
    context,
    environment,
    equality,
    experts,
    faults,
    groups,
    launching,
    memory,
    multi_gpu,
    numbers,
    pipelines,
    prediction,
    rehearsed,
    sampling,
    serving,
    speed,
    steps,
    trials,
)
from hocket.doctor.check import GpuCheck
from hocket.spec.doctor import GROUPS
from hocket.spec.errors import OptionError, unknown

_MODULES: tuple[Any, ...] = (
    environment,
    launching,
    numbers,
    attention,
    trials,
    context,
    experts,
    serving,
    sampling,
    equality,
    speed,
    memory,
    checkpoints,
    faults,
    prediction,
    rehearsed,
    multi_gpu,
    groups,
    pipelines,
    steps,
    compiling,
)

CHECKS: tuple[GpuCheck, ...] = tuple(
    sorted(
        (check for module in _MODULES for check in module.CHECKS),
        key=lambda check: GROUPS.index(check.group),
    )
)
"""In the order of their groups; within a group as the modules have them."""


@functools.cache
def _by_id() -> dict[str, GpuCheck]:
    found = {check.id: check for check in CHECKS}
    assert len(found) == len(CHECKS), "two checks have one id"
    return found


def by_id(name: str) -> GpuCheck:
    """The row of one check.

    Raises:
        OptionError: no check has this id; the nearest is suggested.
    """
    if name not in _by_id():
        _, hint = unknown("check", name, _by_id())
        near = hint if hint.startswith("did you mean") else "hocket doctor --list"
        raise OptionError(f"unknown check {name!r}; there are {len(CHECKS)}", hint=near)
    return _by_id()[name]


def select(only: Sequence[str] = (), groups: Sequence[str] = ()) -> tuple[GpuCheck, ...]:
    """Rows by id and by group, in the table's order; neither given: all.

    Raises:
        OptionError: an unknown id or group; the nearest is suggested.
    """
    for group in groups:
        if group not in GROUPS:
            message, hint = unknown("group of checks", group, GROUPS)
            raise OptionError(message, hint=hint)
    wanted = {by_id(name).id for name in only}
    if not wanted and not groups:
        return CHECKS
    return tuple(c for c in CHECKS if c.id in wanted or c.group in groups)
