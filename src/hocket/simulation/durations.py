"""Play one schedule for many prices at once, on a compute and a communication lane per rank.

    compute         F, B, I, W in the order of the rank's line; one that consumes a message begins
                    once it has arrived
    communication   a rank's messages, sent and received, one at a time in the order of its line,
                    as a communicator of NCCL runs them: one begins once both ends have come to it,
                    the action before its send and the one before its receive having ended.
                    REDUCE_GRAD queues with what the rank sends and holds up no compute

A message that costs nothing is not modelled: it arrives as its producer ends. What waits for what
depends on the schedule alone, so the schedule is walked once and every time is an array over the
prices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from hocket.spec.errors import ScheduleError
from hocket.spec.schedule import (
    BACKWARD,
    COMPUTE,
    FORWARD,
    INPUT,
    RECEIVES,
    RECV_B,
    RECV_F,
    REDUCE_GRAD,
    SEND_F,
    SENDS,
    WEIGHT,
    Action,
    Schedule,
    schedule_text,
)

Floats = NDArray[np.float64]

Note = Callable[[int, Action, str, Floats, Floats], None]
"""Gets rank, action, lane, start and end of every span."""


def durations(
    schedule: Schedule, seconds: Mapping[str, Floats], note: Note | None = None
) -> Floats:
    """Seconds of the whole schedule under each price.

    Args:
        schedule: lowered and valid.
        seconds: letter (`F`, `B`, `SEND_F` ...) to seconds, [K prices, stages]; as in
            `spec.prices.Prices`, a letter that is absent costs nothing, except that B is I and W
            together, and I and W are half of B each.

    Returns:
        [K].

    Raises:
        ScheduleError: the schedule never ends; `schedules.validate` gives the reason.
    """
    count = next(iter(seconds.values())).shape[0]
    prices = {kind: list(np.ascontiguousarray(value.T)) for kind, value in _all(seconds).items()}
    lines, place = schedule.ranks, schedule.stage_ranks
    free = np.zeros(count)
    now = [free for _ in lines]
    queue, sent = list(now), list(now)
    reduced: dict[int, Floats] = {}
    arrival: dict[tuple[int, bool, int | None], Floats] = {}
    last = free
    steps = [0] * schedule.num_ranks
    costs = {
        (kind, stage): (cost, bool(cost.all()), cost > 0)
        for kind in SENDS
        for stage, cost in enumerate(prices.get(kind, ()))
        if cost.any()
    }

    def send(rank: int, action: Action) -> bool:
        """Whether the other end has come to a message, which then is over."""
        forward = action.kind == SEND_F
        stage, kind = (action.stage + 1, RECV_F) if forward else (action.stage - 1, RECV_B)
        peer = place[stage]
        if steps[peer] == len(lines[peer]):
            return False
        end = lines[peer][steps[peer]]
        if end.kind != kind or end.stage != stage or end.microbatch != action.microbatch:
            return False
        steps[peer] += 1
        time = now[rank]
        if (action.kind, action.stage) in costs:
            cost, always, paid = costs[action.kind, action.stage]
            start = np.maximum(np.maximum(time, now[peer]), np.maximum(queue[rank], queue[peer]))
            if rank in reduced:
                start = np.maximum(start, reduced[rank])
            time = start + cost
            if note is not None:
                note(rank, action, "communication", start, time)
                note(peer, end, "communication", start, time)
            if always:
                sent[rank] = queue[rank] = queue[peer] = time
            else:
                for ends, index in ((sent, rank), (queue, rank), (queue, peer)):
                    ends[index] = np.where(paid, time, ends[index])
                time = np.where(paid, time, now[rank])
        arrival[stage, forward, action.microbatch] = time
        return True

    moved = True
    while moved:
        moved = False
        for rank, line in enumerate(lines):
            while steps[rank] < len(line):
                action = line[steps[rank]]
                if action.kind in RECEIVES or (action.kind in SENDS and not send(rank, action)):
                    break
                for part in action.parts or (action,):
                    kind = part.kind
                    if kind in COMPUTE:
                        key = (part.stage, kind == FORWARD, part.microbatch)
                        if kind != WEIGHT and key in arrival:
                            now[rank] = np.maximum(now[rank], arrival.pop(key))
                        start = now[rank]
                        if kind in prices:
                            now[rank] = start + prices[kind][part.stage]
                        if note is not None:
                            note(rank, part, "compute", start, now[rank])
                    elif kind == REDUCE_GRAD and kind in prices:
                        start = np.maximum(now[rank], sent[rank])
                        start = np.maximum(start, reduced.get(rank, free))
                        reduced[rank] = start + prices[kind][part.stage]
                        if note is not None:
                            note(rank, part, "communication", start, reduced[rank])
                steps[rank] += 1
                moved = True
    for rank, line in enumerate(lines):
        if steps[rank] < len(line):
            raise ScheduleError(
                f"schedule {schedule.name!r} never ends: {line[steps[rank]]} waits\n"
                + schedule_text(lines, mark=[(rank, steps[rank])])
            )
    for end in (*now, *sent, *reduced.values()):
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
