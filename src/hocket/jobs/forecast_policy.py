"""When a run is predicted, and what is printed of it.

    --layout auto     on CPU cores the machine is measured if it was not (once, some seconds); a
                      layout is chosen, the reasons are printed, and the run starts
    --layout given    predicted before the first step, which takes milliseconds; on CPU cores that
                      were not measured, the run starts without, and names the command
    --cluster none    nothing is predicted

On GPUs the planner predicts, whether or not they were probed (`jobs.gpu_run`). A run of another
launcher's ranks is predicted likewise, on CPU cores where they were measured before.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hocket.jobs import elastic, forecast, gpu_run, links, prepare
from hocket.jobs.precision import on_cuda
from hocket.jobs.validate import validate_layout
from hocket.spec.errors import HocketError, OptionError
from hocket.spec.forecast import Forecast
from hocket.spec.layout import Layout
from hocket.spec.run import RunFolder, RunSpec, TrainOptions
from hocket.spec.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from hocket.jobs.record import JobRecorder
    from hocket.launch import Launcher

NONE, AUTO = "none", "auto"
"""Clusters that are not files: no prediction; this machine, as it was measured."""

CONSIDERED = 8
"""Layouts that are compared with one that was given."""

UNMEASURED = "this machine was not measured before the run: hocket probe"

LONGEST = 20.0
"""Seconds that the quick probe takes at most on two cores."""


def reject_cluster(cluster: str, options: TrainOptions) -> None:
    """Reject a cluster that a run with these options cannot be predicted for.

    Raises:
        OptionError: no such file or name, nonsense in it, measurements of devices that are not on
            this machine (of an elastic run, all of them), or for a run on CPU none at all.
    """
    if cluster in (NONE, AUTO):
        return
    from hocket.jobs import machine

    found = machine.named_cluster(cluster)
    if on_cuda(options):
        gpu_run.require_gpus(found, cluster)
    elif found.measured is None:
        raise OptionError(
            f"cluster {cluster} contains no measurements: a run on this machine is predicted from "
            "what was measured here",
            hint="--cluster auto, or a file that hocket probe --out FILE wrote",
        )
    machine.require_here(found, ranks=elastic.visible(options) if options.elastic else None)


def auto_layout(
    job: prepare.PreparedJob,
    config: dict[str, Any],
    record: JobRecorder,
    *,
    launcher: Launcher | None = None,
) -> tuple[forecast.StepForecast, prepare.PreparedJob]:
    """The layout for `--layout auto`: its forecast, and the job in it. Says what and why.

    Raises:
        HocketError: the machine cannot be measured, the model cannot be traced, or nothing fits.
    """
    predicted, chosen = _chosen(job, config, record, launcher)
    ranks = job.request.ranks
    if ranks is not None and (fewer := elastic.unused_ranks(job, predicted[0], ranks)):
        record.note(fewer)
    return predicted, chosen


def _chosen(
    job: prepare.PreparedJob,
    config: dict[str, Any],
    record: JobRecorder,
    launcher: Launcher | None,
) -> tuple[forecast.StepForecast, prepare.PreparedJob]:
    from hocket.jobs import machine

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

    spec = prepare.job_spec(job.source, request, request.layout, config, "train")
    if on_cuda(request.options):
        return _on_gpus(job, spec, record, legal, launcher)
    why = ""
    if threads := forecast.unmeasured_threads(request.options):
        why = f"{threads} was not measured here"
        if request.ranks is None:
            raise unchosen(threads)
    elif request.cluster in (NONE, AUTO) and machine.kept(request.options.device) is None:
        why = UNMEASURED
    if why and request.ranks is not None:
        layout = elastic.unmeasured_layout(job, request.ranks)
        record.note(f"layout {layout}, for a world of {request.ranks}; {why}")
        return (Forecast.none(str(layout), why), None), prepare.job_in_layout(job, layout)
    cluster = AUTO if request.cluster == NONE else request.cluster
    if cluster == AUTO and machine.kept(request.options.device) is None:
        record.note(
            f"measuring this machine, once: up to {LONGEST:.0f} s; hocket probe measures more"
        )
    found = machine.named_cluster(
        cluster, device=request.options.device, on_event=lambda event: _phase(record, event)
    )
    assert found.measured is not None  # `reject_cluster`
    if request.options.emulate_links is not None and launcher is not None:
        # As many ranks as are considered at most: how slow they are decides how slow the links are.
        most = max(curve.world for curve in found.measured.curves)
        widest = dataclasses.replace(spec, layout=Layout(tp=most))
        emulated = links.settled(launcher, widest).options.emulate_links
        spec = dataclasses.replace(
            spec, options=dataclasses.replace(spec.options, emulate_links=emulated)
        )
    record.phase("choosing a layout")
    predicted = forecast.best_forecast(
        spec, found.measured, request.given, legal=legal, launcher=launcher
    )
    for line in forecast_reasons(predicted[0]):
        record.note(line)
    return predicted, prepare.job_in_layout(job, Layout.parse(predicted[0].layout))


def unchosen(threads: str) -> OptionError:
    """`--layout auto` for `forecast.unmeasured_threads`."""
    return OptionError(
        f"--layout auto compares predictions, and {threads} was not measured here: hocket probe "
        "measures ranks of one thread",
        hint="--layout dp2, or leave --threads out",
    )


def _on_gpus(
    job: prepare.PreparedJob,
    spec: RunSpec,
    record: JobRecorder,
    legal: Callable[[Layout], Layout | None],
    launcher: Launcher | None,
) -> tuple[forecast.StepForecast, prepare.PreparedJob]:
    """The planner's layout for the GPUs of this run; data parallel under ZeRO-1 where nothing is
    known of them.

    Raises:
        HocketError: nothing fits, the GPU has no such precision, or they do not divide the batch.
    """
    from hocket.probing.devices import visible_gpus

    request = job.request
    cluster = AUTO if request.cluster == NONE else request.cluster
    gpus = gpu_run.gpu_cluster(cluster, exactly=request.ranks)
    if gpus is None:
        count = request.ranks or visible_gpus()
        if request.ranks is not None:
            layout = elastic.unmeasured_layout(job, count)
        else:
            plain = Layout(dp=count, zero=1, microbatches=request.layout.microbatches)
            layout = validate_layout(job.source.dimensions, plain, request.workload)
        record.note(f"layout {layout}: {forecast.UNKNOWN_GPU}; --layout chooses")
        found: forecast.StepForecast = (Forecast.none(str(layout), forecast.UNKNOWN_GPU), None)
        return found, prepare.job_in_layout(job, layout)
    record.phase("choosing a layout")
    found = gpu_run.best_gpu_layout(
        spec, gpus, request.given,
        micro_batch_size=request.micro_batch_size, legal=legal, launcher=launcher,
        considered=CONSIDERED,
    )  # fmt: skip
    for line in forecast_reasons(found[0]):
        record.note(line)
    return found, prepare.job_in_layout(job, Layout.parse(found[0].layout))


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
    predicted = forecast.read_forecast(folder)
    if predicted is not None and predicted[0].known and predicted[0].layout == str(spec.layout):
        return  # by the choice of the layout, or an earlier start
    target = forecast.run_target(spec, cluster)
    if target is None and not on_cuda(spec.options):
        _write_reason(folder, spec, UNMEASURED)
        record.note(
            "no prediction: this machine has not been measured; hocket probe --quick does it in "
            f"up to {LONGEST:.0f} s"
        )
        return
    predicted = forecast.predicted_run(spec, target, launcher=launcher, considered=CONSIDERED)
    forecast.write_forecast(folder, predicted)
    if predicted[0].known:
        record.note("predicted: " + forecast_line(predicted[0]))


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
    text = f"{format_seconds(found.step_seconds)}/step"
    if found.step_range:
        text += " (80% within {} to {})".format(*map(format_seconds, found.step_range))
    text += f", {found.tokens_per_second:,.0f} tokens/s, "
    text += f"{format_bytes(max(found.peak_bytes))} on the peak rank"
    return text + (f", ranks idle {found.bubble:.0%}" if found.bubble > 0.005 else "")


def _write_reason(folder: RunFolder, spec: RunSpec, why: str) -> None:
    forecast.write_forecast(folder, (Forecast.none(str(spec.layout), why), None))


def _phase(record: JobRecorder, event: dict[str, Any]) -> None:
    if event["event"] == "phase":
        record.phase(event["name"])
