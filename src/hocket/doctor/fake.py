"""Fake rehearsals: checks executed on fake CUDA tensors, in a process that loaded the fake device.

A kernel check runs its own function, whose operations choose kernels as on an H100 and compute
shapes, dtypes and devices. A training check executes a step of the real program on each rank
(`hocket.rehearsal`); what the ranks enqueue is checked by NCCL's rules.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hocket.doctor.check import CheckOutcome
from hocket.doctor.families import BASE, FAMILIES
from hocket.doctor.place import Place

GPU = "H100"


def load_fake() -> None:
    """Load the fake device. Call before torch is imported.

    Raises:
        OptionError: no C++ compiler.
    """
    from hocket.rehearsal import device

    device.load_fake_device()


@contextmanager
def fake_cuda() -> Iterator[None]:
    """Within, tensors on `cuda:0` are fake."""
    from hocket.jobs.rehearse import device_of
    from hocket.rehearsal.execution import executing

    with executing(device_of(GPU), 0, 1) as execution, execution.fake():
        yield


def fake_step(
    place: Place, *, family: str = "", model: str = "", layers: int | None = None,
    fields: str = "", dtype: str = "", rows: int = 4, **options: Any,
) -> CheckOutcome:  # fmt: skip
    """A training step of one rank; where the host reads the device is noted.

    Takes the arguments of equality and of training checks; models of the catalogue run with two
    layers and short sequences.
    """
    from hocket.doctor.model import catalogue, spec
    from hocket.jobs.rehearse import device_of
    from hocket.rehearsal.training import Rehearsal

    dtype = dtype or ("bf16" if model else "fp32")
    options.pop("least", None)
    if importlib.util.find_spec("triton") is None:
        options.pop("compile", None)
    config = FAMILIES[family] if family else catalogue(model, 2) if model else BASE
    job = spec(
        config, layout=f"dp1:{fields}" if fields else "dp1", dtype=dtype, seq_len=16,
        rows=max(rows, 4), device="cuda", **options,
    )  # fmt: skip
    found = Rehearsal(job, None, device_of(GPU)).rank(0)
    return _outcome(place, [found])


def fake_layout(
    place: Place, *, layout: str, attention: str = "auto", dispatch: str = "direct"
) -> CheckOutcome:
    """A training step of every rank of a layout (equal ranks once), and whether it ends under
    NCCL's rules."""
    from hocket.doctor.model import spec
    from hocket.doctor.multi_gpu import check_options, model_of

    rows = check_options("", layout, "")["global_batch"]
    job = spec(
        model_of(layout), layout=layout, dtype="bf16", rows=rows, device="cuda",
        context_parallel=attention, expert_dispatch=dispatch,
    )  # fmt: skip
    return _outcome(place, _played(place, job))


