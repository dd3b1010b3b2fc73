"""Compile checks: a tensor-parallel step as graphs that hold its collectives.

Not executed on a GPU yet.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from unittest import mock

from hocket.doctor.check import FAKE, Cannot, CheckOutcome, GpuCheck
from hocket.doctor.families import BASE
from hocket.doctor.place import Place
from hocket.doctor.steps import step_job
from hocket.doctor.world import gradient_difference, ranks, tell, timed

if TYPE_CHECKING:
    from hocket.launch import RankContext

_HERE = "hocket.doctor.compiling:"

IN_CHUNKS = 6
"""Collectives of a layer that run in chunks with a matmul, of eight: all four of forward, and the
gathers of backward. Its reduce-scatters sum the gradients of several matmuls: torch fuses none."""
OF_ONE = 4
"""The same for a single sequence, whose gathers in forward are a view for several layers: torch
takes a view for one layer alone."""

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
        "(torch._inductor.config._micro_pipeline_tp) and without", criterion=f"{IN_CHUNKS} or more "
        "of a layer's collectives in chunks, gradients within 2e-2, and not slower; cannot where "
        "torch has no symmetric memory here",
        function=_HERE + "micro_pipeline", gpus=2, capability=(9, 0), seconds=40.0, timeout=240.0,
        slow=True, rehearsals=(FAKE,), fake=_HERE + "rehearse_micro_pipeline",
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


@contextlib.contextmanager
def in_chunks(*, chunks: bool = True) -> Iterator[Counter[str]]:
    """Within, Inductor compiles with collectives and matmuls in chunks. Counts gathers and
    reduce-scatters of graphs (`collectives`), and of these those in chunks (`fused`)."""
    from torch._inductor import config
    from torch._inductor.fx_passes import post_grad

    found: Counter[str] = Counter()
    passes: Any = post_grad
    fuse = passes.micro_pipeline_tp_pass

    def counted(graph: Any) -> None:
        whole = ("all_gather_into_tensor", "reduce_scatter_tensor")
        found["collectives"] += sum(any(w in str(n.target) for w in whole) for n in graph.nodes)
        fuse(graph)
        found["fused"] += sum("symm_mem.fused" in str(n.target) for n in graph.nodes)

    # A graph that a cache has is not counted.
    changed: Any = {"_micro_pipeline_tp": chunks, "force_disable_caches": True}
    with mock.patch.object(passes, "micro_pipeline_tp_pass", counted), config.patch(changed):  # type: ignore[no-untyped-call]
        yield found


def rehearse_micro_pipeline(place: Place) -> CheckOutcome:
    """What of a layer's graphs is in chunks, for one sequence and for two, on fake tensors."""
    if importlib.util.find_spec("triton") is None:
        raise Cannot("needs the package triton")
    import torch.distributed
    from torch.distributed import _symmetric_memory

    from hocket.doctor.fake import GPU as NAME
    from hocket.doctor.model import spec
    from hocket.jobs.rehearse import device_of
    from hocket.rehearsal.training import Rehearsal

    for rows in (1, 2):
        job = spec(
            {**BASE, "num_hidden_layers": 1}, layout="tp2:sequence_parallel=true", dtype="bf16",
            seq_len=64, rows=rows, device="cuda", compile=True,
        )  # fmt: skip
        with (
            mock.patch.object(torch.distributed, "is_nccl_available", return_value=True),
            _symmetric_memory._test_mode(),
            in_chunks() as found,
        ):
            executed = Rehearsal(job, None, device_of(NAME)).rank(0)
        if executed.error:
            place.failures.append(executed.error.strip().splitlines()[-1])
        place.equal("graph breaks", executed.generated.get("graph_breaks"), 0)
        _require_chunks(place, found, rows)
    return place.outcome()


def _require_chunks(place: Place, found: dict[str, int], rows: int) -> None:
    least = IN_CHUNKS if rows > 1 else OF_ONE
    place.values |= {f"{name}_at_batch_{rows}": number for name, number in found.items()}
    if found["fused"] < least:
        place.failures.append(
            f"{found['fused']} of a layer's {found['collectives']} collectives are in chunks at "
            f"batch {rows}, fewer than {least}"
        )


def micro_pipeline(place: Place) -> CheckOutcome:
    """Seconds and gradients of a compiled step, with collectives in pieces and whole."""
    job = step_job(place, "tp2:sequence_parallel=true")
    found = ranks(place, _HERE + "micro_pipeline_rank", 2, {"spec": job.to_json()})
    missing = [values["missing"] for values in found if values["missing"]]
    if missing:
        raise Cannot(missing[0])
    _require_chunks(place, found[0]["chunks"], job.workload.global_batch)
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
    from torch.distributed import _symmetric_memory

    from hocket.doctor.model import batches
    from hocket.spec.run import RunSpec
    from hocket.training.build import build_model, compile_blocks, join_world

    job = RunSpec.from_json(payload["spec"])
    mesh = join_world(job, context)
    own, tokens = batches(job, mesh.device), job.workload.global_batch * job.workload.seq_len
    seconds: dict[str, float] = {}
    results: list[Any] = []
    chunks: dict[str, int] = {}
    missing = ""
    try:
        axis = mesh.axis("tp")
        assert axis.group is not None
        _symmetric_memory.enable_symm_mem_for_group(axis.group.group_name)
        for name in ("whole", "pieces"):
            context.expect(200.0)
            torch._dynamo.reset()
            with in_chunks(chunks=name == "pieces") as chunks:
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
    tell(context, missing=missing, seconds=seconds, difference=worst, chunks=dict(chunks))
