"""The job behind `hocket rehearse`: one step of every rank on fake CUDA tensors, and the verdict.

    request -> layout, schedule -> worker processes execute ranks -> traces of all ranks
        -> NCCL's rules under both kinds of communicator, memory, collectives against theory

Ranks that are equal up to the groups they belong to share one execution. The parent imports no
torch.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from hocket.jobs.rehearsal_fit import require_inputs, require_recompute, require_size
from hocket.jobs.rehearsal_reason import proxy_reason
from hocket.jobs.rehearsal_workers import (
    RehearsalWorkers,
    equal_ranks,
    report_executed,
    step_failed,
)
from hocket.jobs.request import JobRequest
from hocket.spec.errors import LayoutError, OptionError
from hocket.spec.expert_dispatch import DEEPEP, DIRECT, settle_dispatch
from hocket.spec.layout import Layout
from hocket.spec.rehearsal import RankRehearsal, RehearsalReport, RehearsedDevice
from hocket.spec.run import RunSpec

if TYPE_CHECKING:
    from hocket.simulation.nccl import OrderVerdict, Trace
    from hocket.spec.schedule import Schedule

ALL, REPLICA = "all", "replica"
GPU = "H100"
"""The GPU that is rehearsed on unless another is named."""
SEQ_LEN = 2048
"""Tokens of a sequence where the model has positions for them."""

GPUS_PER_NODE = 8
"""Of the nodes that a rehearsed job's ranks lie on."""

