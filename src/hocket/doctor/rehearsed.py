"""Rehearsal checks: steps on GPUs, compared with their rehearsals on fake CUDA tensors.

A rehearsal predicts where the host reads the device, which attention kernels run, how many bytes
are allocated, and in which order collectives are enqueued. It is executed meanwhile in processes
of its own, which load a fake device.

On a CPU steps are compared as far as it has them: reads of the host and attention kernels are those
of a GPU.

Not executed on a GPU yet.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from hocket.doctor.check import CPU, Cannot, CheckOutcome, row_of
from hocket.doctor.families import BASE
from hocket.doctor.model import WIDE, TrainedModel, batches, spec
from hocket.doctor.multi_gpu import model_of
from hocket.doctor.place import Place, catalogue_name
from hocket.doctor.world import ranks, tell
from hocket.spec.attention_kernel import OPERATIONS

if TYPE_CHECKING:
    from hocket.jobs.rehearse import Rehearsed
    from hocket.launch import RankContext
    from hocket.spec.run import RunSpec

MIXTRAL = {"model_type": "mixtral", "num_local_experts": 4}

_row = row_of("hocket.doctor.rehearsed", timeout=120.0)
CHECKS = (
    *(
        _row(
            f"predict-rehearsal-{family}", f"training steps of a 100M {family} under "
            "torch.cuda.set_sync_debug_mode, then under torch's profiler: waits of the host and "
            "attention kernels, compared with the rehearsal of the same step", "compare_step",
            "no wait of the host, as rehearsed; the same attention kernels, as often",
            group="prediction", arguments={"family": family}, capability=capability,
            seconds=8.0, slow=True,
        )
        for family, capability in (("llama", (8, 0)), ("mixtral", (9, 0)))
    ),
    *(
        _row(
            f"rehearsal-{name}", f"collectives of a step at {layout}: their order on every rank, "
            "compared with the rehearsal of the same job", "compare_order",
            "the same operations over the same axes, in the same order, and the same bytes",
            group="multi-gpu", arguments={"layout": layout}, gpus=gpus, capability=(8, 0),
            seconds=15.0, slow=True,
        )
        for name, layout, gpus in (
            ("zero3", "dp2:zero=3", 2), ("pp2-tp2", "pp2.tp2:schedule=1f1b,microbatches=4", 4),
            ("cp2", "cp2", 2), ("ep2", "dp2.ep2", 2),
        )
    ),
)  # fmt: skip


@contextmanager
def rehearsing(place: Place, job: RunSpec, which: str) -> Iterator[Future[Rehearsed]]:
    """The rehearsal of a job, in processes that are started now.

    Args:
        which: ranks, as `jobs.rehearse.rehearse_job` takes them.

    Raises:
        Cannot: this GPU is not in the catalogue, or there is no C++ compiler.
    """
    import dataclasses

    from hocket.jobs.prepare import scheduled
    from hocket.jobs.rehearse import GPU, RehearsedJob, device_of, rehearse_job
    from hocket.spec.errors import OptionError

    try:
        device = device_of(catalogue_name(place.name) if place.on_gpu else GPU)
    except OptionError as error:
        raise Cannot(f"{place.name or GPU} cannot be rehearsed: {error.message}") from None
    on_cuda = dataclasses.replace(job, options=dataclasses.replace(job.options, device="cuda"))
    asked = RehearsedJob(spec=on_cuda, schedule=scheduled(job.layout), device=device)
    with ThreadPoolExecutor(1) as thread:
        yield thread.submit(rehearse_job, asked, ranks=which)


def rehearsal_result(found: Future[Rehearsed]) -> Rehearsed:
    """The rehearsal, waited for. Raises Cannot: no C++ compiler."""
    from hocket.spec.errors import OptionError

    try:
        return found.result()
    except OptionError as error:
        raise Cannot(f"nothing is rehearsed: {error.message}") from None


# --- one GPU ---------------------------------------------------------------------------------


def compare_step(place: Place, *, family: str) -> CheckOutcome:
    """Waits and kernels of a step, and those of its rehearsal."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    from hocket.models.rows import note_documents, one_sequence_each

    config = place.size({**WIDE, "num_hidden_layers": 4}, {**BASE, "num_hidden_layers": 2})
    job = spec(
        {**config, **(MIXTRAL if family == "mixtral" else {})}, layout="dp1:microbatches=2",
        seq_len=place.size(256, 16), rows=8, device=place.kind,
    )  # fmt: skip
    with rehearsing(place, job, "0") as future:
        trained = TrainedModel(place, job)
        microbatches = trained.batches()
        for each in microbatches:
            note_documents(each["position_ids"], None)
        activities = [ProfilerActivity.CPU]
        if place.on_gpu:
            activities.append(ProfilerActivity.CUDA)
        with one_sequence_each():
            for _ in range(2):  # libraries choose kernels
                trained.step(microbatches)
            place.synchronize()
            try:
                with place.no_waits():
                    trained.step(microbatches)
            except RuntimeError as error:
                place.failures.append(f"a step waits for the device: {_where(error)}")
            with profile(activities=activities) as profiled:
                trained.step(microbatches)
                place.synchronize()
        rehearsal = rehearsal_result(future)
    names = Counter(event.name.removeprefix("aten::") for event in profiled.events())
    kernels: Counter[str] = Counter()
    for name, kernel in OPERATIONS.items():
        kernels[kernel] += names[name] + (names[f"{name}_for_cpu"] if place.form == CPU else 0)
    report = rehearsal.report
    expected = {k: int(n) for k, n in sorted(report.launches_per_step["attention"].items())}
    found = {k: n for k, n in sorted(kernels.items()) if n}
    place.equal("attention kernels", found, expected)
    reads = [f"{row['what']} at {row['where']}" for row in report.host_reads]
    place.equal("host reads that are rehearsed", reads, [])
    on_device = sorted({n for n in names if any(w in n for w in ("flash", "sdpa", "fmha"))})
    if place.on_gpu:
        place.values["attention_on_the_device"] = ", ".join(on_device)[:500]
        place.values["launches"] = names["cudaLaunchKernel"] + names["cudaLaunchKernelExC"]
        place.predicted["launches"] = report.launches_per_step["kernels"][0]
        place.synchronize()
        place.values["peak_bytes"] = torch.cuda.max_memory_allocated()
        place.predicted["peak_bytes"] = report.peak_bytes[0]["total"]
    return place.outcome(attention=", ".join(f"{n} {k}" for k, n in found.items()))


