"""Messages of a served pipeline on NCCL complete, and no later plan holds up an earlier one."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest

from hocket.simulation.nccl import Trace, simulate_nccl
from tests.runtime_pipeline.test_message_order import Group

pytestmark = pytest.mark.torch

PLANS = 6
DEPTH = 2


class Mesh:
    """The axis of one stage; its group notes what is enqueued."""

    def __init__(self, rank: int, pp: int, device: str) -> None:
        import torch

        from hocket.runtime.mesh import Axis
        from hocket.runtime.record import Recorder

        self.trace = Trace(rank)
        ranks = tuple(range(pp))
        group: Any = Group(self.trace, ranks)
        group.name = lambda: "nccl"
        self.axes = {name: Axis(name) for name in ("tp", "cp")}
        self.axes["pp"] = Axis("pp", pp, rank, ranks, group)
        self.recorder, self.device = Recorder(rank), torch.device(device)

    def axis(self, name: str) -> Any:
        return self.axes[name]


class Runner:
    def run(self, plan: Any, hidden: Any) -> Any:
        import torch

        tokens = len(plan.tokens)
        assert hidden is None or hidden.shape == (1, tokens, 1)
        return torch.ones(1, tokens, 1, device="meta")

    def num_tokens(self, plan: Any) -> int:
        return len(plan.tokens)


class Sampler:
    def begin(self, plan: Any) -> None: ...

    def sample(self, logits: Any, plan: Any) -> None: ...


def served(pp: int, ahead: int) -> list[Trace]:
    """What each stage enqueues for PLANS plans, `ahead` of which reach it before it runs one."""
    import torch

    from hocket.serving.engine.part import StagePart
    from hocket.serving.scheduling.step import StepPlan

    traces = []
    for rank in range(pp):
        mesh = Mesh(rank, pp, "meta")
        sampler = Sampler() if rank == pp - 1 else None
        part = StagePart(
            Runner(),
            sampler,
            mesh,  # type: ignore[arg-type]
            hidden_size=1,
            dtype=torch.float32,
            depth=DEPTH,
        )
        waiting: deque[StepPlan] = deque()
        plans = iter([StepPlan(n, [], [0] * (n + 1)) for n in range(PLANS)])
        while True:
            while len(waiting) <= ahead and (plan := next(plans, None)) is not None:
                part.expect(plan)
                waiting.append(plan)
            if not waiting:
                break
            part.run(waiting.popleft())
        traces.append(mesh.trace)
    return traces


@pytest.mark.parametrize("pp", [2, 3, 4])
@pytest.mark.parametrize("ahead", [0, 1, DEPTH])
@pytest.mark.parametrize("rule", ["eager", "lazy"])
def test_plans_complete_one_by_one(pp: int, ahead: int, rule: str) -> None:
    traces = served(pp, ahead)
    assert simulate_nccl(traces, rule).ok
    # No receive of a later plan is enqueued before the send of an earlier one.
    for trace in traces:
        sizes = [op.numel for op in trace.ops]
        assert sizes == sorted(sizes)
