"""Expected: what theory and the memory model say about the ranks that a rehearsal executes.

Called in a worker of the rehearsal, because both need the model's plan or its trace, and so torch.
"""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Callable
from typing import Any

from hocket.spec.errors import HocketError
from hocket.spec.layout import Layout
from hocket.spec.run import RunSpec
from hocket.spec.schedule import Schedule


def expected(spec: str, schedule: str, ranks: list[int]) -> dict[str, Any]:
    """Collectives and peak memory of ranks.

    Args:
        spec: a RunSpec as JSON. schedule: its text.
        ranks: global ranks.

    Returns:
        `collectives`: rows of name, axis, phase, count and bytes, a list for each rank, or None;
        `memory`: predicted bytes by kind, a row for each rank of the layout, or None; `reasons`:
        why one of them is None.
    """
    job, board = RunSpec.from_json(spec), Schedule.parse(schedule)
    reasons: dict[str, str] = {}

    def tried(name: str, function: Callable[[], Any]) -> Any:
        try:
            return function()
        except HocketError as error:
            reasons[name] = error.message
        # The ranks' traces must survive a failed prediction: for a family that the models of memory
        # and communication do not know, any exception is possible, and becomes the reason.
        except Exception:
            reasons[name] = traceback.format_exc(limit=-1).strip().splitlines()[-1]
        return None

    collectives = tried("collectives", lambda: _collectives(job, board, ranks))
    memory = tried("memory", lambda: _memory(job, board))
    return {"collectives": collectives, "memory": memory, "reasons": reasons}


def _collectives(spec: RunSpec, schedule: Schedule, ranks: list[int]) -> list[Any]:
    from hocket.ranks.expected_communication import expected_rows

    return expected_rows(spec, schedule.stage_ranks, ranks)


def expected_serving(spec: str) -> dict[str, Any]:
    """Memory of the stages of a replica on a GPU.

    Args:
        spec: a RunSpec of a replica as JSON, with the engine's sizes.

    Returns:
        `stages`: of each the bytes of `weights`, of the largest `step` and of one cached `token`,
        on the rank with the most; None where they are unknown, for the `reason`.
    """
    try:
        return {"stages": _serving(RunSpec.from_json(spec)), "reason": ""}
    except HocketError as error:
        reason = error.message
    # As for a training step: the ranks' traces must survive a failed prediction.
    except Exception:
        reason = traceback.format_exc(limit=-1).strip().splitlines()[-1]
    return {"stages": None, "reason": reason}


def _serving(spec: RunSpec) -> list[dict[str, int]]:
    from hocket.cost.serving_replica import ServingReplica
    from hocket.ranks.trace import shape_here
    from hocket.spec.serving import cached_bytes

    sizes = spec.serving
    assert sizes is not None
    assert sizes.max_num_batched_tokens is not None
    assert sizes.max_num_seqs is not None
    replica = ServingReplica(
        shape=shape_here(spec).with_copies(sizes.redundant_experts),
        layout=spec.layout,
        dtype=spec.workload.dtype,
        cpu=False,
        quantization=sizes.quantization,
        cached_bytes=cached_bytes(sizes.kv_cache_dtype),
    )
    if any(p.groups > 1 for block in replica.shape.blocks.values() for p in block.products):
        replica = dataclasses.replace(replica, routing_bytes=_routing_bytes(spec))
    return replica.stage_bytes(sizes.max_num_batched_tokens, sizes.max_num_seqs)


def _routing_bytes(spec: RunSpec) -> int:
    """Of a routing weight of the model."""
    from hocket.models.plan_cache import built_plan
    from hocket.models.skeleton import build_skeleton
    from hocket.models.source import run_source
    from hocket.ranks.expected_communication import routing_of
    from hocket.training.build import dtype_of

    source = run_source(spec)
    dtype = dtype_of(spec.workload.dtype)
    skeleton = build_skeleton(source.config, dtype=dtype, dropout=0.0, code=source.code)
    found = routing_of(skeleton, built_plan(skeleton))
    return dtype.itemsize if found is None else found[0]


def first_served_fit(spec: str, layouts: list[str], allowed: float) -> str | None:
    """The first of some layouts of one replica, in each rank of which weights, the largest step and
    the cache of one longest request are predicted to take at most `allowed` bytes.

    Args:
        spec: a RunSpec of a replica as JSON; its own layout is not looked at.
    """
    job = RunSpec.from_json(spec)
    assert job.serving is not None
    longest = job.serving.max_model_len or 0
    for text in layouts:
        layout = dataclasses.replace(Layout.parse(text), microbatches=1)
        try:
            stages = _serving(dataclasses.replace(job, layout=layout))
        except HocketError:
            continue
        most = max(one["weights"] + one["step"] + one["token"] * longest for one in stages)
        if most <= allowed:
            return text
    return None


def first_fit(spec: str, layouts: list[str], allowed: float) -> str | None:
    """The first of some layouts whose ranks are predicted to allocate at most `allowed` bytes.

    Args:
        spec: a RunSpec as JSON; its own layout is not looked at.
    """
    from hocket.schedules.registry import build_schedule

    job = RunSpec.from_json(spec)
    for text in layouts:
        layout = Layout.parse(text)
        try:
            board = build_schedule(layout, layout.microbatches or 1)
            rows = _memory(dataclasses.replace(job, layout=layout), board)
        except HocketError:
            continue
        if max(row["total"] for row in rows) <= allowed:
            return text
    return None


def _memory(spec: RunSpec, schedule: Schedule) -> list[dict[str, int]]:
    from hocket.cost.measured_memory import gpu_memory_rows
    from hocket.ranks.trace import shape_here

    return gpu_memory_rows(shape_here(spec), spec, schedule)