Listener = Callable[[str], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RehearsedJob:
    """A job to rehearse: model, layout and schedule fit each other.

    Attributes:
        spec: as a run folder would hold it; no data.
        schedule: of the layout. device: the GPU of each rank.
    """

    spec: RunSpec
    schedule: Schedule
    device: RehearsedDevice


@dataclasses.dataclass(kw_only=True)
class Rehearsed:
    """A rehearsed job.

    Attributes:
        executed: rank to its execution. stands_for: every rank to the rank executed for it.
        verdicts: of both rules; empty where one rank alone was executed.
        reasons: why a prediction is missing, by its kind.
    """

    job: RehearsedJob
    report: RehearsalReport
    executed: dict[int, RankRehearsal]
    stands_for: dict[int, int]
    verdicts: dict[str, OrderVerdict]
    reasons: dict[str, str]


def prepare_rehearsal(
    request: JobRequest,
    *,
    layers: int | None = None,
    rows: int | None = None,
    gpu: str = GPU,
    config: Mapping[str, Any] | None = None,
) -> RehearsedJob:
    """Check a request and complete it.

    Args:
        request: of a training job, without data.
        layers: of the model instead of its own number.
        rows: sequences of one microbatch on one data rank; sets the global batch.
        gpu: a GPU of the catalogue.
        config: of the model as its data change it (prepare.trained_config); None: its own.

    Raises:
        HocketError: an unknown model or GPU, a layout that does not fit the model or the batch, too
            many ranks or layers, or something that the GPU cannot do.
    """
    from hocket.jobs.prepare import scheduled
    from hocket.jobs.validate import validate_layout
    from hocket.models.depth import config_with_layers
    from hocket.models.source import resolve_model

    device = device_of(gpu)
    if request.auto:
        raise OptionError("a rehearsal executes one layout", hint="--layout dp2.pp2.tp2")
    if request.layout.data_parallel == "threads":
        raise LayoutError(
            "data_parallel=threads runs in one CPU process, and has nothing to rehearse",
            hint=f"--layout dp{request.layout.dp}",
        )
    source = resolve_model(
        request.model, trust_remote_code=request.options.trust_remote_code, weights=False
    )
    config = dict(config or source.config)
    if layers is not None:
        config = config_with_layers(source.name, config, layers)
    dimensions = dataclasses.replace(source, config=config).dimensions
    layout, workload = request.layout, request.workload
    if rows is not None:
        if rows < 1:
            raise OptionError(f"rows is {rows}; a microbatch has at least 1", hint="--rows 1")
        count = layout.microbatches or (2 * layout.pp if layout.num_stages > 1 else 1)
        workload = dataclasses.replace(workload, global_batch=layout.dp * count * rows)
        layout = dataclasses.replace(layout, microbatches=count)
    require_size(layout, dimensions)
    layout = validate_layout(dimensions, layout, workload, world_size=layout.world_size)
    require_recompute(request.model, layout.recompute)
    schedule = scheduled(layout)
    _require_device(workload.dtype, layout, schedule, device)
    dispatch = settle_dispatch(request.options.expert_dispatch, layout, GPUS_PER_NODE)
    spec = RunSpec(
        model=source.repo or request.model,
        config=config,
        layout=layout,
        workload=workload,
        options=dataclasses.replace(
            request.options,
            device="cuda",
            expert_dispatch=DIRECT if dispatch == DEEPEP else dispatch,
        ),
        command="rehearse",
    )
    return RehearsedJob(spec=spec, schedule=schedule, device=device)


def default_seq_len(model: str, *, trust: bool = False) -> int:
    """Tokens of a sequence if none are specified: 2048, or the model's positions if fewer."""
    from hocket.models.source import resolve_model

    source = resolve_model(model, trust_remote_code=trust, weights=False)
    positions = source.dimensions.max_positions
    return min(SEQ_LEN, positions or SEQ_LEN)


def device_of(name: str) -> RehearsedDevice:
    """A GPU of the catalogue, as torch would report it. Raises OptionError: unknown, no CUDA."""
    from hocket.catalogue import hardware

    gpu = hardware.gpu(name)
    capability = hardware.capability(name)
    if capability is None:
        raise OptionError(
            f"{gpu.name} has no CUDA, and a rehearsal executes the CUDA paths", hint="--gpu H100"
        )
    return RehearsedDevice(
        name=gpu.name, capability=capability, memory=gpu.usable, sms=gpu.sms, l2=gpu.l2
    )


def _require_device(
    dtype: str, layout: Layout, schedule: Schedule, device: RehearsedDevice
) -> None:
    """Refuse what the GPU or the library cannot do. Raises OptionError."""
    from hocket.spec.capabilities import refused_offload, refused_precision
    from hocket.spec.schedule import INPUT, WEIGHT

    halved = any(action.kind in (INPUT, WEIGHT) for rank in schedule.ranks for action in rank)
    why = refused_precision(
        dtype,
        cuda=True,
        capability=device.capability,
        library=importlib.util.find_spec("torchao") is not None,
        halved=halved,
    )
    if why is None and dtype in ("bf16", "fp8") and device.capability < (8, 0):
        number = ".".join(map(str, device.capability))
        why = (
            f"dtype is {dtype}, and {device.name} has the compute capability {number}; matmuls in "
            "bfloat16 take 8.0 or higher (Ampere and later)"
        )
    if why is not None:
        other = "fp32" if device.capability < (8, 0) else "bf16"
        raise OptionError(why, hint=f"--dtype {other}")
    why = refused_offload(layout, cuda=True)
    if why is not None:
        raise OptionError(why, hint="--recompute selective")


def rehearse_job(
    job: RehearsedJob,
    *,
    ranks: str = REPLICA,
    on_phase: Listener | None = None,
    workers: RehearsalWorkers | None = None,
) -> Rehearsed:
    """Execute a job's ranks and judge what they enqueue.

    Args:
        ranks: `replica` (the ranks of dp 0, equal ones once), `all` (every rank), or a number: that
            rank alone, without a verdict.
        on_phase: called with what happens now.
        workers: processes that are there already; None: started and ended here.

    Raises:
        LayoutError: a microbatch alone does not fit the GPU.
        OptionError: no such rank, or no C++ compiler.
        ModelError: a rank cannot execute its step.
    """
    say = on_phase or (lambda text: None)
    layout = job.spec.layout
    require_inputs(job.spec, job.device)
    stands_for = representatives(job, ranks)
    wanted = sorted(set(stands_for.values()))
    payload = {
        "spec": job.spec.to_json(),
        "schedule": str(job.schedule) if job.schedule.num_stages > 1 else "",
        "device": dataclasses.asdict(job.device),
    }
    tasks: list[dict[str, Any]] = [
        {"task": "rank", "rank": rank, "job": payload} for rank in _heaviest_first(job, wanted)
    ]
    expectation = {
        "task": "call",
        "entry": "hocket.ranks.rehearsal_expected:expected",
        "arguments": {
            "spec": job.spec.to_json(),
            "schedule": str(job.schedule),
            "ranks": wanted,
        },
    }
    say(f"executing {len(wanted)} of {layout.world_size} ranks")
    executed: dict[int, RankRehearsal] = {}
    expected: dict[str, Any] = {"collectives": None, "memory": None, "reasons": {}}
    with ExitStack() as stack:
        if workers is None:
            workers = stack.enter_context(RehearsalWorkers(len(tasks)))
        for event in workers.run([*tasks, expectation]):
            if "value" in event:
                expected = event["value"]
            else:
                found = RankRehearsal.from_json(event["rank"])
                executed[found.rank] = found
                report_executed(len(executed), len(wanted), say)
    for _, found in sorted(executed.items()):  # all ranks are done, and the workers free again
        if found.error:
            raise proxy_reason(job.spec, step_failed(job.spec.model, found))
    verdicts: dict[str, OrderVerdict] = {}
    if len(stands_for) == layout.world_size:
        from hocket.simulation.nccl import RULES, simulate_nccl

        say("simulating the ranks' collectives under NCCL's rules")
        traces = traces_of(executed, stands_for)
        verdicts = {rule: simulate_nccl(traces, rule) for rule in RULES}
    report = _report(job, executed, stands_for, verdicts, expected)
    return Rehearsed(
        job=job,
        report=report,
        executed=executed,
        stands_for=stands_for,
        verdicts=verdicts,
        reasons=expected["reasons"],
    )


# --- which ranks are executed ---------------------------------------------------------------------


def representatives(job: RehearsedJob, ranks: str) -> dict[int, int]:
    """Every rank to the rank that is executed for it. Raises OptionError: no such rank.

    Ranks that differ in dp alone run the same program on the same shapes (with ZeRO, shards of
    which dp 0 holds the largest). So do those that differ in tp, but for those that hold another
    number of vocabulary rows and, with ZeRO, the first, whose pieces of the norm are others. Ranks
    of cp send to different places of a ring and attend to different keys: each is executed.
    """
    layout = job.spec.layout
    if ranks not in (ALL, REPLICA):
        if not (ranks.isdecimal() and len(ranks) < 19) or int(ranks) >= layout.world_size:
            raise OptionError(
                f"--rank is {ranks[:60]!r}; {layout.axes_text()} has the ranks 0 .. "
                f"{layout.world_size - 1}",
                hint="--rank replica, --rank all, or --rank 0",
            )
        return {int(ranks): int(ranks)}
    if ranks == ALL:
        return {rank: rank for rank in range(layout.world_size)}
    vocabulary = int(job.spec.config.get("vocab_size") or 0)
    return equal_ranks(layout, vocabulary, first=layout.zero > 0)


def _heaviest_first(job: RehearsedJob, ranks: Sequence[int]) -> list[int]:
    """The last stage has the head and the loss: executed first, so no worker ends late."""
    layout = job.spec.layout
    return sorted(ranks, key=lambda rank: -layout.coordinate(rank)["pp"])


def traces_of(executed: Mapping[int, RankRehearsal], stands_for: Mapping[int, int]) -> list[Trace]:
    """What all ranks enqueue, by rank: each over groups of its own."""
    from hocket.simulation.nccl import EnqueuedOp, Trace

    originals: dict[int, Trace] = {}
    for rank, found in executed.items():
        trace = originals[rank] = Trace(rank)
        for name, label, numel, dtype, peer, root, blocks, batch in found.ops:
            op = EnqueuedOp(
                name, (label, *_row(found, label, rank)), rank, numel, dtype,
                peer=None if peer < 0 else peer, root=None if root < 0 else root, blocks=blocks,
                batch=batch,
                where="/".join(found.axes.get(label, ())),
            )  # fmt: skip
            op.index = len(trace.ops)
            trace.ops.append(op)
        trace.events = list(found.events)
    traces = []
    for rank in range(len(stands_for)):
        first = stands_for[rank]
        if first == rank:
            traces.append(originals[rank])
            continue
        found = executed[first]
        groups = {}
        for label in {op[1] for op in found.ops}:
            mine, theirs = _row(found, label, rank), _row(found, label, first)
            groups[(label, *theirs)] = (label, *mine)
            if any(op[1] == label and op[4] >= 0 for op in found.ops):
                # A root is one rank for all; a neighbour depends on the place.
                assert theirs.index(first) == mine.index(rank), (first, rank, label)
        traces.append(Trace(rank, originals[first], groups))
    return traces


def _row(found: RankRehearsal, label: str, rank: int) -> tuple[int, ...]:
    """The ranks of the group with that label that `rank` belongs to."""
    return next(tuple(row) for row in found.families[label] if rank in row)


# --- the report -----------------------------------------------------------------------------------


def _report(
    job: RehearsedJob,
    executed: Mapping[int, RankRehearsal],
    stands_for: Mapping[int, int],
    verdicts: Mapping[str, OrderVerdict],
    expected: Mapping[str, Any],
) -> RehearsalReport:
    unknown: dict[str, Any] = {"ends": None, "waiting": [], "mismatches": [], "cycle": []}
    verdict = {rule: unknown for rule in ("eager", "lazy")}
    verdict |= {rule: found.to_json() for rule, found in verdicts.items()}
    memory = expected["memory"]
    kernels = {rank: sum(found.launches.values()) for rank, found in executed.items()}
    attention: dict[str, int] = {}
    for rank in stands_for:
        for kernel, count in executed[stands_for[rank]].attention.items():
            attention[kernel] = attention.get(kernel, 0) + count
    return RehearsalReport(
        eager=verdict["eager"],
        lazy=verdict["lazy"],
        peak_bytes=[
            {"rank": rank, **executed[first].peak, "host": executed[first].host_peak}
            for rank, first in stands_for.items()
        ],
        predicted_peak_bytes=[
            None if memory is None else memory[rank]["total"] for rank in stands_for
        ],
        host_reads=_host_reads(executed.values()),
        process_groups=group_rows(executed),
        collectives=_collectives(executed, stands_for, expected["collectives"]),
        launches_per_step={
            "kernels": [kernels[first] for first in stands_for.values()],
            "attention": attention,
        },
        generated=_generated(executed.values()),
    )


def _generated(executed: Iterable[RankRehearsal]) -> dict[str, Any]:
    compiled = [rank.generated for rank in executed if rank.generated]
    if not compiled:
        return {}
    most = max(compiled, key=lambda found: found["launches"])
    return {**most, "faults": sorted({fault for found in compiled for fault in found["faults"]})}


def _host_reads(executed: Iterable[RankRehearsal]) -> list[dict[str, Any]]:
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for rank in executed:
        for row in rank.host_reads:
            key = (row["what"], row["where"])
            into = found.setdefault(key, {**row, "count": 0, "ranks": []})
            into["count"] = max(into["count"], row["count"])
            into["ranks"].append(rank.rank)
    return [{**row, "ranks": sorted(row["ranks"])} for row in found.values()]


def group_rows(executed: Mapping[int, RankRehearsal]) -> dict[str, Any]:
    """Calls, groups in the world, and those of the executed rank that belongs to most."""

    def mine(found: RankRehearsal) -> list[dict[str, Any]]:
        rows = []
        for label, family in found.families.items():
            row = next((row for row in family if found.rank in row), None)
            ops = [op for op in found.ops if op[1] == label]
            if row is None or len(row) < 2:
                continue
            peers = {op[4] for op in ops if op[4] >= 0}
            collective = any(op[4] < 0 for op in ops)
            rows.append(
                {
                    "axes": found.axes.get(label, []),
                    "size": len(row),
                    "operations": len(ops),
                    "bytes": sum(op[2] * _ITEMSIZE.get(op[3], 4) for op in ops),
                    "communicators": {"eager": 1, "lazy": int(collective) + len(peers)},
                }
            )
        return rows

    groups = {rank: mine(found) for rank, found in executed.items()}
    most = max(groups, key=lambda rank: len(groups[rank]))
    first = executed[most]
    return {
        "calls": first.calls,
        "in_job": sum(len(rows) for rows in first.families.values() if len(rows[0]) > 1),
        "per_rank": len(groups[most]),
        "communicators_per_rank": {
            rule: max(
                (sum(row["communicators"][rule] for row in rows) for rows in groups.values()),
                default=0,
            )
            for rule in ("eager", "lazy")
        },
        "rank": most,
        "groups": groups[most],
    }


_ITEMSIZE = {
    "float64": 8, "int64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2, "int8": 1,
    "uint8": 1, "bool": 1, "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip


def _collectives(
    executed: Mapping[int, RankRehearsal],
    stands_for: Mapping[int, int],
    expected: list[list[dict[str, Any]]] | None,
) -> list[dict[str, Any]]:
    """Every collective of the job, summed over ranks, compared with theory where there is one."""
    from hocket.cost.communication import differences

    times: dict[int, int] = {}
    for first in stands_for.values():
        times[first] = times.get(first, 0) + 1
    sums: dict[tuple[str, str, str], dict[str, Any]] = {}
    counts = ("count", "bytes", "expected_count", "expected_bytes")
    for index, rank in enumerate(sorted(executed)):
        measured = executed[rank].collectives
        theory = measured if expected is None else expected[index]
        for row in differences(measured, theory):
            key = (row["phase"], row["axis"], row["name"])
            into = sums.setdefault(key, {**dict.fromkeys(counts, 0), "equal": True})
            for name in counts:
                into[name] += row[name] * times[rank]
            into["equal"] = into["equal"] and row["equal"]
    rows = [
        {"name": name, "axis": axis, "phase": phase, **row}
        for (phase, axis, name), row in sorted(sums.items())
    ]
    if expected is None:
        for row in rows:
            row |= {"expected_count": None, "expected_bytes": None, "equal": None}
    return rows
