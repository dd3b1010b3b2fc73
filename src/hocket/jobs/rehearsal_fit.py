"""Fit: what of a rehearsed job is rejected, with the numbers and the nearest layout that works."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from hocket.jobs.rehearsal_workers import RehearsalWorkers
from hocket.spec.errors import HocketError, LayoutError, ModelError, OptionError, ScheduleError
from hocket.spec.layout import Layout
from hocket.spec.rehearsal import RehearsedDevice
from hocket.spec.run import RunSpec
from hocket.spec.units import format_bytes

if TYPE_CHECKING:
    from hocket.jobs.rehearse import Rehearsed
    from hocket.models.dimensions import Dimensions
    from hocket.simulation.nccl import OrderVerdict

MOST_RANKS, MOST_EXECUTED_LAYERS = 65_536, 100_000
"""Ranks that are simulated at most, and layers that a rank executes in a step, once for each
microbatch: a rehearsal of more would take hours."""
MARGIN = 0.05
"""Share of the memory that a proposed layout leaves: predictions are that exact."""
TENSOR_RANKS = 8
"""Degree of tp up to which a layout is proposed: ranks of one node."""


def require_fit(found: Rehearsed) -> None:
    """Reject a job that does not complete or does not fit.

    Raises:
        ScheduleError: ranks wait for ever under the rule that hocket's groups obey, or call a
            collective differently.
        OptionError: a kernel that torch.compile generates cannot run on the GPU.
        LayoutError: the peak rank's tensors do not fit its GPU.
    """
    verdict = found.verdicts.get("eager")
    if verdict is not None and not verdict.ok:
        raise ScheduleError(
            unfinished(verdict, found.job.spec.layout.world_size),
            hint="--schedule gpipe, or fewer --microbatches",
        )
    faults = found.report.generated.get("faults")
    if faults:
        raise OptionError("; ".join(faults), hint="leave --compile out")
    reason = _why_unfit(found)
    if reason is not None:
        other = _nearest_fit(found)
        raise LayoutError(reason, hint=None if other is None else f"--layout {other}")


def unfinished(verdict: OrderVerdict, ranks: int) -> str:
    """Why a job of so many ranks does not complete."""
    if verdict.ends:
        return f"ranks call a collective differently: {verdict.mismatches[0]}"
    cycle = verdict.picture() or "\n".join(map(str, verdict.waiting[:4]))
    return f"{len(verdict.waiting)} of {ranks} ranks deadlock on NCCL:\n{cycle}"


def require_size(layout: Layout, dimensions: Dimensions) -> None:
    """Reject a job whose rehearsal would not end.

    Raises:
        LayoutError: too many ranks.
        OptionError: too many layers and microbatches.
    """
    if layout.world_size > MOST_RANKS:
        other = layout
        if layout.world_size // layout.dp > MOST_RANKS:  # fewer data ranks are not enough
            pp, tp = min(layout.pp, dimensions.num_layers), math.gcd(layout.tp, TENSOR_RANKS)
            other = Layout(dp=layout.dp, pp=pp, tp=tp)
        fewer = max(1, min(other.dp, MOST_RANKS * other.dp // other.world_size))
        other = dataclasses.replace(other, dp=1 << fewer.bit_length() - 1)
        raise LayoutError(
            f"{layout.axes_text()} has {layout.world_size:,} ranks, and at most {MOST_RANKS:,} are "
            "simulated; data-parallel ranks run the same program",
            hint=other.flag_with(),
        )
    count, each = layout.microbatches or 1, -(-dimensions.num_layers // layout.pp)
    if each * count > MOST_EXECUTED_LAYERS:
        fewer_layers = f"--layers {max(1, MOST_EXECUTED_LAYERS // count) * layout.pp}"
        raise OptionError(
            f"layers of a rank: {each:,}, microbatches: {count:,}; a rehearsal executes at most "
            f"{MOST_EXECUTED_LAYERS:,} layers in a rank's step",
            hint=fewer_layers if each > count else f"--microbatches {MOST_EXECUTED_LAYERS // each}",
        )


def require_recompute(model: str, text: str) -> None:
    """Reject a recompute that the layers of a model of the catalogue cannot have; of another
    model a worker finds it. Raises ModelError, as a rank does."""
    from hocket.jobs.planner_problem import shipped_shape
    from hocket.planning.layouts import unmet_recompute

    shape = None if text in ("none", "full") else shipped_shape(model)
    if shape is not None and (why := unmet_recompute(shape, text)):
        raise ModelError(f"recompute is {text}: {why}", hint="--recompute full")


def require_inputs(spec: RunSpec, device: RehearsedDevice) -> None:
    """Reject a microbatch of which one hidden state alone does not fit the GPU. Raises LayoutError.

    The host keeps boundaries of its sequences, which would take as long as the host's memory.
    """
    from hocket.models.source import run_source

    layout, workload = spec.layout, spec.workload
    rows = workload.global_batch // layout.dp // (layout.microbatches or 1)
    width = run_source(spec).dimensions.hidden_size * (4 if workload.dtype == "fp32" else 2)
    each = workload.seq_len // layout.cp * width
    if rows * each > device.memory:
        raise LayoutError(
            f"the hidden state of {rows:,} sequences of {workload.seq_len:,} tokens takes "
            f"{format_bytes(rows * each)}, and {device.name} has {format_bytes(device.memory)}",
            hint="--rows 1" if device.memory > each else None,
        )


def _why_unfit(found: Rehearsed) -> str | None:
    """Why a job's tensors do not fit; None: they do."""
    peak = max(found.report.peak_bytes, key=lambda row: row["total"])
    capacity = found.job.device.memory
    if peak["total"] <= capacity:
        return None
    return (
        f"rank {peak['rank']} allocates {format_bytes(peak['total'])} at its peak, and "
        f"{found.job.device.name} has {format_bytes(capacity)}"
    )


