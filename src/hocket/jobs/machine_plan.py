"""The plan for a machine of CPU cores that was measured: the same figures as a run's forecast.

`hocket plan --cluster auto`, `hocket train --layout auto` and `hocket compare` ask the same room
(`planning.machine_forecast`), about the same layouts, so that they say the same.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import statistics
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hocket.spec.errors import HocketError, LayoutError, OptionError, unknown
from hocket.spec.install import install_line
from hocket.spec.layout import Layout
from hocket.spec.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from hocket.models.source import ModelSource
    from hocket.planning.machine_forecast import MeasuredMachine
    from hocket.planning.plan import TrainingPlan
    from hocket.spec.cluster import Cluster
    from hocket.spec.forecast import Forecast
    from hocket.spec.measured import MachineMeasurements
    from hocket.spec.model_shape import ModelShape
    from hocket.spec.run import RunSpec, Workload

PRECISION = "fp32"
"""What a run on CPU computes in unless specified otherwise."""

OBJECTIVES = ("time", "memory")

ALL = 1 << 30


def machine_plan(
    model: str,
    cluster: Cluster,
    *,
    seq_len: int,
    global_batch: int,
    objective: str = "time",
    top: int = 10,
    layout: Layout | None = None,
    pins: Mapping[str, Any] | None = None,
    precision: str | None = None,
    explain: bool = False,
    lora_rank: int | None = None,
    lora_targets: str | None = None,
    quantize_base: str | None = None,
) -> TrainingPlan:
    """The best layouts of a model on a measured machine, or one layout predicted.

    Args: as `jobs.plan.plan_training`; `precision` None is fp32.

    Raises:
        OptionError: a cluster that nobody measured, an objective or a precision that is not for
            CPU cores, a sequence longer than the model has positions for.
        LayoutError: no layout is legal, or none fits.
    """
    from hocket.jobs import forecast, forecast_policy
    from hocket.jobs.adapters import adapter_text as of_adapters
    from hocket.planning.machine_choice import (
        fits_machine,
        holds,
        require_fit,
        with_considered_layouts,
    )
    from hocket.planning.machine_forecast import machine_forecast, step_problem
    from hocket.planning.plan import TrainingPlan

    if objective not in OBJECTIVES:
        message, hint = unknown("objective", objective, OBJECTIVES)
        raise OptionError(f"on CPU cores: {message}", hint=hint)
    if top < 1:
        raise OptionError(f"top is {top}; it must be at least 1", hint="--top 10")
    asked = problem(
        model, cluster, seq_len=seq_len, global_batch=global_batch, precision=precision,
        layout=layout, lora_rank=lora_rank, lora_targets=lora_targets,
        quantize_base=quantize_base,
    )  # fmt: skip
    source, spec, shape, machine = asked.source, asked.spec, asked.shape, asked.machine
    measured, workload = machine.measured, spec.workload
    shown = ALL if objective == "memory" else top
    if layout is not None:
        layouts = [asked.layout]
        considered = [machine_forecast(step_problem(shape, asked.layout, workload), machine)]
    else:
        layouts, considered = forecast.considered_layouts(
            spec,
            shape,
            machine,
            legal=lambda among: _legal_layouts(source, workload, among, pins or {}),
            shown=shown,
            given=tuple(pins or ()),
        )
    rows = [one for one, _ in considered]
    if objective == "memory":
        rows.sort(key=lambda one: (not fits_machine(one), max(one.peak_bytes), one.step_seconds))
    best = rows[0]
    if layout is None:
        require_fit(rows, shape)
    return TrainingPlan(
        model=model,
        cluster=cluster.name,
        objective=objective,
        seq_len=seq_len,
        global_batch=global_batch,
        precision=workload.dtype,
        layouts=tuple(_row(one, spec, shape, measured) for one in rows[:top]),
        num_legal=len(layouts),
        num_fitting=sum(holds(step_problem(shape, one, workload), machine) for one in layouts),
        explanation=tuple(
            forecast_policy.forecast_reasons(with_considered_layouts(best, rows[: top + 1]))
        )
        if explain
        else (),
        notes=(*best.notes, *_vocabulary(spec, source), *of_adapters(shape), *_trust(spec)),
        machine=_words(measured),
        lora_rank=lora_rank,
        lora_targets=lora_targets,
        quantize_base=quantize_base,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MachinePlanRequest:
    """A model and a batch on a machine that was measured.

    Attributes:
        source, spec, shape: of the model; the shape is traced in the type of the workload.
        machine: as a job uses it. layout: the one asked about, complete; dp1 if none.
    """

    source: ModelSource
    spec: RunSpec
    shape: ModelShape
    machine: MeasuredMachine
    layout: Layout


def problem(
    model: str,
    cluster: Cluster,
    *,
    seq_len: int,
    global_batch: int,
    precision: str | None = None,
    layout: Layout | None = None,
    lora_rank: int | None = None,
    lora_targets: str | None = None,
    quantize_base: str | None = None,
) -> MachinePlanRequest:
    """What is asked of a machine of CPU cores, and its model traced.

    Raises:
        OptionError: a cluster that nobody measured, a precision not for CPU cores, no torch.
        LayoutError: a layout or a sequence that does not fit model or batch.
    """
    from hocket.jobs import forecast
    from hocket.jobs.prepare import job_spec, trained_config
    from hocket.jobs.request import request
    from hocket.jobs.validate import validate_layout
    from hocket.models.source import resolve_model
    from hocket.spec.capabilities import PRECISIONS
    from hocket.training import tokenizer

    measured = _measured(cluster)
    precision = precision or PRECISION
    if precision not in PRECISIONS:
        message, hint = unknown("precision", precision, PRECISIONS)
        raise OptionError(f"on CPU cores: {message}", hint=hint)
    if importlib.util.find_spec("torch") is None:
        raise OptionError(
            "a model is traced in the type it is trained in before it is estimated on a CPU, which "
            "needs torch",
            hint=install_line("train"),
        )
    asked = request(
        {"model": model, "seq_len": seq_len, "global_batch": global_batch, "dtype": precision,
         "device": "cpu", "lora_rank": lora_rank, "lora_targets": lora_targets,
         "quantize_base": quantize_base}
    )  # fmt: skip
    source = resolve_model(model, weights=False)
    words = tokenizer.resolve_tokenizer(None, model_dir=source.tokenizer)
    config = trained_config(source, words.vocab_size, words.eos_id)
    spec = job_spec(source, asked, Layout(), config, "plan")
    one = validate_layout(source.dimensions, layout or Layout(), spec.workload)
    unmeasured = forecast.unmeasured(spec, one)
    if unmeasured:
        raise OptionError(f"{unmeasured} was not measured here", hint="another --layout")
    shape = forecast.run_shape(spec)
    machine = forecast.run_machine(spec, measured)
    return MachinePlanRequest(source=source, spec=spec, shape=shape, machine=machine, layout=one)


def _legal_layouts(
    source: ModelSource, workload: Workload, among: list[Layout], pins: Mapping[str, Any]
) -> list[Layout]:
    """Those of `among` that the model and the batch allow and that keep what is pinned.

    Raises:
        LayoutError: none does; with the first reason that is not a pin's.
    """
    from hocket.jobs.forecast import keeping
    from hocket.jobs.validate import validate_layout
    from hocket.schedules.registry import build_schedule

    def complete(layout: Layout) -> Layout | None:
        size = workload.global_batch // layout.dp // (layout.microbatches or 1)
        if size != pins.get("microbatch", size):
            return None
        one = validate_layout(source.dimensions, layout, workload)
        build_schedule(one, one.microbatches or 1)
        return one

    given = {name: value for name, value in pins.items() if name != "microbatch"}
    found, why = keeping(among, given, complete)
    if not found:
        from hocket.planning.pins import pins_text

        said = f" with {pins_text(pins)}" if pins else ""
        raise LayoutError(
            f"no layout of {os.path.basename(source.name)} on this machine{said}"
            + (f": {why.message}" if why else ""),
            hint=why.hint if why and why.hint else "leave --pin out",
        )
    return found


def _measured(cluster: Cluster) -> MachineMeasurements:
    if cluster.measured is None:
        raise OptionError(
            f"{cluster.name} is CPU cores without measurements: a file that was written by hand "
            "does not contain the cost of a step",
            hint="--cluster auto, or a file that hocket probe --out FILE wrote",
        )
    return cluster.measured


def _row(one: Forecast, spec: RunSpec, shape: ModelShape, measured: MachineMeasurements) -> Any:
    """As the planner tells a layout; a prediction here has no range, so its ends are equal."""
    from hocket.planning.forecast import LayoutForecast as Estimate
    from hocket.planning.forecast import Range
    from hocket.planning.machine_choice import MARGIN, fits_machine

    layout, workload = Layout.parse(one.layout), spec.workload
    seconds, tokens = one.step_seconds, workload.global_batch * workload.seq_len
    ranks = layout.world_size
    same = [p.rate for p in measured.products if p.dtype == workload.dtype]
    peak = max(same or [p.rate for p in measured.products]) * min(ranks, measured.host.cores)
    step = Range(seconds, seconds, seconds)
    peak_row = max(one.memory, key=lambda row: row["total"])
    # Of an exchange that is computed along with, as a ring over cp, only the rest is waited for.
    talk = min(sum(one.exposed.values()), max(0.0, seconds - one.compute))
    parts = {"compute": one.compute, "communication": talk}
    return Estimate(
        layout=layout,
        microbatch=workload.global_batch // layout.dp // (layout.microbatches or 1),
        num_gpus=ranks,
        step_seconds=step,
        tokens_per_second_per_gpu=step.inverse(tokens / ranks),
        mfu=step.inverse(tokens * shape.flops_per_token(workload.seq_len, causal=False) / peak),
        memory=peak_row["total"],
        memory_high=round(MARGIN * peak_row["total"]),
        memory_by_kind={kind: size for kind, size in peak_row.items() if kind != "total"},
        fits=fits_machine(one),
        bubble=one.bubble,
        exposed=talk / seconds,
        parts={**parts, "waiting": max(0.0, seconds - sum(parts.values()))},
        dollars_per_billion_tokens=None,
        simulated=True,
        unsupported=(),
    )


def _words(measured: MachineMeasurements) -> str:
    cores = measured.host.cores
    form = "quick form" if measured.quick else "full form"
    return (
        f"{cores} core{'s' if cores > 1 else ''} of {measured.host.cpu}, "
        f"measured {measured.date[:10]}, {form}"
    )


def _vocabulary(spec: RunSpec, source: ModelSource) -> tuple[str, ...]:
    size, configured = spec.config["vocab_size"], source.dimensions.vocab_size
    if size == configured:
        return ()
    return (
        f"predicted with the {size} ids of the tokenizer that hocket train takes for random "
        f"weights; the model's configured vocabulary is {configured:,}",
    )


def _trust(spec: RunSpec) -> tuple[str, ...]:
    """How far such forecasts were off here so far, by the ledger."""
    from hocket.jobs import ledger

    try:
        entries, _ = ledger.read_ledger()
        words = ledger.machine_words(spec.options.device)
    except HocketError:
        return ()
    off = [
        abs(error)
        for entry in entries
        if entry.machine == words and (error := entry.error("step_seconds")) is not None
    ]
    if not off:
        return ()
    runs = "1 run" if len(off) == 1 else f"the median of {len(off)} runs"
    shown = "hocket report --history"
    return (f"predicted steps were {statistics.median(off):.0%} off here, {runs}: {shown}",)


# --- what is printed -------------------------------------------------------------------------

HEADERS = ("layout", "ranks", "step", "tokens/s", "memory a rank", "bubble", "exposed")


def machine_table(found: TrainingPlan) -> str:
    from hocket.reporting.table import table_text

    tokens = found.seq_len * found.global_batch
    rows = [
        (
            str(one.layout),
            one.num_gpus,
            format_seconds(one.step_seconds.median),
            f"{tokens / one.step_seconds.median:,.0f}",
            format_bytes(one.memory) + ("" if one.fits else " !"),
            f"{one.bubble:.1%}",
            f"{one.exposed:.1%}",
        )
        for one in found.layouts
    ]
    lines = [
        f"{found.model} on {found.cluster}, {found.precision}: sequences of {found.seq_len:,}, "
        f"global batch {found.global_batch:,}",
        found.machine,
        f"{found.num_legal:,} layouts of processes, {found.num_fitting:,} fit; best by "
        f"{found.objective}"
        if found.num_legal > 1
        else "one layout, estimated",
        "",
        table_text(HEADERS, rows),
        "",
        "exposed: fraction of a step in communication that no computation overlaps",
    ]
    if any(not one.fits for one in found.layouts):
        lines.append("!: more than a rank may hold")
    lines += [f"* {note}" for note in found.notes]
    if found.explanation:
        lines += ["", *found.explanation]
    return "\n".join(lines)
