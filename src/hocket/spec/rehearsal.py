"""Rehearsal: what a job does on GPUs, found by executing it on fake CUDA tensors, as plain data.

Device the GPU, RankRehearsal one rank's step, RehearsalReport the job as a whole (what
`hocket rehearse --json` prints).
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from hocket.spec.files import parse_json

OWNERS = ("parameters", "gradients", "optimizer", "activations", "communication", "other")
"""Who tensor memory belongs to. `communication`: buffers that a collective made or filled;
`other`: inputs, module buffers and constants."""

NOT_SEEN = (
    "the time of any kernel",
    "fragmentation of the caching allocator, the CUDA context and cuBLAS workspaces",
    "NCCL's own buffers",
)
"""What a rehearsal does not see."""
DEEPEP_NOT_SEEN = "DeepEP's kernels and buffer (tokens are dispatched directly)"
"""The same of a job with `--expert-dispatch deepep`."""

NOT_COMPILED = "what torch.compile generates (layers run eagerly)"
"""The same of a rehearsal without `--compile`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RehearsedDevice:
    """The GPU that is rehearsed on.

    Attributes:
        capability: CUDA compute capability. memory: bytes that the driver gives to processes.
        sms: streaming multiprocessors. l2: bytes of last-level cache.
    """

    name: str
    capability: tuple[int, int]
    memory: int
    sms: int = 0
    l2: int = 0

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> RehearsedDevice:
        return cls(**{**data, "capability": tuple(data["capability"])})


@dataclasses.dataclass(kw_only=True)
class RankRehearsal:
    """One rank's step, as it was executed.

    Attributes:
        rank: global rank.
        peak: owner to bytes at the moment when most are allocated on the device; `total`.
        standing: owner to bytes that are there between steps.
        host_peak: the most bytes of pinned host memory at once.
        ops: what was enqueued: (name, label of the group, index in the rows of its family,
            elements, dtype, peer or -1, root or -1, whether the compute stream waits, the first
            operation of its batch or -1).
        events: `i` enqueues operation i, `~i` waits for it.
        families: label to the groups that were created together; each a list of rows of ranks.
        axes: label of a group to the names of the mesh axes that use it.
        calls: calls that create groups, in which every rank takes part.
        collectives: rows of name, axis, phase, count, bytes.
        host_reads: rows of what, where, count.
        launches: aten operations that launch a kernel, to their number. attention: kernel to calls.
        generated: what torch.compile generated: `kernels`, `graphs` and `graph_breaks` (numbers),
            `launches` of a step, `shared_bytes` (of shared memory, at most), and `faults`: kernels
            that cannot run; empty where nothing was compiled.
        actions: the schedule's actions in the order of their execution.
        dtypes: operation and dtype of the collectives, for messages.
        seconds: that the execution took.
        error: the traceback of a step that raised.
    """

    rank: int
    peak: dict[str, int] = dataclasses.field(default_factory=dict)
    standing: dict[str, int] = dataclasses.field(default_factory=dict)
    host_peak: int = 0
    ops: list[list[Any]] = dataclasses.field(default_factory=list)
    events: list[int] = dataclasses.field(default_factory=list)
    families: dict[str, list[list[int]]] = dataclasses.field(default_factory=dict)
    axes: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    calls: int = 0
    collectives: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    host_reads: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    launches: dict[str, int] = dataclasses.field(default_factory=dict)
    attention: dict[str, int] = dataclasses.field(default_factory=dict)
    generated: dict[str, Any] = dataclasses.field(default_factory=dict)
    actions: list[str] = dataclasses.field(default_factory=list)
    seconds: float = 0.0
    error: str = ""

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> RankRehearsal:
        return cls(**data)


@dataclasses.dataclass(kw_only=True)
class RehearsalReport:
    """A job's rehearsal as a whole: what `hocket rehearse --json` prints, with an exact inverse.

    Attributes:
        eager, lazy: under each rule of NCCL's communicators: `ends`, and `waiting`: rows of rank,
            operation, behind and ranks; `cycle`: ranks that wait for each other. `ends` is None
            where only one rank was executed.
        peak_bytes: a row for each rank: rank, total, and bytes by owner (`OWNERS`) at its peak.
        predicted_peak_bytes: by rank, what the planner predicts; None where it cannot.
        host_reads: rows of what, where (file and line), count and ranks: places where the host
            waits for the device within a step.
        process_groups: calls that create groups, groups in the job, and the groups of each
            executed rank with their axes, sizes, operations and bytes.
        collectives: rows of name, axis, phase, count and bytes over the executed ranks, with
            expected_count, expected_bytes and equal.
        launches_per_step: `kernels`: of each rank, and `attention`: kernel to its calls in the job.
        generated: as of the executed rank with most launches, and the `faults` of all.
    """

    eager: dict[str, Any]
    lazy: dict[str, Any]
    peak_bytes: list[dict[str, int]]
    predicted_peak_bytes: list[int | None]
    host_reads: list[dict[str, Any]]
    process_groups: dict[str, Any]
    collectives: list[dict[str, Any]]
    launches_per_step: dict[str, Any]
    generated: dict[str, Any] = dataclasses.field(default_factory=dict)

    def to_json(self) -> str:
        """One JSON object on one line: a number for each key, and the rows it comes from.

        `peak_bytes` and `launches_per_step` are lists with a number for each of `ranks`;
        `host_reads` is the number of one step of one rank. Their rows are `peak_bytes_by_owner`,
        `attention_calls` and `host_read_places`.
        """
        return json.dumps(
            dataclasses.asdict(self)
            | {
                "ranks": [row["rank"] for row in self.peak_bytes],
                "peak_bytes": [row["total"] for row in self.peak_bytes],
                "peak_bytes_by_owner": self.peak_bytes,
                "host_reads": sum(row["count"] for row in self.host_reads),
                "host_read_places": self.host_reads,
                "launches_per_step": self.launches_per_step["kernels"],
                "attention_calls": self.launches_per_step["attention"],
            }
        )

    @classmethod
    def from_json(cls, text: str) -> RehearsalReport:
        """The inverse of `to_json`. Raises ValueError, TypeError or KeyError for anything else."""
        data = parse_json(text)
        del data["ranks"]
        data["peak_bytes"] = data.pop("peak_bytes_by_owner")
        data["host_reads"] = data.pop("host_read_places")
        data["launches_per_step"] = {
            "kernels": data["launches_per_step"],
            "attention": data.pop("attention_calls"),
        }
        return cls(**data)

    @property
    def ends(self) -> bool:
        """Whether the job completes under both rules, as far as that was executed."""
        return self.eager["ends"] is not False and self.lazy["ends"] is not False
