"""hocket itself, as its training job is built: any layout, on shared memory or Gloo."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.rank import Step
from benchmarks.workload import Workload, microbatch
from hocket.launch import joined_context
from hocket.schedules import build_schedule
from hocket.spec.layout import Layout
from hocket.spec.run import RunSpec, TrainOptions
from hocket.spec.run import Workload as Sizes
from hocket.training.build import build_rank_job as build_job

if TYPE_CHECKING:
    import torch


def build(workload: Workload, layout: str, backend: str, context_parallel: str = "auto") -> Step:
    split = Layout.parse(layout)
    spec = RunSpec(
        model=workload.model_dir,
        config=workload.config().to_dict(),
        weights=workload.model_dir,
        layout=split,
        workload=Sizes(seq_len=workload.seq_len, global_batch=workload.global_batch),
        options=TrainOptions(
            lr=workload.lr,
            weight_decay=0.0,
            beta1=0.9,
            beta2=0.999,
            max_grad_norm=0.0,
            seed=workload.seed,
            device="cpu",
            backend=backend,
            context_parallel=context_parallel,
        ),
    )
    context = joined_context()
    assert context is not None
    count = split.microbatches or 1
    schedule = build_schedule(split, count) if split.num_stages > 1 else None
    job = build_job(spec, context, schedule)
    data_rank = job.mesh.axis("dp").index

    def step(ids: torch.Tensor) -> float:
        mine = ids.chunk(split.dp)[data_rank]
        loss = job.parallel.forward_backward([microbatch(rows) for rows in mine.chunk(count)])
        job.optimizer.step(workload.lr)
        job.parallel.begin_unshard()
        return loss.item()

    return step