def fake_schedules(place: Place, *, stages: int) -> CheckOutcome:
    """A training step of every schedule, of every rank, and whether it ends under NCCL's rules.

    One layer a stage, which communicates as two do. Of eight ranks as many microbatches as ranks,
    or fewer in schedules in which that changes no order.
    """
    from hocket.doctor.pipelines import SCHEDULES, pipeline_job

    executed = []
    for name, virtual in SCHEDULES.items():
        few = {"sequential": 2, "gpipe": stages // 2}.get(name, stages)
        count = 2 * stages if stages <= 4 else few
        job = pipeline_job(name, stages, "cuda", layers=virtual * stages, microbatches=count)
        found = _played(place, job, f"{name}: ")
        place.equal(f"{name}: calls that make groups", max(each.calls for each in found), 0)
        executed += found
    return _outcome(place, executed)


def fake_microbatches(place: Place) -> CheckOutcome:
    """Peaks of activations of a step of few and of many microbatches."""
    from hocket.doctor.model import spec
    from hocket.doctor.pipelines import FEW, GROWTH, MANY

    peaks = []
    for count in (FEW, MANY):
        text = f"pp2:schedule=1f1b,microbatches={count}"
        job = spec(BASE, layout=text, dtype="bf16", rows=count, seq_len=64, device="cuda")
        executed = _played(place, job, f"{count} microbatches: ")
        _outcome(place, executed)
        peaks.append([each.peak.get("activations", 0) for each in executed])
    for rank, (few, many) in enumerate(zip(*peaks, strict=True)):
        if not 0 < many <= GROWTH * few:
            place.failures.append(
                f"rank {rank}: activations of {many} bytes with {MANY} microbatches, {few} with "
                f"{FEW}"
            )
    return place.outcome()


def _played(place: Place, job: Any, prefix: str = "") -> list[Any]:
    """A step of each rank of a job, equal ones once, checked by NCCL's rules."""
    from hocket.jobs.prepare import scheduled
    from hocket.jobs.rehearse import REPLICA, RehearsedJob, device_of, representatives, traces_of
    from hocket.rehearsal.training import Rehearsal
    from hocket.simulation.nccl import RULES, simulate_nccl

    schedule = scheduled(job.layout)
    rehearsal = Rehearsal(job, schedule if schedule.num_stages > 1 else None, device_of(GPU))
    stands_for = representatives(
        RehearsedJob(spec=job, schedule=schedule, device=device_of(GPU)), REPLICA
    )
    executed = {rank: rehearsal.rank(rank) for rank in sorted(set(stands_for.values()))}
    if not any(found.error for found in executed.values()):
        traces = traces_of(executed, stands_for)
        for rule in RULES:
            verdict = simulate_nccl(traces, rule)
            place.values[f"ends_under_{rule}"] = verdict.ok
            if not verdict.ok:
                waits = "; ".join(map(str, verdict.waiting[:2])) or "; ".join(
                    verdict.mismatches[:2]
                )
                place.failures.append(f"{prefix}does not end under the {rule} rule: {waits}")
    return list(executed.values())


def fake_server(
    place: Place, *, model: str = "llama-3.2-1b", layout: str = "tp1", dtype: str = "bf16",
    rows: int = 1, **options: Any,
) -> CheckOutcome:  # fmt: skip
    """Prefill, mixed and decode steps of every stage of a replica, its kernels, and what its CUDA
    graphs would hold.

    Takes the arguments of the checks of a served model, of which two layers a stage are executed;
    a tiny model is one of the catalogue's.
    """
    from hocket.jobs.rehearse import device_of
    from hocket.jobs.serving.rehearse import replica_spec
    from hocket.rehearsal.serving import ServingRehearsal
    from hocket.spec.layout import Layout
    from hocket.spec.rehearsal import RankRehearsal

    split = Layout.parse(layout)
    job = replica_spec(
        model, split, dtype=dtype, layers=2 * split.pp, max_num_seqs=max(rows, 4),
        max_model_len=512,
        max_num_batched_tokens=256, block_size=options.get("block_size"),
    )  # fmt: skip
    rehearsal = ServingRehearsal(job, device_of(GPU))
    executed = []
    for rank in range(job.layout.world_size):
        result = rehearsal.rank(rank)
        found, said = RankRehearsal.from_json(result["rank"]), result["serving"]
        executed.append(found)
        if found.error:
            continue
        reads = {f"{name}: {r['what']} at {r['where']}" for name, step in said["steps"].items()
                 for r in step["host_reads"]}  # fmt: skip
        place.equal(f"host reads inside steps of rank {rank}", sorted(reads), [])
        place.equal(f"why rank {rank} captures no graph", said["graphs"]["reason"], "")
        place.values |= {
            f"rank_{rank}_kernels": ", ".join(
                dict.fromkeys(r["kernel"] for r in said["attention"])
            ),
            f"rank_{rank}_graph_kernels": said["graphs"]["launches"],
            f"rank_{rank}_launched_in_a_decode_step": said["steps"]["decode"]["launches"],
        }
    return _outcome(place, executed)


def fake_host_waits(place: Place) -> CheckOutcome:
    """Places where the host reads the device in the second of two training steps: none."""
    from hocket.doctor.model import spec
    from hocket.jobs.rehearse import device_of
    from hocket.rehearsal.training import Rehearsal

    job = spec(BASE, layout="dp1:microbatches=2", rows=8, seq_len=16, device="cuda")
    found = Rehearsal(job, None, device_of(GPU)).rank(0, steps=2)
    place.equal("host reads", [f"{r['what']} at {r['where']}" for r in found.host_reads], [])
    return _outcome(place, [found])


def fake_flex(place: Place, *, family: str) -> CheckOutcome:
    """A training step of a family with soft caps, sinks or unequal head sizes: all of its attention
    is flex attention, nothing of S x S is allocated, and the host reads nothing."""
    from hocket.doctor.attention import FLEX_LENGTH, scores_bytes
    from hocket.doctor.families import FLEXIBLE
    from hocket.doctor.model import spec
    from hocket.jobs.rehearse import device_of
    from hocket.rehearsal.training import Rehearsal

    config = {**FLEXIBLE[family], "max_position_embeddings": FLEX_LENGTH}
    job = spec(
        config, dtype="fp32", seq_len=FLEX_LENGTH, rows=1, device="cuda", packing="documents"
    )
    found = Rehearsal(job, None, device_of(GPU)).rank(0)
    place.equal("kernels of attention", found.attention, {"flex": config["num_hidden_layers"]})
    place.equal("host reads", [f"{r['what']} at {r['where']}" for r in found.host_reads], [])
    place.values["activations"] = activations = found.peak.get("activations", 0)
    if not activations < scores_bytes(config, FLEX_LENGTH):
        place.failures.append(f"a step holds {activations} bytes of activations")
    return _outcome(place, [found])


def stream_order(place: Place) -> CheckOutcome:
    """A ZeRO-3 step whose streams are checked for accesses without an order (happens-before)."""
    from hocket.doctor.model import spec
    from hocket.jobs.rehearse import device_of
    from hocket.rehearsal.execution import executing
    from hocket.rehearsal.streams import StreamOrder
    from hocket.rehearsal.training import Rehearsal
    from hocket.spec.rehearsal import RankRehearsal

    job = spec(BASE, layout="dp2:zero=3,microbatches=2", rows=8, seq_len=16, device="cuda")
    rehearsal = Rehearsal(job, None, device_of(GPU))
    found = RankRehearsal(rank=0)
    with executing(device_of(GPU), 0, 2) as execution:
        order = StreamOrder(execution.launches.wait)
        execution.world.enqueued = order.collective
        fake = execution.fake

        @contextmanager
        def watched() -> Iterator[None]:
            with fake(), order.installed():
                yield

        execution.fake = watched  # type: ignore[method-assign]
        rehearsal._execute(found, execution, 2)
        order.close()
    place.equal("accesses without an order", sorted(order.conflicts), [])
    return _outcome(place, [found])


def _outcome(place: Place, ranks: list[Any]) -> CheckOutcome:
    for found in ranks:
        if found.error:
            lines = found.error.strip().splitlines()
            place.failures.append(f"rank {found.rank}: {lines[-1]}")
        place.failures += found.generated.get("faults", [])
    reads = {f"{read['what']} at {read['where']}" for found in ranks for read in found.host_reads}
    return place.outcome(
        ranks_executed=len(ranks),
        host_reads="; ".join(sorted(reads)) or "none",
        peak_bytes=max(found.peak.get("total", 0) for found in ranks),
        kernels_launched=max(sum(found.launches.values()) for found in ranks),
        collectives=sum(row["count"] for found in ranks for row in found.collectives),
        attention=", ".join(sorted({name for found in ranks for name in found.attention}))
        or "none",
    )
