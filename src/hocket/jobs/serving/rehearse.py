"""The job behind `hocket rehearse --serve` and `hocket serve --dry-run`: a replica's steps on fake
CUDA tensors.

    model, layout -> worker processes execute ranks -> traces of all ranks of one replica
        -> NCCL's rules under both kinds of communicator, host reads, graphs, memory, kernels

Tensor ranks above the first that hold as much of the vocabulary do the same as each other: one is
executed for all of them. The parent imports no torch.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from hocket.jobs.rehearsal_fit import require_size
from hocket.jobs.rehearsal_text import verdict_lines
from hocket.jobs.serving.eight_bits import require_cached
from hocket.spec.capabilities import refused_quantization
from hocket.spec.errors import OptionError
from hocket.spec.expert_dispatch import check_copies
from hocket.spec.layout import Layout
from hocket.spec.rehearsal import NOT_SEEN, RankRehearsal, RehearsedDevice
from hocket.spec.run import RunSpec, TrainOptions, Workload
from hocket.spec.serving import ServeOptions, replica_layout
from hocket.spec.units import format_bytes

if TYPE_CHECKING:
    from hocket.jobs.rehearsal_workers import RehearsalWorkers
    from hocket.jobs.serving.request import PreparedServer
    from hocket.simulation.nccl import OrderVerdict

STEPS = ("prefill", "mixed", "decode", "decode eager")


@dataclasses.dataclass(kw_only=True)
class ServingReport:
    """What a rehearsed replica would do; `to_json` is what `--json` prints.

    Attributes:
        layout: of the replica. gpu: of each rank.
        verdicts: by rule.
        ranks: of each executed rank, by its number: `stage`, `steps`, `graphs`, `attention`,
            `memory`, and `largest`: tokens of the largest step, and host reads in its experts.
        stands_for: every rank to the executed one.
        process_groups: as of a training job. collectives: rows of a decode step.
        predicted: by stage, bytes of `weights`, the largest `step` and a cached `token`, as
            `hocket serve` predicts them; None where it cannot.
    """

    model: str
    layout: str
    gpu: str
    verdicts: dict[str, OrderVerdict]
    ranks: dict[int, dict[str, Any]]
    stands_for: dict[int, int]
    process_groups: dict[str, Any]
    collectives: list[dict[str, Any]]
    launches: dict[int, dict[str, int]]
    device_memory: int
    predicted: list[dict[str, int]] | None = None

    @property
    def ends(self) -> bool:
        """Whether every step ends under both rules, with the same calls on all ranks."""
        return all(verdict.ok for verdict in self.verdicts.values())

    @property
    def fits(self) -> bool:
        """Whether weights, the largest step and a cache fit each GPU."""
        return all(self.held(one) <= self.device_memory for one in self.ranks.values())

    @staticmethod
    def held(one: dict[str, Any]) -> int:
        """Bytes of an executed rank: weights, the largest step and the cache."""
        memory = one["memory"]
        return int(memory["weights"] + memory["step"] + memory["cache"])

    def predicted_peak(self, rank: int) -> int | None:
        """Weights, largest step and a cache of as many tokens as were rehearsed."""
        if self.predicted is None:
            return None
        one = self.ranks[self.stands_for[rank]]
        stage = self.predicted[one["stage"]]
        cache = stage["token"] * int(one["memory"]["cache_tokens"])
        return stage["weights"] + stage["step"] + cache

    def host_reads(self) -> list[dict[str, Any]]:
        """Places where the host waits inside a step, by step and rank: there should be none."""
        return [
            {"rank": rank, "step": name, **read}
            for rank, one in self.ranks.items()
            for name, step in one["steps"].items()
            for read in step["host_reads"]
        ]

    def to_json(self) -> str:
        """Keys as in a training rehearsal, and `serving` by rank."""
        every = self.stands_for
        return json.dumps(
            {
                **{rule: verdict.to_json() for rule, verdict in self.verdicts.items()},
                "model": self.model,
                "layout": self.layout,
                "gpu": self.gpu,
                "ranks": list(every),
                "peak_bytes": [self.held(self.ranks[e]) for e in every.values()],
                "predicted_peak_bytes": [self.predicted_peak(rank) for rank in every],
                "host_reads": sum(row["count"] for row in self.host_reads()),
                "host_read_places": self.host_reads(),
                "result_reads_per_step": 1,
                "process_groups": self.process_groups,
                "collectives": self.collectives,
                "launches_per_step": [
                    {n: s["launches"] for n, s in self.ranks[e]["steps"].items()}
                    for e in every.values()
                ],
                "serving": {str(rank): one for rank, one in self.ranks.items()},
                "not_seen": list(NOT_SEEN),
            },
            indent=1,
        )

    def text(self) -> str:
        """The same for a reader."""
        lines = [f"{self.model} in {self.layout} on {self.gpu}: one replica"]
        lines += [f"  {line}" for line in verdict_lines(self.verdicts, len(self.stands_for))]
        lines += self._read_lines()
        for rank, one in self.ranks.items():
            lines += self._rank_lines(rank, one)
        lines.append(f"  not seen: {'; '.join(NOT_SEEN)}")
        return "\n".join(lines)

    def _read_lines(self) -> list[str]:
        steps: dict[str, dict[str, None]] = {}
        for read in self.host_reads():
            steps.setdefault(f"{read['what']} at {read['where']}", {})[read["step"]] = None
        rows = [f"    {place} ({', '.join(names)})" for place, names in steps.items()]
        none = "none; one wait for the result of each sampled step"
        return [f"  host reads inside a step: {'' if rows else none}".rstrip(), *rows]

    def _rank_lines(self, rank: int, one: dict[str, Any]) -> list[str]:
        equal = [r for r, e in self.stands_for.items() if e == rank and r != rank]
        same = f" (and {len(equal)} equal)" if equal else ""
        memory, graphs = one["memory"], one["graphs"]
        lines = [
            f"  rank {rank}{same}, stage {one['stage']}: weights "
            f"{format_bytes(memory['weights'])}, largest step {format_bytes(memory['step'])}, "
            f"cache {format_bytes(memory['cache'])} ({memory['cache_tokens']:,} tokens in blocks "
            f"of {memory['block_size']})"
        ]
        for row in one["attention"]:
            window = f", window {row['window']}" if row["window"] else ""
            why = "; ".join(f"{name} {reason}" for name, reason in row["rejected"].items())
            lines.append(
                f"    attention: {row['kernel']} for {row['layers']} layers{window}"
                + (f" ({why})" if why else "")
            )
        if graphs["reason"]:
            lines.append(f"    CUDA graphs: none, {graphs['reason']}")
        else:
            lines.append(
                f"    CUDA graphs: {len(graphs['sizes'])} sizes up to {graphs['sizes'][-1]} rows, "
                f"each {graphs['launches']} kernels and {graphs['collectives']} collectives"
            )
        for name, step in one["steps"].items():
            lines.append(
                f"    {name}: {step['rows']} rows, {step['tokens']} tokens, {step['launches']} "
                f"kernels launched by the host"
            )
        if one["largest"]["host_reads"]:
            lines.append(
                f"    largest step: {one['largest']['tokens']:,} tokens, "
                f"{one['largest']['host_reads']} host reads, of the sizes of uneven all-to-alls"
            )
        return lines


def replica_spec(
    model: str, layout: Layout, *, dtype: str = "bf16", layers: int | None = None,
    trust_remote_code: bool = False, **sizes: Any,
) -> RunSpec:  # fmt: skip
    """One replica of a model that may have no weights here, with every size but the block's.

    Raises:
        HocketError: an unknown model, a layout that cannot be served, a size that cannot be.
    """
    from hocket.jobs.serving.request import _sizes, legal_server_layout
    from hocket.models.depth import config_with_layers
    from hocket.models.source import resolve_model

    source = resolve_model(model, trust_remote_code=trust_remote_code, weights=False)
    if layers is not None:
        config = config_with_layers(source.name, source.config, layers)
        source = dataclasses.replace(source, config=config)
    found = legal_server_layout(source, replica_layout(layout), "cpu")
    options = _sizes(ServeOptions(**sizes), source, "cuda", found)
    check_copies(options.redundant_experts, found, source.dimensions.num_experts)
    return RunSpec(
        model=source.repo or model,
        config=dict(source.config),
        layout=dataclasses.replace(found, microbatches=1),
        workload=Workload(seq_len=2, global_batch=1, dtype=dtype),
        options=TrainOptions(dropout=0.0, device="cuda", trust_remote_code=trust_remote_code),
        command="serve",
        serving=options,
    )


def replica_of(server: PreparedServer) -> RunSpec:
    """One replica of a server that would be started, as on a GPU.

    Raises:
        OptionError: its layout is only chosen then.
    """
    if server.request.auto:
        raise OptionError(
            "--layout auto is chosen by measurement, when the server starts", hint="--layout tp2"
        )
    spec = server.spec(replica=True)
    return dataclasses.replace(spec, options=dataclasses.replace(spec.options, device="cuda"))


def rehearse_replica(
    spec: RunSpec,
    *,
    gpu: str = "H100",
    workers: RehearsalWorkers | None = None,
    on_phase: Callable[[str], None] | None = None,
) -> ServingReport:
    """Execute the ranks of one replica and judge what they enqueue.

    Args:
        spec: of a replica. gpu: of the catalogue.
        workers: processes that are there already; None: started and ended here.
        on_phase: called with what happens next.

    Raises:
        OptionError: an unknown GPU, too many layers, or no C++ compiler.
        ModelError: the model cannot be served, or a rank cannot execute its steps.
    """
    from hocket.jobs.rehearsal_reason import proxy_reason, require_pages
    from hocket.jobs.rehearsal_workers import RehearsalWorkers as Workers
    from hocket.jobs.rehearsal_workers import equal_ranks, report_executed, step_failed
    from hocket.jobs.rehearse import device_of, group_rows, traces_of
    from hocket.models.source import run_source
    from hocket.simulation.nccl import RULES, simulate_nccl

    device = device_of(gpu)
    if spec.workload.dtype == "bf16" and device.capability < (8, 0):
        raise OptionError(
            f"{device.name} has no matmuls in bfloat16", hint="--dtype fp32, or --gpu A100"
        )
    options = spec.serving
    assert options is not None
    why = refused_quantization(
        options.quantization, cuda=True, dtype=spec.workload.dtype, capability=device.capability
    )
    if why is not None:
        raise OptionError(why, hint="leave --quantization out")
    require_cached(
        options.kv_cache_dtype, spec.workload.dtype, spec.config, cuda=True,
        capability=device.capability,
    )  # fmt: skip
    dimensions = run_source(spec).dimensions
    require_size(spec.layout, dimensions)
    # Tensor rank 0 samples and gathers; of the data ranks only the first has rows in every step.
    stands_for = equal_ranks(spec.layout, dimensions.vocab_size, first=True, data=True)
    wanted = sorted(set(stands_for.values()))
    say = on_phase or (lambda text: None)
    say(f"executing {len(wanted)} of {len(stands_for)} ranks on fake {device.name} GPUs")
    tasks = [_task(spec, device, rank) for rank in reversed(wanted)]
    expectation = {
        "task": "call",
        "entry": "hocket.ranks.rehearsal_expected:expected_serving",
        "arguments": {"spec": spec.to_json()},
    }
    predicted: list[dict[str, int]] | None = None
    executed: dict[int, RankRehearsal] = {}
    said: dict[int, dict[str, Any]] = {}
    with ExitStack() as stack:
        if workers is None:
            workers = stack.enter_context(Workers(len(tasks)))
        require_pages(spec, workers)
        for event in workers.run([*tasks, expectation]):
            if "stages" in event["value"]:
                predicted = event["value"]["stages"]
                continue
            found = RankRehearsal.from_json(event["value"]["rank"])
            executed[found.rank], said[found.rank] = found, event["value"]["serving"]
            report_executed(len(executed), len(wanted), say)
    for _, found in sorted(executed.items()):  # all ranks are done, and the workers free again
        if found.error:
            raise proxy_reason(spec, step_failed(spec.model, found))
    traces = traces_of(executed, stands_for)
    return ServingReport(
        model=spec.model,
        layout=spec.layout.axes_text(),
        gpu=device.name,
        verdicts={rule: simulate_nccl(traces, rule) for rule in RULES},
        ranks={rank: said[rank] for rank in wanted},
        stands_for=stands_for,
        process_groups=group_rows(executed),
        collectives=_collectives(
            executed[wanted[0]], *said[wanted[0]]["steps"][STEPS[-1]]["collectives"]
        ),
        launches={rank: dict(found.launches) for rank, found in executed.items()},
        device_memory=device.memory,
        predicted=predicted,
    )


def _task(spec: RunSpec, device: RehearsedDevice, rank: int) -> dict[str, Any]:
    return {
        "task": "call",
        "entry": "hocket.rehearsal.serving:rehearse_server_rank",
        "arguments": {
            "spec": spec.to_json(),
            "device": dataclasses.asdict(device),
            "rank": rank,
        },
    }


def _collectives(found: RankRehearsal, first: int, last: int) -> list[dict[str, Any]]:
    """Rows of the operations `first` to `last` of a rank: name, axes, count and elements."""
    counts: dict[tuple[str, str], list[int]] = {}
    for name, label, numel, *_ in found.ops[first:last]:
        row = counts.setdefault((name, "/".join(found.axes.get(label, ()))), [0, 0])
        row[0] += 1
        row[1] += numel
    return [
        {"name": name, "axes": axes, "count": count, "elements": numel}
        for (name, axes), (count, numel) in counts.items()
    ]
