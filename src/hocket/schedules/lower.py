"""Lowering: a schedule of compute actions becomes one that runs, by passes with names.

    compute only   1F0 1B0
    communication  1RECV_F0 1F0 1B0 1SEND_B0            add_communication
    reduction      ... 1B0 1SEND_B0 1REDUCE_GRAD        add_reduce_grad

Each pass takes a schedule and returns a new one.

NCCL runs the operations of a communicator in the order in which they are enqueued, and a send
completes only while its receive runs. So the lines of all ranks are restrictions of one global
order, in which a message is a single event of both its ends: then a step completes even if every
action blocked, and so under every weaker rule (one queue per group, one per pair of ranks, any
buffering). Every topological order of the compute actions yields such an order; the one taken is
that of simulated time, which leaves the bubble as it is (docs/concepts/pipeline-parallel.md).
"""

from __future__ import annotations

import dataclasses
import functools
from operator import itemgetter

from hocket.spec.errors import ScheduleError
from hocket.spec.schedule import (
    BACKWARD,
    FORWARD,
    INPUT,
    RECEIVES,
    RECV_B,
    RECV_F,
    REDUCE_GRAD,
    SEND_B,
    SEND_F,
    SENDS,
    WEIGHT,
    WITHOUT_MICROBATCH,
    Action,
    Schedule,
    schedule_text,
)

_action = functools.lru_cache(maxsize=1 << 17)(Action)
"""Actions are values: schedules of a search are made of the same few thousand."""

_Key = tuple[int, bool, int | None]
"""Stage, whether forward, microbatch."""

_TICKS = {FORWARD: 50, BACKWARD: 100, INPUT: 50, WEIGHT: 50}
"""Simulated time of an action while messages are ordered: a backward takes two forwards."""
_MESSAGE_TICKS = 1
"""And of a message: 2% of a forward. With 0, many messages would be ready at equal times."""


def lower(schedule: Schedule) -> Schedule:
    """Every pass, in order. The schedule must be valid and hold no communication yet."""
    return add_reduce_grad(add_communication(schedule))


def halves(action: Action) -> tuple[Action, ...]:
    """The compute actions inside an action: its two parts for OVERLAP_F_B, else itself."""
    return action.parts if action.parts is not None else (action,)


def add_communication(schedule: Schedule) -> Schedule:
    """Add a send and a receive for every hidden state and gradient that changes ranks.

    A send follows its producer before the next compute action. A receive is posted in the
    receiver's line where the message becomes ready in simulated time: before the action that runs
    there at that moment, so that the transfer overlaps it. Stages on the same rank need no message.

    Args:
        schedule: without SEND and RECV.

    Raises:
        ScheduleError: the compute actions wait for each other without end.
    """
    place = schedule.stage_ranks
    timed, begins = _simulated(schedule)
    # Of equal time: compute actions, then the message whose consumer begins first, then what
    # takes no time (a REDUCE_GRAD that a file places).
    events: list[tuple[tuple[int, int, int, int], int, Action, int, Action | None]] = []
    for index, (end, rank, action) in enumerate(timed):
        for half in action.parts or (action,):
            stage, m, kind = half.stage, half.microbatch, half.kind
            forward = kind == FORWARD
            if kind == WEIGHT or kind not in _TICKS:
                continue
            other = stage + 1 if forward else stage - 1
            # What no rank consumes is not sent; `validate` names what is missing.
            if 0 <= other < len(place) and place[other] != rank and (other, forward, m) in begins:
                send = _action(stage, SEND_F if forward else SEND_B, m)
                receive = _action(other, RECV_F if forward else RECV_B, m)
                key = (end, 1, begins[other, forward, m], 2 * index + (not forward))
                events.append((key, rank, send, place[other], receive))
        order = 2 if action.kind in WITHOUT_MICROBATCH else 0
        events.append(((end, order, 0, index), rank, action, rank, None))
    events.sort(key=itemgetter(0))
    ranks: list[list[Action]] = [[] for _ in schedule.ranks]
    for _, rank, action, peer, other_end in events:
        ranks[rank].append(action)
        if other_end is not None:
            ranks[peer].append(other_end)
    return dataclasses.replace(schedule, ranks=tuple(map(tuple, ranks)))