def _where(error: BaseException) -> str:
    """What an error says, and the innermost line of hocket or transformers that it came from."""
    import traceback

    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if "hocket" in f.filename or "transformers" in f.filename]
    last = f" at {own[-1].filename.rpartition('/')[2]}:{own[-1].lineno}" if own else ""
    return f"{str(error).strip().splitlines()[0]}{last}"


# --- several GPUs ----------------------------------------------------------------------------


def compare_order(place: Place, *, layout: str) -> CheckOutcome:
    """Collectives of each rank, and those that its rehearsal enqueues."""
    job = spec(
        model_of(layout), layout=layout, dtype=place.size("bf16", "fp32"), seq_len=16, rows=8,
        seed=3, device=place.kind,
    )  # fmt: skip
    with rehearsing(place, job, place.size("all", "replica")) as future:
        payload = {"spec": job.to_json()}
        found = ranks(place, "hocket.doctor.rehearsed:order_rank", job.layout.world_size, payload)
        rehearsal = rehearsal_result(future)
    for rank, executed in sorted(rehearsal.executed.items()):
        values = found[rank]
        place.equal(f"collectives of rank {rank}", values["collectives"], executed.collectives)
        mine = [tuple(each) for each in values["order"]]
        theirs = [(op[0].replace("recv", "receive"), op[1]) for op in executed.ops]
        differs = first_difference(mine, theirs, executed.axes)
        if differs:
            place.failures.append(f"rank {rank}: {differs}")
    count = sum(len(values["order"]) for values in found)
    place.equal("whether there are collectives", count > 0, True)
    return place.outcome(operations=count)


def first_difference(
    mine: Sequence[tuple[str, str]], theirs: Sequence[tuple[str, str]], axes: dict[str, list[str]]
) -> str:
    """Where operations by (name, axis) and by (name, label of a group) differ; empty: nowhere."""
    for index, (one, other) in enumerate(zip(mine, theirs, strict=False)):
        if one[0] != other[0] or one[1] not in axes.get(other[1], ()):
            there = "/".join(axes.get(other[1], ())) or other[1]
            return (
                f"operation {index + 1} is {one[0]} over {one[1]}, rehearsed as {other[0]} over "
                f"{there}"
            )
    if len(mine) != len(theirs):
        return f"{len(mine)} operations, {len(theirs)} are rehearsed"
    return ""


def order_rank(context: RankContext, payload: dict[str, Any]) -> None:
    """One rank: two steps; what the second one enqueues, in its order."""
    from hocket.models.rows import note_documents, one_sequence_each
    from hocket.schedules.registry import build_schedule
    from hocket.spec.run import RunSpec
    from hocket.training.build import build_rank_job
    from hocket.training.reading import LossReading

    job = RunSpec.from_json(payload["spec"])
    layout, options = job.layout, job.options
    schedule = build_schedule(layout, layout.microbatches or 1) if layout.num_stages > 1 else None
    made = build_rank_job(job, context, schedule)
    index = layout.coordinate(context.rank)["dp"]
    own = [
        {key: value.chunk(layout.dp)[index].contiguous() for key, value in part.items()}
        for part in batches(job, made.mesh.device)
    ]
    for part in own:
        note_documents(part["position_ids"], None)
    recorder = made.mesh.recorder
    noted: list[tuple[str, str]] = []
    count = recorder.count

    def counted(name: str, axis: str, nbytes: int) -> None:
        noted.append((name, axis))
        count(name, axis, nbytes)

    recorder.count = counted  # type: ignore[method-assign]
    tokens = job.workload.global_batch * job.workload.seq_len
    with one_sequence_each():
        for number in range(2):
            recorder.clear()
            noted.clear()
            loss = made.parallel.forward_backward(own, tokens)
            norm = made.parallel.clip_grad_norm(options.max_grad_norm)
            reading = LossReading(number + 1, options.lr, loss, norm, 1)
            made.optimizer.step(options.lr, reading.skip())
            made.parallel.begin_unshard()
            if number == 0:
                float(loss)
    tell(context, order=noted, collectives=recorder.collectives())
