"""The executor, rank by rank, with groups that note what it enqueues: does it complete on NCCL?"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.schedules import build_schedule, lower
from hocket.simulation import simulate
from hocket.simulation.nccl import EnqueuedOp, Trace, simulate_nccl
from hocket.spec.layout import Layout
from hocket.spec.schedule import RECEIVES, SENDS, Schedule
from tests.schedules.random_schedules import random_schedule
from tests.schedules.test_message_order import NAMED

pytestmark = pytest.mark.torch


class Toy:
    """A stage that multiplies by one number, on the meta device. Rows name the microbatch."""

    def __init__(self, index: int, stages: int) -> None:
        import torch

        self.module = torch.nn.Linear(1, 1, bias=False, device="meta")
        self.index, self.num_stages, self.dtype = index, stages, torch.float32
        self.is_first, self.is_last = index == 0, index == stages - 1

    def hidden_shape(self, microbatch: Any) -> tuple[int, ...]:
        return (microbatch["rows"], 1)

    def forward(self, microbatch: Any, hidden: Any) -> Any:
        import torch

        if hidden is None:
            hidden = torch.ones(microbatch["rows"], 1, device="meta")
        assert hidden.shape[0] == microbatch["rows"], "another microbatch's message"
        y = self.module(hidden)
        return (y.sum(), torch.zeros((), device="meta")) if self.is_last else y


class Noted:
    """Work on NCCL: `wait` makes the compute stream wait; the host does not learn of completion."""

    def __init__(self, trace: Trace, op: EnqueuedOp, unfinished: set[EnqueuedOp]) -> None:
        self.trace, self.op, self.unfinished = trace, op, unfinished
        unfinished.add(op)

    def wait(self) -> None:
        self.trace.wait(self.op)
        self.unfinished.discard(self.op)

    def is_completed(self) -> bool:
        raise AssertionError("the host asks the device")


class Group:
    """A process group that notes sends and receives."""

    def __init__(self, trace: Trace, ranks: tuple[int, ...]) -> None:
        self.trace, self.ranks = trace, ranks
        self.unfinished: set[EnqueuedOp] = set()
        self.most = 0

    def _note(self, name: str, tensors: list[Any], peer: int) -> Noted:
        numel = tensors[0].numel()
        op = EnqueuedOp(name, ("pp", *self.ranks), self.trace.rank, numel, "float32", peer)
        work = Noted(self.trace, self.trace.enqueue(op), self.unfinished)
        self.most = max(self.most, len(self.unfinished))
        return work

    def send(self, tensors: list[Any], peer: int, tag: int) -> Noted:
        return self._note("send", tensors, peer)

    def recv(self, tensors: list[Any], peer: int, tag: int) -> Noted:
        return self._note("recv", tensors, peer)


def executed(schedule: Schedule, evaluated: int = 0) -> tuple[list[Trace], list[int]]:
    """What every rank enqueues in a step and an evaluation of `evaluated` microbatches; and the
    most messages of a rank whose tensors are held at once."""
    from hocket.runtime.mesh import Axis
    from hocket.runtime.pipeline import Executor
    from hocket.runtime.record import Recorder

    ranks = tuple(range(schedule.num_ranks))
    traces, most = [], []
    for rank in ranks:
        trace = Trace(rank)
        group = Group(trace, ranks)
        noting: Any = group if len(ranks) > 1 else None
        axis = Axis("pp", len(ranks), rank, ranks, noting)
        stages: Any = [Toy(s, schedule.num_stages) for s in schedule.stages_of(rank)]
        executor = Executor(stages, schedule, axis, Recorder(rank), device="meta")
        executor.step([{"rows": m + 1} for m in range(schedule.num_microbatches)], 1.0)
        assert not group.unfinished
        line = schedule.ranks[rank]
        messages = [a for a in line if a.kind in (*SENDS, *RECEIVES)]
        assert [op.name == "send" for op in trace.ops] == [a.kind in SENDS for a in messages]
        assert [op.numel for op in trace.ops] == [(a.microbatch or 0) + 1 for a in messages]
        most.append(group.most)
        executor.evaluate([{"rows": m + 1} for m in range(evaluated)])
        assert not group.unfinished
        traces.append(trace)
    return traces, most


def complete(traces: list[Trace]) -> None:
    for rule in ("eager", "lazy"):
        verdict = simulate_nccl(traces, rule)
        assert verdict.ok, (rule, verdict.waiting, verdict.mismatches, verdict.picture())


@pytest.mark.parametrize(("name", "pp", "v", "m"), NAMED)
def test_named_schedules_complete(name: str, pp: int, v: int, m: int) -> None:
    schedule = build_schedule(Layout(pp=pp, virtual_stages=v, schedule=name), m)
    traces, most = executed(schedule, evaluated=m + 1)
    complete(traces)
    # Tensors of messages do not pile up while the host runs ahead of the device.
    assert max(most) <= 2 * pp * v + 4


@given(st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_random_schedules_complete(seed: int) -> None:
    schedule = lower(random_schedule(seed))
    complete(executed(schedule, evaluated=seed % 7)[0])


@pytest.mark.parametrize(("name", "pp", "v", "m"), NAMED[::5])
def test_the_simulated_order_is_the_executed_one(name: str, pp: int, v: int, m: int) -> None:
    from hocket.spec.prices import Prices

    schedule = build_schedule(Layout(pp=pp, virtual_stages=v, schedule=name), m)
    timeline = simulate(schedule, Prices.uniform(schedule.num_stages, send=0.02))
    traces, _ = executed(schedule)
    for rank, trace in enumerate(traces):
        events = [e for e in timeline.events if e.rank == rank and e.lane == "communication"]
        events.sort(key=lambda e: e.start)
        assert [(e.kind in SENDS, (e.microbatch or 0) + 1) for e in events] == [
            (op.name == "send", op.numel) for op in trace.ops
        ]
