"""Play one schedule for many prices at once: the same rules as `simulate`, without its events.

What waits for what depends on the schedule alone, so the schedule is walked once and every time is
an array over the prices.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from hocket.spec.errors import ScheduleError
from hocket.spec.schedule import (
    BACKWARD,
    COMPUTE,
    INPUT,
    RECEIVES,
    RECV_B,
    RECV_F,
    REDUCE_GRAD,
    SEND_F,
    SENDS,
    WEIGHT,
    Schedule,
)

Floats = NDArray[np.float64]


def durations(schedule: Schedule, seconds: Mapping[str, Floats]) -> Floats:
    """Seconds of the whole schedule under each price.

    Args:
        schedule: lowered and valid.
        seconds: letter (`F`, `B`, `SEND_F` ...) to seconds, [K prices, stages]; as in
            `spec.prices.Prices`, a letter that is absent costs nothing, except that B is I and W
            together, and I and W are half of B each.

    Returns:
        [K], equal to `simulate(schedule, prices).duration` of each.

    Raises:
        ScheduleError: the schedule never ends.
    """
    count = next(iter(seconds.values())).shape[0]
    prices = {kind: list(np.ascontiguousarray(value.T)) for kind, value in _all(seconds).items()}
    now = [np.zeros(count) for _ in schedule.ranks]
    lane = [np.zeros(count) for _ in schedule.ranks]
    arrival: dict[tuple[int, str, int | None], Floats] = {}
    last = np.zeros(count)
    steps = [0] * schedule.num_ranks
    moved = True
    while moved:
        moved = False
        for rank, line in enumerate(schedule.ranks):
            step = steps[rank]
            while step < len(line):
                action = line[step]
                kind, stage = action.kind, action.stage
                if kind in COMPUTE:
                    if kind in prices:
                        now[rank] = now[rank] + prices[kind][stage]
                elif kind in RECEIVES:
                    message = arrival.pop((stage, kind, action.microbatch), None)
                    if message is None:
                        break
                    now[rank] = np.maximum(now[rank], message)
                elif kind in SENDS or kind == REDUCE_GRAD:
                    if kind in prices:
                        start = np.maximum(now[rank], lane[rank])
                        end = start + prices[kind][stage]
                        lane[rank] = end
                        last = np.maximum(last, end)
                    else:
                        end = np.maximum(now[rank], lane[rank])
                    if kind in SENDS:
                        forward = kind == SEND_F
                        there = (stage + 1, RECV_F) if forward else (stage - 1, RECV_B)
                        arrival[(*there, action.microbatch)] = end
                elif action.parts is not None:
                    for part in action.parts:
                        if part.kind in prices:
                            now[rank] = now[rank] + prices[part.kind][part.stage]
                step += 1
            moved = moved or step > steps[rank]
            steps[rank] = step
    if any(steps[rank] < len(line) for rank, line in enumerate(schedule.ranks)):
        raise ScheduleError(f"schedule {schedule.name!r} never ends")
    for end in now:
        last = np.maximum(last, end)
    return last


def _all(seconds: Mapping[str, Floats]) -> dict[str, Floats]:
    """With the letters that others imply."""
    found = dict(seconds)
    halves = [seconds[kind] for kind in (INPUT, WEIGHT) if kind in seconds]
    if BACKWARD not in found and halves:
        found[BACKWARD] = sum(halves[1:], start=halves[0])
    elif BACKWARD in seconds:
        for kind in (INPUT, WEIGHT):
            found.setdefault(kind, seconds[BACKWARD] / 2)
    return found