def _nearest_fit(found: Rehearsed) -> Layout | None:
    """The first of the alternatives that is predicted to fit; None: none of them is.

    The prediction is scaled by how far it is off for the layout that was executed.
    """
    report, spec = found.report, found.job.spec
    pairs = [
        (row["total"], predicted)
        for row, predicted in zip(report.peak_bytes, report.predicted_peak_bytes, strict=True)
        if predicted
    ]
    if not pairs:
        return None
    rehearsed, predicted = max(pairs)
    layouts = list(dict.fromkeys(map(str, alternatives(spec))))
    task = {
        "task": "call",
        "entry": "hocket.ranks.rehearsal_expected:first_fit",
        "arguments": {
            "spec": spec.to_json(),
            "layouts": layouts,
            "allowed": (1 - MARGIN) * found.job.device.memory * predicted / rehearsed,
        },
    }
    with RehearsalWorkers(1) as workers:
        (event,) = workers.run([task])
    return None if event["value"] is None else Layout.parse(event["value"])


def alternatives(spec: RunSpec) -> Iterator[Layout]:
    """Layouts that hold less on a rank, what changes least first: the same ranks with ZeRO, with
    recompute or both, then more tensor, pipeline and data ranks."""
    from hocket.jobs.validate import validate_layout
    from hocket.models.source import run_source
    from hocket.spec.capabilities import runs

    dimensions = run_source(spec).dimensions
    layout = spec.layout

    def lighter(one: Layout) -> Iterator[Layout]:
        zeros = [zero for zero in (1, 3) if one.dp > 1 and zero > one.zero]
        yield from (dataclasses.replace(one, zero=zero) for zero in zeros)
        if one.recompute != "full":
            full = dataclasses.replace(one, recompute="full")
            yield full
            yield from (dataclasses.replace(full, zero=zero) for zero in zeros)

    def larger() -> Iterator[Layout]:
        for factor in (2, 4, 8):
            if layout.tp * factor <= TENSOR_RANKS:
                yield dataclasses.replace(layout, tp=layout.tp * factor)
            yield dataclasses.replace(layout, pp=layout.pp * factor, pipeline_split="balanced")

    candidates = [*lighter(layout)]
    for one in larger():
        candidates += [one, *lighter(one)]
    for one in candidates:
        if one.pp > 1 and one.microbatches == 1 and layout.pp == 1:
            one = dataclasses.replace(one, microbatches=None)
        try:
            legal = validate_layout(dimensions, one, spec.workload, world_size=one.world_size)
        except (LayoutError, OptionError):
            continue
        if runs(legal):
            yield legal


def gpu_here() -> str | None:
    """This machine's GPU by its name in the catalogue."""
    from hocket.catalogue import hardware
    from hocket.probing.devices import find_devices

    try:
        devices = find_devices().devices
        return hardware.gpu(devices[0].name).name if devices else None
    except HocketError:
        return None
