"""When a run is foretold, and what is said of it.

    --layout auto     the machine is measured if it was not (once, some seconds), a layout is
                      chosen, and why is said; then the run starts
    --layout given    measured before: predicted before the first step, which takes milliseconds
                      not measured: the run starts without a prediction, and names the command
    --cluster none    nothing is foretold

A run of another launcher's ranks is foretold where its machine was measured before.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hocket.jobs import elastic, forecast, links, prepare
from hocket.jobs.precision import on_cuda
from hocket.jobs.validate import validate_layout
from hocket.spec.errors import HocketError, OptionError
from hocket.spec.forecast import Forecast
from hocket.spec.layout import Layout
from hocket.spec.run import RunFolder, RunSpec
from hocket.spec.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from hocket.jobs.record import JobRecorder
    from hocket.launch import Launcher

NONE, AUTO = "none", "auto"
"""Clusters that are not files: no prediction; this machine, as it was measured."""

WEIGHED = 8
"""Layouts that are set beside one that was given."""

PROPOSED = 50
"""Layouts of the planner among which the first that this run can have is taken."""

UNMEASURED = "this machine was not measured before the run: hocket probe"

LONGEST = 20.0
"""Seconds that the quick probe takes at most on two cores."""


def reject_cluster(cluster: str) -> None:
    """Refuse a cluster that cannot be what a run is foretold for.

    Raises:
        OptionError: no such file or name, nonsense in it, no measurements, or those of devices
            that are not on this machine.
    """
    if cluster in (NONE, AUTO):
        return
    from hocket.jobs import machine

    found = machine.named_cluster(cluster)
    if found.measured is None:
        raise OptionError(
            f"cluster {cluster} contains no measurements: a run on this machine is predicted from "
            "what was measured here",
            hint="--cluster auto, or a file that hocket probe --out FILE wrote",
        )
    machine.require_here(found)


def auto_layout(
    job: prepare.PreparedJob,
    config: dict[str, Any],
    record: JobRecorder,
    *,
    launcher: Launcher | None = None,
) -> tuple[forecast.Told, prepare.PreparedJob]:
    """The layout for `--layout auto`: its forecast, and the job in it. Says what and why.

    Raises:
        HocketError: the machine cannot be measured, the model cannot be traced, or nothing fits.
    """
    from hocket.jobs import machine
    from hocket.probing.devices import visible_gpus

    request = job.request

    def legal(layout: Layout) -> Layout | None:
        try:
            links.checked_links(request.options, layout)
            found = validate_layout(job.source.dimensions, layout, request.workload)
        except HocketError:
            return None
        if request.ranks is not None and found.world_size > request.ranks:
            return None
        size = request.workload.global_batch // found.dp // (found.microbatches or 1)
        return found if request.micro_batch_size in (None, size) else None

    unmeasured = request.cluster in (NONE, AUTO) and machine.kept(request.options.device) is None
    if unmeasured and request.ranks is not None and not on_cuda(request.options):
        layout = elastic.unmeasured_layout(job, request.ranks)
        record.note(
            f"layout {layout}, for {request.ranks} ranks; hocket probe measures this machine"
        )
        return (Forecast.none(str(layout), UNMEASURED), None), prepare.job_in_layout(job, layout)
    if "layout" not in request.given and unmeasured:
        layout = by_catalogue(job, request.ranks or visible_gpus(), legal)
        record.note(f"layout {layout}, by the catalogue's figures of its GPUs; --layout chooses")
        return (Forecast.none(str(layout), UNMEASURED), None), prepare.job_in_layout(job, layout)
    cluster = AUTO if request.cluster == NONE else request.cluster
    if cluster == AUTO and machine.kept(request.options.device) is None:
        record.note(
            f"measuring this machine, once: up to {LONGEST:.0f} s; hocket probe measures more"
        )
    found = machine.named_cluster(
        cluster, device=request.options.device, on_event=lambda event: _phase(record, event)
    )
    assert found.measured is not None  # `reject_cluster`
    spec = prepare.job_spec(job.source, request, request.layout, config, "train")
    if request.options.emulate_links is not None and launcher is not None:
        # As many ranks as are weighed at most: how slow they are decides how slow the links are.
        most = max(curve.world for curve in found.measured.curves)
        alike = dataclasses.replace(spec, layout=Layout(tp=most))
        felt = links.settled(launcher, alike).options.emulate_links
        spec = dataclasses.replace(
            spec, options=dataclasses.replace(spec.options, emulate_links=felt)
        )
    record.phase("choosing a layout")
    told = forecast.best_forecast(
        spec, found.measured, request.given, legal=legal, launcher=launcher
    )
    for line in forecast_reasons(told[0]):
        record.note(line)
    return told, prepare.job_in_layout(job, Layout.parse(told[0].layout))


def by_catalogue(
    job: prepare.PreparedJob, num_gpus: int, legal: Callable[[Layout], Layout | None]
) -> Layout:
    """The best layout of all GPUs of this machine by the planner's constants, which needs no
    measurement; data parallel under ZeRO-1 where the catalogue does not have the GPU.

    Raises:
        LayoutError: nothing fits, or neither divides the batch.
    """
    from hocket.jobs.plan import plan_training
    from hocket.jobs.rehearsal_fit import gpu_here

    request, gpu = job.request, gpu_here()
    workload, options = request.workload, request.options
    pins = {
        name: getattr(request.layout, name)
        for name in sorted(request.given & {"schedule", "microbatches"})
    }
    if gpu is not None and workload.dtype != "fp32":
        found = plan_training(
            request.model,
            cluster=f"{num_gpus}x{gpu}",
            seq_len=workload.seq_len,
            global_batch=workload.global_batch,
            precision=workload.dtype,
            pin=pins,
            top=PROPOSED,
            lora_rank=options.lora_rank,
            lora_targets=options.lora_targets,
            quantize_base=options.quantize_base,
        )
        for one in found.layouts:
            layout = legal(one.layout) if one.fits else None
            if layout is not None:
                return layout
    plain = Layout(dp=num_gpus, zero=1, microbatches=request.layout.microbatches)
    return validate_layout(job.source.dimensions, plain, workload)


def before(
    folder: RunFolder,
    spec: RunSpec,
    record: JobRecorder,
    *,
    cluster: str = AUTO,
    launcher: Launcher | None = None,
) -> None:
    """Foretell a run that is about to start, unless that has been done or has to wait."""
    if cluster == NONE:
        forecast.write_forecast(folder, (Forecast.none(str(spec.layout), "--cluster none"), None))
        return
    told = forecast.read_forecast(folder)
    if told is not None and told[0].known and told[0].layout == str(spec.layout):
        return  # by whoever chose the layout, or an earlier start
    measured = forecast.measurements(cluster, spec.options.device)
    if measured is None:
        _untold(folder, spec, UNMEASURED)
        record.note(
            "no prediction: this machine has not been measured; hocket probe --quick does it in "
            f"up to {LONGEST:.0f} s"
        )
        return
    told = forecast.predicted_run(spec, measured, launcher=launcher, weighed=WEIGHED)
    forecast.write_forecast(folder, told)
    if told[0].known:
        record.note("predicted: " + forecast_line(told[0]))


def forecast_reasons(found: Forecast) -> list[str]:
    """What was chosen among what, and why, in sentences."""
    lines = [f"layout {found.layout}: {forecast_line(found)}"]
    others = [one for one in found.alternatives if not one.chosen]
    close = next((one for one in others if one.fits), None)
    if close is not None:
        slower = close.step_seconds / found.step_seconds - 1
        lines.append(
            f"next of the {len(found.alternatives)} best is {close.layout}, "
            + (f"{slower:.0%} slower" if slower >= 0.005 else "as fast")
        )
    plain = next((one for one in found.alternatives if one.layout.startswith("dp1")), None)
    if plain is not None and not plain.chosen:
        gain = plain.step_seconds / found.step_seconds
        lines.append(
            f"one process would take {gain:.2g} times as long"
            if gain > 1.005
            else "one process would be as fast"
            if gain > 0.995
            else f"one process would be {1 / gain - 1:.0%} faster"
            + ("" if plain.fits else ", but does not fit")
        )
    for name, seconds in found.exposed.items():
        if seconds > 0.05 * found.step_seconds:
            lines.append(
                f"{seconds / found.step_seconds:.0%} of a step is communication over {name}"
            )
    return lines


def forecast_line(found: Forecast) -> str:
    """Step time, rate, peak memory and idle share as one line."""
    text = f"{format_seconds(found.step_seconds)}/step, {found.tokens_per_second:,.0f} tokens/s, "
    text += f"{format_bytes(max(found.peak_bytes))} on the peak rank"
    return text + (f", idle {found.bubble:.0%} of the pipeline" if found.bubble > 0.005 else "")


def _untold(folder: RunFolder, spec: RunSpec, why: str) -> None:
    forecast.write_forecast(folder, (Forecast.none(str(spec.layout), why), None))


def _phase(record: JobRecorder, event: dict[str, Any]) -> None:
    if event["event"] == "phase":
        record.phase(event["name"])
