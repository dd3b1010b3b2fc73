"""Compile checks: a tensor-parallel step as graphs that hold its collectives.

Not executed on a GPU yet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hocket.doctor.check import Cannot, CheckOutcome, GpuCheck
from hocket.doctor.place import Place
from hocket.doctor.steps import step_job
from hocket.doctor.world import gradient_difference, ranks, tell, timed

if TYPE_CHECKING:
    from hocket.launch import RankContext

_HERE = "hocket.doctor.compiling:"

CHECKS = (
    GpuCheck(
        id="compile-tp2", group="multi-gpu", what="a step at tp2, compiled with its collectives "
        "inside, compared with eager", criterion="no graph break; the loss within 1e-4, gradients "
        "within 2e-2 of their largest entry (bf16)", function=_HERE + "compare_compiled_step",
        gpus=2, capability=(8, 0), seconds=35.0, timeout=240.0, slow=True,
    ),
    GpuCheck(
        id="compile-tp2-pipelined", group="multi-gpu", what="a compiled step at tp2 with sequence "
        "parallelism, with collectives and matmuls in chunks "
        "(torch._inductor.config._micro_pipeline_tp) and without", criterion="gradients within "
        "2e-2, and not slower; cannot where torch has no symmetric memory here",
        function=_HERE + "micro_pipeline", gpus=2, capability=(9, 0), seconds=40.0, timeout=240.0,
        slow=True, rehearsals=(), unrehearsed="it needs symmetric memory, which GPUs joined by "
        "NVLink have",
    ),
)  # fmt: skip


def compare_compiled_step(place: Place) -> CheckOutcome:
    """Graph breaks and differences of a compiled step."""
    job = step_job(place, "tp2")
    found = ranks(place, _HERE + "compiled_rank", 2, {"spec": job.to_json()})
    place.equal("graph breaks", max(values["breaks"] for values in found), 0)
    place.equal("whether graphs were made", min(values["graphs"] for values in found) > 0, True)
    for name, limit in (("loss", 1e-4), ("gradient", 2e-2 if place.on_gpu else 1e-4)):
        worst = max(values[name] for values in found)
        place.values[f"{name}_difference"] = worst
        if not worst <= limit:
            place.failures.append(f"{name} differs by {worst:.2g} ({limit:g})")
    return place.outcome()


def compiled_rank(context: RankContext, payload: dict[str, Any]) -> None:
    """One rank: a step, and the same compiled. On a CPU graphs are made and not compiled."""
    import torch._dynamo

    from hocket.doctor.model import batches
    from hocket.spec.run import RunSpec
    from hocket.training.build import build_model, compile_blocks, join_world

    job = RunSpec.from_json(payload["spec"])
    mesh = join_world(job, context)
    own, tokens = batches(job, mesh.device), job.workload.global_batch * job.workload.seq_len
    results = []
    torch._dynamo.utils.counters.clear()
    for compile_them in (False, True):
        context.expect(200.0)
        _, _, plan, parallel = build_model(job, mesh, None)
        if compile_them:
            backend = "inductor" if mesh.device.type == "cuda" else "aot_eager"
            for stage in parallel.stages:
                compile_blocks(stage.module, plan, backend=backend, functional=True)
        loss = float(parallel.forward_backward(own, tokens))
        results.append((loss, {n: g.clone() for n, g in parallel.gradients().items()}))
    (expected, wanted), (loss, gradients) = results
    counters = torch._dynamo.utils.counters
    tell(
        context, breaks=sum(counters["graph_break"].values()),
        graphs=counters["stats"]["unique_graphs"], loss=abs(loss - expected) / abs(expected),
        gradient=gradient_difference(gradients, wanted),
    )  # fmt: skip


def micro_pipeline(place: Place) -> CheckOutcome:
    """Seconds and gradients of a compiled step, with collectives in pieces and whole."""
    job = step_job(place, "tp2:sequence_parallel=true")
    found = ranks(place, _HERE + "micro_pipeline_rank", 2, {"spec": job.to_json()})
    missing = [values["missing"] for values in found if values["missing"]]
    if missing:
        raise Cannot(missing[0])
    for name in ("whole", "pieces"):
        place.values[f"{name}_step_seconds"] = max(values["seconds"][name] for values in found)
    worst = max(values["difference"] for values in found)
    place.values["gradient_difference"] = worst
    if not worst <= 2e-2:
        place.failures.append(f"gradients differ by {worst:.2g} of their largest entry (0.02)")
    pieces, whole = (float(place.values[f"{n}_step_seconds"]) for n in ("pieces", "whole"))
    place.at_most("share_of_whole", pieces / whole, 1.0)
    return place.outcome()


def micro_pipeline_rank(context: RankContext, payload: dict[str, Any]) -> None:
    """One rank: the step compiled with `_micro_pipeline_tp` off and on."""
    import torch._dynamo
    import torch._inductor.config
    from torch.distributed import _symmetric_memory

    from hocket.doctor.model import batches
    from hocket.spec.run import RunSpec
    from hocket.training.build import build_model, compile_blocks, join_world

    job = RunSpec.from_json(payload["spec"])
    mesh = join_world(job, context)
    own, tokens = batches(job, mesh.device), job.workload.global_batch * job.workload.seq_len
    seconds: dict[str, float] = {}
    results: list[Any] = []
    missing = ""
    try:
        axis = mesh.axis("tp")
        assert axis.group is not None
        _symmetric_memory.enable_symm_mem_for_group(axis.group.group_name)
        config: Any = torch._inductor.config
        for name in ("whole", "pieces"):
            context.expect(200.0)
            torch._dynamo.reset()
            config._micro_pipeline_tp = name == "pieces"
            _, _, plan, parallel = build_model(job, mesh, None)
            for stage in parallel.stages:
                compile_blocks(stage.module, plan)

            def step(parallel: Any = parallel) -> None:
                parallel.forward_backward(own, tokens)

            step()
            seconds[name] = timed(step, 8, mesh.device)
            results.append({n: g.clone() for n, g in parallel.gradients().items()})
    except RuntimeError as error:
        missing = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"
    worst = gradient_difference(results[1], results[0]) if len(results) == 2 else 0.0
    tell(context, missing=missing, seconds=seconds, difference=worst)