def remove_communication(schedule: Schedule) -> Schedule:
    """Without sends and receives; the order of all else stays."""
    ranks = (tuple(a for a in line if a.kind not in (*SENDS, *RECEIVES)) for line in schedule.ranks)
    return dataclasses.replace(schedule, ranks=tuple(ranks))


def _simulated(
    schedule: Schedule,
) -> tuple[list[tuple[int, int, Action]], dict[_Key, int]]:
    """(end, rank, action) of every action of the lines, each line in its order; and the time at
    which each F and each B or I begins. Ranks run their lines as soon as the data are there; times
    are ticks."""
    place, lines = schedule.stage_ranks, schedule.ranks
    last = len(place) - 1
    produced: dict[_Key, int] = {}
    begins: dict[_Key, int] = {}
    timed: list[tuple[int, int, Action]] = []
    now, steps = [0] * len(lines), [0] * len(lines)

    def perform(rank: int, action: Action) -> bool:
        time, ticks = now[rank], 0
        keys = []
        for half in action.parts or (action,):
            stage, m, kind = half.stage, half.microbatch, half.kind
            ticks += _TICKS.get(kind, 0)
            if kind == WEIGHT or kind not in _TICKS:
                continue
            forward = kind == FORWARD
            keys.append((stage, forward, m))
            source = stage - 1 if forward else stage + 1
            if 0 <= source <= last:
                end = produced.get((source, forward, m))
                if end is None:
                    return False
                if place[source] != rank:
                    end += _MESSAGE_TICKS
                time = max(time, end)
        now[rank] = end = time + ticks
        for key in keys:
            begins[key], produced[key] = time, end
        timed.append((end, rank, action))
        return True

    moved = True
    while moved:
        moved = False
        for rank, line in enumerate(lines):
            while steps[rank] < len(line) and perform(rank, line[steps[rank]]):
                steps[rank] += 1
                moved = True
    stuck = [(r, steps[r]) for r, line in enumerate(lines) if steps[r] < len(line)]
    if stuck:
        raise ScheduleError(
            f"schedule {schedule.name!r} never ends: {lines[stuck[0][0]][stuck[0][1]]} waits\n"
            + schedule_text(lines, mark=stuck)
        )
    return timed, begins


def add_reduce_grad(schedule: Schedule) -> Schedule:
    """Put each stage's REDUCE_GRAD, where it has none, after its last weight gradient (and the
    messages after it)."""
    ranks = []
    for line in schedule.ranks:
        final: dict[int, int] = {}
        placed = set()
        for step, action in enumerate(line):
            kind = action.kind
            if kind in (BACKWARD, WEIGHT):
                final[action.stage] = step
            elif action.parts is not None:
                final[action.parts[1].stage] = step
            elif kind == REDUCE_GRAD:
                placed.add(action.stage)
        for stage in placed:
            final.pop(stage, None)
        for stage, step in final.items():
            while step + 1 < len(line) and line[step + 1].kind in (*SENDS, *RECEIVES):
                step += 1
            final[stage] = step
        new = list(line)
        for stage, step in sorted(final.items(), key=lambda item: (item[1], item[0]), reverse=True):
            new.insert(step + 1, Action(stage, REDUCE_GRAD))
        ranks.append(tuple(new))
    return dataclasses.replace(schedule, ranks=tuple(ranks))


def has_communication(schedule: Schedule) -> bool:
    """Whether a schedule holds sends or receives; one that holds none is not lowered yet."""
    return any(action.kind in (*SENDS, *RECEIVES) for _, action in schedule)


def relower(schedule: Schedule) -> Schedule:
    """The same order of compute actions, its messages ordered again: what was lowered by a version
    whose order NCCL does not complete."""
    return lower(remove_communication(schedule))
