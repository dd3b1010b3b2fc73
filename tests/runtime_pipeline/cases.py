"""What each rank runs in the pipeline tests: its part of the pipeline beside one process."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from hocket.runtime.mesh import Mesh
from hocket.runtime.pipeline import Executor, Stage, cut
from hocket.runtime.record import Recorder
from hocket.schedules import build_schedule
from hocket.spec.layout import Layout
from hocket.spec.schedule import Schedule
from tests.runtime_pipeline.models import HIDDEN, MODELS, batch, loss_fn, reference, slices

ROWS = 12


def difference(mine: torch.Tensor, other: torch.Tensor) -> float:
    """Largest difference as a share of the reference's largest entry."""
    return float((mine - other).abs().max() / other.abs().max().clamp_min(1e-12))


def transparency(
    context: Any,
    model: str,
    layout: str,
    microbatches: int,
    bounds: list[int],
    tied: bool = False,
    schedule: str | None = None,
    record: bool = False,
) -> dict[str, Any]:
    """Two steps of a pipeline against one process: worst differences of this rank."""
    torch.manual_seed(0)
    module, plan = MODELS[model](sum(bounds), tied)
    whole = batch(ROWS, plan.input_argument)
    expected, gradients = reference(module, whole)
    parsed = Layout.parse(layout)
    board = Schedule.parse(schedule) if schedule else build_schedule(parsed, microbatches)
    recorder = Recorder(context.rank)
    mesh = Mesh(parsed, context.rank, recorder=recorder)
    axis = mesh.axis("pp")
    stages = [
        Stage(
            cut(module, plan, bounds, index),
            index,
            len(bounds),
            plan=plan,
            loss_fn=loss_fn,
            hidden_size=HIDDEN,
        )
        for index in board.stages_of(axis.index)
    ]
    owned = sum(p.numel() for stage in stages for p in stage.module.parameters())
    executor = Executor(stages, board, axis, recorder)
    pieces = slices(whole, board.num_microbatches)
    tokens = int((whole["labels"] != -100).sum())
    recorder.phase, recorder.recording = "microbatch", record
    worst, losses = 0.0, []
    tie = plan.before[0] + ".weight"
    head = plan.head[0] + ".weight"
    for _ in range(2):
        for stage in stages:
            stage.module.zero_grad(set_to_none=True)
        loss = executor.step(pieces, tokens)
        dist.all_reduce(loss)
        losses.append(float(loss))
        mine = {}
        for stage in stages:
            for name, p in stage.module.named_parameters(remove_duplicate=False):
                mine[name] = p.grad
        if tied:
            total = torch.zeros_like(gradients[tie])
            for name in {tie, head} & set(mine):
                total += mine.pop(name)
            dist.all_reduce(total)
            mine[tie] = total
        worst = max([worst, *(difference(g, gradients[n]) for n, g in mine.items())])
    before = recorder.collectives()
    total, count = executor.evaluate(pieces[:1] * 5)
    return {
        "last": board.stage_ranks[-1] == axis.index,
        "loss": max(abs(loss - expected) for loss in losses),
        "gradients": worst,
        "names": sorted(mine),
        "owned": owned,
        "whole": sum(p.numel() for p in module.parameters()),
        "collectives": before,
        "evaluated": [float(total), float(count)],
        "expected": [float(x) * 5 for x in loss_fn_of(module, plan, pieces[0])],
        "events": [[e.lane, e.kind, e.name] for e in recorder.timeline_events()],
        "left": len(executor._inputs) + len(executor._outputs) + len(executor._output_grads),
    }


@torch.no_grad()
def loss_fn_of(module: Any, plan: Any, piece: Any) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = {name: value for name, value in piece.items() if name != "labels"}
    return loss_fn(module(**inputs), piece)


def batch_of_cases(context: Any, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Several cases in one start of the ranks."""
    return [transparency(context, **case) for case in cases]


def faults(context: Any) -> list[int]:
    """Page faults of ten rounds of 8 MB, before and after freed memory is kept."""
    import resource

    from hocket.runtime.allocator import keep_freed_memory

    def rounds() -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(10):
            pieces = [torch.zeros(1 << 18) for _ in range(8)]
            del pieces
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    first = rounds()
    assert keep_freed_memory()
    rounds()
    return [first, rounds()]
