"""Lowered schedules complete under NCCL's rules: named ones and random ones, as text."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.schedules import build_schedule, lower, relower, validate_schedule
from hocket.simulation import simulate
from hocket.simulation.nccl import EnqueuedOp, Trace, simulate_nccl
from hocket.spec.errors import ScheduleError
from hocket.spec.layout import Layout
from hocket.spec.schedule import BACKWARD, FORWARD, INPUT, RECEIVES, SENDS, Action, Schedule
from tests.schedules.random_schedules import random_schedule


def traces(schedule: Schedule) -> list[Trace]:
    """What the lines enqueue: messages in their order, a wait before the action that consumes."""
    group = ("pp", *range(schedule.num_ranks))
    found = []
    for rank, line in enumerate(schedule.ranks):
        trace = Trace(rank)
        posted: dict[Action, EnqueuedOp] = {}
        for action in line:
            if action.kind in (*SENDS, *RECEIVES):
                name = "send" if action.kind in SENDS else "recv"
                peer = schedule.stage_ranks[action.peer_stage]
                # The size names the message: data exchanged in silence would be a mismatch.
                sender = action.stage if name == "send" else action.peer_stage
                forward = action.kind.endswith("F")
                size = 1 + (sender * 100 + (action.microbatch or 0)) * 2 + forward
                op = trace.enqueue(
                    EnqueuedOp(name, group, rank, size, "float32", peer, where=str(action))
                )
                if name == "recv":
                    posted[action] = op
            for part in action.parts or (action,):
                kind = {FORWARD: "RECV_F", BACKWARD: "RECV_B", INPUT: "RECV_B"}.get(part.kind, "")
                arriving = posted.pop(Action(part.stage, kind, part.microbatch), None)
                if arriving is not None:
                    trace.wait(arriving)
        assert not posted
        found.append(trace)
    return found


def verdicts(schedule: Schedule) -> list[bool]:
    return [simulate_nccl(traces(schedule), rule).ok for rule in ("eager", "lazy")]


NAMED = [
    (name, pp, v, m)
    for name, stages in [
        ("sequential", (1, 2)), ("gpipe", (1, 2, 3)), ("1f1b", (1,)), ("interleaved", (2, 3, 4)),
        ("zero-bubble", (1,)), ("zb-v", (2,)),
    ]
    for pp in (2, 3, 4, 8)
    for v in stages
    for m in (1, pp, 2 * pp + (name != "interleaved"))
]  # fmt: skip


@pytest.mark.parametrize(("name", "pp", "v", "m"), NAMED)
def test_named_schedules_complete(name: str, pp: int, v: int, m: int) -> None:
    schedule = build_schedule(Layout(pp=pp, virtual_stages=v, schedule=name), m)
    assert verdicts(schedule) == [True, True]


@given(st.integers(0, 2**32))
@settings(max_examples=150, deadline=None)
def test_random_schedules_complete(seed: int) -> None:
    compute = random_schedule(seed)
    validate_schedule(compute, compute_only=True)
    schedule = lower(compute)
    validate_schedule(schedule)
    assert verdicts(schedule) == [True, True]
    assert verdicts(relower(schedule)) == [True, True]
    assert Schedule.parse(str(schedule)) == schedule
    # Messages change nothing in the order of compute actions, and none is lost.
    for before, after in zip(compute.ranks, schedule.ranks, strict=True):
        assert [a for a in after if a in before] == list(before)
    simulate(schedule)


@given(st.integers(0, 2**32))
@settings(max_examples=150, deadline=None)
def test_what_the_check_lets_pass_completes(seed: int) -> None:
    """Lines in which one message was moved: what `validate` accepts, NCCL completes."""
    schedule = lower(random_schedule(seed))
    rng = random.Random(seed)
    ranks = [list(line) for line in schedule.ranks]
    line = rng.choice(ranks)
    messages = [i for i, action in enumerate(line) if action.kind in (*SENDS, *RECEIVES)]
    if not messages:
        return
    action = line.pop(rng.choice(messages))
    line.insert(rng.randrange(len(line) + 1), action)
    moved = dataclasses.replace(schedule, ranks=tuple(map(tuple, ranks)))
    try:
        validate_schedule(moved)
    except ScheduleError:
        return
    assert verdicts(moved) == [True, True]


def test_a_swapped_pair_is_found() -> None:
    """Every exchange of two messages of a line that NCCL cannot complete is rejected."""
    schedule = build_schedule(Layout(pp=3), 4)
    found = 0
    for rank, line in enumerate(schedule.ranks):
        messages = [i for i, action in enumerate(line) if action.kind in (*SENDS, *RECEIVES)]
        for a, b in itertools.pairwise(messages):
            new = list(line)
            new[a], new[b] = new[b], new[a]
            ranks = (*schedule.ranks[:rank], tuple(new), *schedule.ranks[rank + 1 :])
            swapped = dataclasses.replace(schedule, ranks=ranks)
            try:
                bad = verdicts(swapped) != [True, True]
            except AssertionError:  # a receive after its consumer
                bad = True
            if bad:
                found += 1
                with pytest.raises(ScheduleError):
                    validate_schedule(swapped)
    assert found > 20


def test_the_order_for_buffered_sends_does_not_complete() -> None:
    """Sends at once and receives as late as can be: 1F1B from three stages on hangs on NCCL."""
    late = []
    schedule = build_schedule(Layout(pp=3), 6)
    for line in schedule.ranks:
        new: list[Action] = []
        waiting: list[Action] = []
        for action in line:
            if action.kind in RECEIVES:
                waiting.append(action)
                continue
            kind = {FORWARD: "RECV_F", BACKWARD: "RECV_B"}.get(action.kind, "")
            needed = Action(action.stage, kind, action.microbatch)
            if needed in waiting:
                waiting.remove(needed)
                new.append(needed)
            new.append(action)
        late.append(tuple(new))
    old = dataclasses.replace(schedule, ranks=tuple(late))
    assert verdicts(old) == [False, False]
    with pytest.raises(ScheduleError, match="deadlocks"):
        validate_schedule(old)
    assert verdicts(relower(old)) == [True, True]
