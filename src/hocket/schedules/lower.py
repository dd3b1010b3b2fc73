"""Lowering: a schedule of compute actions becomes one that runs, by passes with names.

    compute only   1F0 1B0
    communication  1RECV_F0 1F0 1B0 1SEND_B0            add_communication
    reduction      ... 1B0 1SEND_B0 1REDUCE_GRAD        add_reduce_grad

Each pass takes a schedule and returns a new one.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import defaultdict

from hocket.spec.schedule import (
    BACKWARD,
    FORWARD,
    INPUT,
    OVERLAP_F_B,
    RECEIVES,
    RECV_B,
    RECV_F,
    REDUCE_GRAD,
    SEND_B,
    SEND_F,
    SENDS,
    WEIGHT,
    Action,
    Schedule,
)

_action = functools.lru_cache(maxsize=1 << 17)(Action)
"""Actions are values: schedules of a search are made of the same few thousand."""


def lower(schedule: Schedule) -> Schedule:
    """Every pass, in order. The schedule must hold no communication yet."""
    return add_reduce_grad(add_communication(schedule))


def halves(action: Action) -> tuple[Action, ...]:
    """The compute actions inside an action: its two parts for OVERLAP_F_B, else itself."""
    return action.parts if action.parts is not None else (action,)


def add_communication(schedule: Schedule) -> Schedule:
    """Put a receive before every action that needs one, and a send after its source.

    A send follows at once, a receive comes as late as it can. Where a rank would take the
    messages of one neighbour in another order than they are sent (several stages on a rank), the
    late one is moved forward: both ends of a pair keep the same order. Stages that lie on the
    same rank need no message.
    """
    assert not any(a.kind in (*SENDS, *RECEIVES) for _, a in schedule), "already lowered"
    place = schedule.stage_ranks
    last = schedule.num_stages - 1
    sent: dict[tuple[int, int], list[tuple[int, str, int | None]]] = defaultdict(list)
    # needs[rank][step]: receives of that step; sends follow it.
    needs: list[list[list[Action]]] = [[[] for _ in line] for line in schedule.ranks]
    sends: list[list[list[Action]]] = [[[] for _ in line] for line in schedule.ranks]
    at: dict[tuple[int, str, int | None], tuple[int, int]] = {}
    for rank, line in enumerate(schedule.ranks):
        for step, action in enumerate(line):
            for half in halves(action):
                s, m = half.stage, half.microbatch
                if half.kind == FORWARD:
                    if s > 0 and place[s - 1] != rank:
                        at[s, RECV_F, m] = (rank, step)
                    if s < last and place[s + 1] != rank:
                        sends[rank][step].append(_action(s, SEND_F, m))
                        sent[rank, place[s + 1]].append((s + 1, RECV_F, m))
                elif half.kind in (BACKWARD, INPUT):
                    if s < last and place[s + 1] != rank:
                        at[s, RECV_B, m] = (rank, step)
                    if s > 0 and place[s - 1] != rank:
                        sends[rank][step].append(_action(s, SEND_B, m))
                        sent[rank, place[s - 1]].append((s - 1, RECV_B, m))
    for receives in sent.values():
        limit: int | None = None
        late = []
        for receive in reversed(receives):
            if receive not in at:
                continue  # nobody consumes it; the check names what is missing
            rank, step = at[receive]
            limit = step if limit is None else min(limit, step)
            late.append((rank, limit, receive))
        for rank, step, receive in reversed(late):
            needs[rank][step].append(_action(*receive))
    ranks = []
    for rank, line in enumerate(schedule.ranks):
        whole: list[Action] = []
        for before, action, after in zip(needs[rank], line, sends[rank], strict=True):
            whole += before
            whole.append(action)
            whole += after
        ranks.append(tuple(whole))
    return dataclasses.replace(schedule, ranks=tuple(ranks))


def add_reduce_grad(schedule: Schedule) -> Schedule:
    """Put each stage's REDUCE_GRAD after its last weight gradient (and after what that sends)."""
    ranks = []
    for line in schedule.ranks:
        final: dict[int, int] = {}
        for step, action in enumerate(line):
            for half in halves(action):
                if half.kind in (BACKWARD, WEIGHT):
                    final[half.stage] = step
        for stage, step in final.items():
            while step + 1 < len(line) and line[step + 1].kind in SENDS:
                step += 1
            final[stage] = step
        new = list(line)
        for stage, step in sorted(final.items(), key=lambda item: (item[1], item[0]), reverse=True):
            new.insert(step + 1, Action(stage, REDUCE_GRAD))
        ranks.append(tuple(new))
    return dataclasses.replace(schedule, ranks=tuple(ranks))


def is_compute_only(schedule: Schedule) -> bool:
    """Whether a schedule still lacks all communication."""
    kinds = {a.kind for _, a in schedule}
    return not kinds & {*SENDS, *RECEIVES, REDUCE_GRAD} and bool(
        kinds & {FORWARD, BACKWARD, INPUT, WEIGHT, OVERLAP_F_B}
    )
