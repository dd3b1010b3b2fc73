"""Memory of each rank of a job, as `training.memory` counts it: tensor bytes by kind.

Parameters, gradients and optimizer state are what is there when a step ends; activations are
everything else at the moment at which most is allocated (`cost.replayed_step`).
"""

from __future__ import annotations

from hocket.cost.measured_prices import resident_bytes
from hocket.cost.replayed_step import peak_bytes
from hocket.cost.step_problem import StepProblem
from hocket.spec.model_shape import ModelShape
from hocket.spec.run import RunSpec, bucket_mb
from hocket.spec.schedule import Schedule


def memory_rows(job: StepProblem) -> list[dict[str, int]]:
    """Of each rank of the world: `parameters`, `gradients`, `optimizer`, `activations`, `total`.

    On a GPU gradient buckets of replicas have memory from the start (a CPU's zeros take none until
    they are written), the loss takes more tokens at once, and what is offloaded takes none.
    """
    found: dict[int, dict[str, int]] = {}
    for index in range(job.layout.pp):
        row = resident_bytes(job, index)
        row["activations"] = max(0, peak_bytes(job, index, cuda=job.cuda) - row["gradients"])
        if job.cuda:
            row |= dict.fromkeys(_offloaded(job), 0)
        found[index] = {**row, "total": sum(row.values())}
    return [dict(found[job.layout.coordinate(rank)["pp"]]) for rank in range(job.layout.world_size)]


def gpu_step(shape: ModelShape, spec: RunSpec, schedule: Schedule) -> StepProblem:
    """One step of a training job on GPUs."""
    return StepProblem(
        shape=shape.on_gpu(),
        layout=spec.layout,
        workload=spec.workload,
        schedule=schedule,
        bucket_mb=bucket_mb(spec.options.bucket_mb, cuda=True, dp=spec.layout.data_degree),
        optimizer=spec.options.optimizer,
        cuda=True,
    )


def gpu_memory_rows(shape: ModelShape, spec: RunSpec, schedule: Schedule) -> list[dict[str, int]]:
    """`memory_rows` of a training job on GPUs."""
    return memory_rows(gpu_step(shape, spec, schedule))


def _offloaded(job: StepProblem) -> tuple[str, ...]:
    """Kinds that are in the host's memory instead of a GPU's."""
    if job.layout.offloads("params"):  # gradients are summed on the GPU and leave it at the end
        return "parameters", "optimizer"
    return ("optimizer",) if job.layout.offloads("optimizer") else ()
