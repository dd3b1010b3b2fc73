"""A training job on GPUs as the planner sees it: cluster, problem, forecast, layout.

    GPUs of this host, as `hocket probe` found them or by the catalogue \\
                                                                          planning.problem.Problem
    the model's shape, shipped with the catalogue or traced by a rank   /

`hocket plan --cluster auto`, `--layout auto` and the forecast of a run ask the same problem.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

from hocket.spec.errors import HocketError, LayoutError, OptionError
from hocket.spec.forecast import Forecast
from hocket.spec.launcher_variables import launcher_number
from hocket.spec.layout import Layout
from hocket.spec.run import RunSpec
from hocket.spec.schedule import Schedule
from hocket.spec.timeline import Timeline

if TYPE_CHECKING:
    from hocket.launch import Launcher
    from hocket.planning.problem import Problem
    from hocket.spec.cluster import Cluster
    from hocket.spec.model_shape import ModelShape

COUNTED = 256
"""Ranks of a job up to which every rank's collectives are counted before it starts."""

PROPOSED = 50
"""Layouts of the planner among which the first that a run can have is taken."""


def gpu_cluster(cluster: str, *, at_least: int = 1, exactly: int | None = None) -> Cluster | None:
    """The GPUs that a run is predicted for; None: the catalogue does not have this host's, and no
    probe has found them.

    Args:
        cluster: `auto`: this host's GPUs as they were probed, else by the catalogue, and as many
            such hosts as the launcher started; or a name or file as `hocket plan --cluster` takes.
        at_least: ranks of the run; a machine of fewer GPUs is taken as one of so many.
        exactly: GPUs that a layout is chosen for, of those of the cluster. None: all.

    Raises:
        OptionError: no such cluster.
    """
    from hocket.catalogue.hardware import cluster as named
    from hocket.catalogue.hardware import is_file
    from hocket.jobs import machine
    from hocket.jobs.rehearsal_fit import gpu_here
    from hocket.probing.devices import visible_gpus

    if cluster != machine.AUTO:
        found = machine.named_cluster(cluster)
        few = found if exactly is None else found.with_gpus(exactly)
        if few is found or is_file(cluster):
            return few
        return named(f"{few.num_nodes}x{few.node.num_gpus}x{few.node.gpu.name}@{few.node.name}")
    hosts, here = _hosts(os.environ), visible_gpus()
    kept = machine.kept("cuda") if hosts == 1 else None
    there = 0 if kept is None or kept.is_cpu else kept.num_gpus
    if kept is not None and at_least <= there and exactly in (None, there):
        return kept
    gpu = kept.node.gpu.name if kept is not None else gpu_here()
    if gpu is None:
        return None
    count = exactly or max(at_least, here * hosts)
    per_host = -(-count // hosts)
    try:
        return named(f"{hosts}x{per_host}x{gpu}" if hosts > 1 else f"{max(1, count)}x{gpu}")
    except HocketError:  # a probed GPU that the catalogue does not have
        return kept


def _hosts(environment: Mapping[str, str]) -> int:
    """Hosts of the launcher that started this process, torchrun or Slurm; 1 without one."""
    local = launcher_number(environment, "LOCAL_WORLD_SIZE", 0)
    if local:
        return max(1, -(-launcher_number(environment, "WORLD_SIZE", local) // local))
    return max(1, launcher_number(environment, "SLURM_STEP_NUM_NODES", 1))


def gpu_problem(spec: RunSpec, cluster: Cluster, launcher: Launcher | None = None) -> Problem:
    """What the planner is asked of a run.

    Raises:
        HocketError: the model cannot be traced, or the GPU has no such precision.
    """
    from hocket.jobs.planner_problem import training_problem

    options, workload = spec.options, spec.workload
    return training_problem(
        planner_shape(spec, launcher),
        cluster,
        seq_len=workload.seq_len,
        global_batch=workload.global_batch,
        precision=workload.dtype,
        grad_dtype=options.grad_dtype,
        model_type=str(spec.config.get("model_type", "")),
        lora_rank=options.lora_rank,
        lora_targets=options.lora_targets,
        quantize_base=options.quantize_base,
        optimizer=options.optimizer,
    )


def planner_shape(spec: RunSpec, launcher: Launcher | None = None) -> ModelShape:
    """The shape that `hocket plan` takes of a run's model: the catalogue's where it has this very
    configuration, else traced in bf16, as the catalogue's were.

    Raises:
        ModelError: it cannot be traced.
    """
    from hocket.catalogue import models, shapes
    from hocket.jobs.forecast import run_shape

    for name in shapes.shape_names():
        if all(spec.config.get(key, value) == value for key, value in models.config(name).items()):
            return dataclasses.replace(shapes.shape(name), name=spec.model or name)
    plain = dataclasses.replace(
        spec,
        workload=dataclasses.replace(spec.workload, dtype="bf16"),
        options=dataclasses.replace(
            spec.options, lora_rank=None, lora_targets=None, quantize_base=None
        ),
    )
    return run_shape(plain, launcher)


def predicted_gpu_run(
    spec: RunSpec,
    cluster: Cluster,
    *,
    launcher: Launcher | None = None,
    schedule: Schedule | None = None,
    considered: int = 0,
    problem: Problem | None = None,
) -> tuple[Forecast, Timeline]:
    """The forecast of a run, its layout complete, and the Timeline of one step.

    Args:
        schedule: what will run; None: the layout's.
        considered: how many of the planner's layouts are shown with it.
        problem: as `gpu_problem`, if it was made already.

    Raises:
        HocketError: what cannot be predicted.
    """
    from hocket.cost.measured_memory import gpu_memory_rows, gpu_step
    from hocket.jobs.forecast import run_shape
    from hocket.planning.gpu_forecast import gpu_forecast
    from hocket.schedules.registry import build_schedule
    from hocket.spec.collectives import total

    if spec.layout.data_parallel == "threads":
        raise LayoutError("replicas in threads share one interpreter: no prediction")
    problem = problem or gpu_problem(spec, cluster, launcher)
    shape = run_shape(spec, launcher)

    def memory(layout: Layout) -> list[dict[str, int]]:
        board = schedule if schedule is not None and layout == spec.layout else None
        board = board or build_schedule(layout, layout.microbatches or 1)
        return gpu_memory_rows(shape, dataclasses.replace(spec, layout=layout), board)

    collectives = []
    if spec.layout.world_size <= COUNTED:
        board = schedule or build_schedule(spec.layout, spec.layout.microbatches or 1)
        collectives = total(gpu_step(shape, spec, board).communication())
    probed = cluster.measured
    return gpu_forecast(
        problem,
        spec.layout,
        memory,
        collectives=collectives,
        considered=considered,
        measured="" if probed is None else probed.date,
    )


def best_gpu_layout(
    spec: RunSpec,
    cluster: Cluster,
    given: Collection[str],
    *,
    micro_batch_size: int | None = None,
    legal: Callable[[Layout], Layout | None],
    launcher: Launcher | None = None,
    considered: int = 0,
) -> tuple[Forecast, Timeline]:
    """The forecast of the planner's best layout that this run can have.

    Args:
        spec: its layout holds what the user gave in addition to `--layout auto`.
        given: the names of those fields. micro_batch_size: as it was given.
        legal: a layout with its microbatches, if the model and the batch allow it.

    Raises:
        HocketError: the model cannot be traced, nothing fits, or nothing that fits is legal.
    """
    from hocket.planning.pins import PINS
    from hocket.planning.plan import best_layouts

    problem = gpu_problem(spec, cluster, launcher)
    fields = {f.name for f in dataclasses.fields(Layout)} & set(given)
    pins: dict[str, Any] = {name: getattr(spec.layout, name) for name in fields & set(PINS)}
    if micro_batch_size is not None:
        pins["microbatch"] = micro_batch_size
    rest = {name: getattr(spec.layout, name) for name in fields - set(PINS)}
    plan = best_layouts(problem, top=PROPOSED, pins=pins)
    for one in plan.layouts:
        layout = legal(dataclasses.replace(one.layout, **rest)) if one.fits else None
        if layout is not None:
            there = dataclasses.replace(spec, layout=layout)
            return predicted_gpu_run(
                there, cluster, launcher=launcher, considered=considered, problem=problem
            )
    raise LayoutError(
        f"none of the {len(plan.layouts)} best layouts of {problem.shape.name} on {cluster.name} "
        "can be had by this run",
        hint=f"--layout dp{cluster.num_gpus}:zero=1",
    )


def require_gpus(cluster: Cluster, name: str) -> None:
    """Raise OptionError where a run on GPUs is to be predicted for CPU cores."""
    if cluster.is_cpu:
        raise OptionError(
            f"cluster {name} is CPU cores, and the run is on GPUs",
            hint="--cluster auto, or GPUs: --cluster 8xH100-SXM",
        )
