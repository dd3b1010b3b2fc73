"""`hocket train --dry-run`: a job decided, its first batch decoded, its ranks rehearsed.

request -> defaults, layout, schedule -> rehearsal on fake GPUs: completes? fits?
        -> data tokenized into a folder that is deleted -> the first sequence, and where loss falls
        -> time of a step by the planner's constants -> duration and price of the run
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from typing import TYPE_CHECKING, Any

from hocket.jobs import defaults, forecast, forecast_policy, memory, prepare, rehearsal_fit
from hocket.spec.errors import HocketError
from hocket.spec.run import RunFolder, RunSpec
from hocket.spec.units import format_seconds

if TYPE_CHECKING:
    from hocket.jobs.record import JobRecorder
    from hocket.jobs.rehearsal_workers import RehearsalWorkers
    from hocket.jobs.rehearse import Rehearsed
    from hocket.jobs.request import JobRequest
    from hocket.spec.forecast import Forecast

SHOWN = 240
"""Tokens of the first sequence that are decoded."""
NODE = 8
"""GPUs of a node that a job is predicted for where it takes more than one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FirstSequence:
    """The beginning of the first sequence of the first batch.

    Attributes:
        pieces: runs of tokens as text, and whether the loss falls on them.
        tokens, learned: of the whole sequence.
    """

    pieces: tuple[tuple[str, bool], ...]
    tokens: int
    learned: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Duration:
    """How long a run takes by the planner's constants, and its price.

    Attributes:
        step_seconds: of one step; `low` and `high` bound 90% of published runs.
        seconds: of all steps.
        dollars: of all steps, None without a price of the GPU. source: of the price.
    """

    step_seconds: float
    low: float
    high: float
    seconds: float
    dollars: float | None
    source: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class DryRun:
    """A job as it would be run.

    Attributes:
        rehearsed: its ranks, executed on fake GPUs.
        task: what it does with its weights, and the options that follow from that.
        options: every option by its flag's name, resolved.
        data: tokens and documents; empty where no data was named.
        sequence: None where no data was named.
        duration: on the rehearsed GPUs; None where `reason` gives why it is not predicted.
        here: on this machine, as probed; None where it has GPUs or was not probed.
    """

    rehearsed: Rehearsed
    task: str
    options: dict[str, Any]
    data: str = ""
    sequence: FirstSequence | None = None
    duration: Duration | None = None
    reason: str = ""
    here: Forecast | None = None

    def to_json(self) -> dict[str, Any]:
        """The keys of a rehearsal's report, and these."""
        report = json.loads(self.rehearsed.report.to_json())
        own = {
            "task": self.task,
            "options": self.options,
            "data": self.data,
            "first_sequence": None if self.sequence is None else dataclasses.asdict(self.sequence),
            "duration": None if self.duration is None else dataclasses.asdict(self.duration),
            "here": None if self.here is None else json.loads(self.here.to_json()),
        }
        return {**report, **own}


def dry_run(request: JobRequest, record: JobRecorder) -> DryRun:
    """Decide a job and rehearse it, without ranks.

    Raises:
        HocketError: whatever `hocket train` rejects before ranks start; the job does not complete,
            or does not fit a GPU.
    """
    from hocket.jobs.rehearsal_workers import RehearsalWorkers

    # The processes import torch while the data are tokenized.
    with RehearsalWorkers(None if request.auto else request.layout.world_size) as workers:
        return _dry_run(request, record, workers)


def _dry_run(request: JobRequest, record: JobRecorder, workers: RehearsalWorkers) -> DryRun:
    from hocket.jobs.rehearse import GPU, prepare_rehearsal, rehearse_job
    from hocket.models.source import resolve_model

    data, sequence, config = "", None, None
    gpu = rehearsal_fit.gpu_here() or GPU
    if request.data:
        job = prepare.prepare_job(request, any_size=True)
        job, data, sequence, config = _first_sequence(job, record)
        request, source = job.request, job.source
    else:
        source = resolve_model(
            request.model, trust_remote_code=request.options.trust_remote_code, weights=False
        )
        request = defaults.with_length(defaults.with_dtype(request), source)
        request = defaults.with_rates(defaults.with_batch(request), source)
    record.phase(f"rehearsing on fake {gpu} GPUs")
    planned = prepare_rehearsal(request, gpu=gpu, config=config)
    if "microbatches" not in request.given:
        layout = memory.accumulated(planned.spec, planned.device.memory)
        planned = prepare_rehearsal(
            dataclasses.replace(request, layout=layout), gpu=gpu, config=config
        )
    found = rehearse_job(planned, on_phase=record.phase, workers=workers)
    rehearsal_fit.require_fit(found)
    spec = found.job.spec
    duration, reason = None, ""
    try:
        duration = _duration(found, gpu)
    except HocketError as error:
        reason = error.message
    options = {**dataclasses.asdict(spec.workload), **dataclasses.asdict(request.options)}
    return DryRun(
        rehearsed=found,
        task=defaults.defaults_note(request, source),
        options={"model": request.model, "layout": str(spec.layout), **options},
        data=data,
        sequence=sequence,
        duration=duration,
        reason=reason,
        here=_here(spec),
    )


def _here(spec: RunSpec) -> Forecast | None:
    """What the ranks would take on this machine's cores, if those would run them."""
    if rehearsal_fit.gpu_here() is not None:
        return None
    options = dataclasses.replace(spec.options, device="cpu", backend="auto")
    found = forecast.forecast_run(dataclasses.replace(spec, options=options))
    return found if found.known else None


def _first_sequence(
    job: prepare.PreparedJob, record: JobRecorder
) -> tuple[prepare.PreparedJob, str, FirstSequence, dict[str, Any]]:
    """Tokenize the data aside, and decode the beginning of what rank 0 reads first; the job and
    the model's configuration as they fit the data."""
    from hocket.training.dataset import IGNORED, open_dataset
    from hocket.training.token_manifest import TRAIN
    from hocket.training.windowed import windows_made

    with tempfile.TemporaryDirectory(prefix="hocket-dry-run-") as folder:
        aside = RunFolder(folder)
        found = prepare.tokenized(job, aside, record)
        words, seed = found.words, job.request.options.seed
        length = job.request.workload.seq_len
        with windows_made(aside, found.job.request):
            batch = open_dataset(aside.data, TRAIN, found.tokens, length, seed).batch([0])
        ids, labels = batch.ids[0], batch.labels[0]
        # Loss falls on the token that follows: token k is learned where label k - 1 is not ignored.
        learned = [False, *(bool(label != IGNORED) for label in labels[:-1])]
        pieces: list[tuple[str, bool]] = []
        start = 0
        shown = min(SHOWN, len(ids))
        for at in range(1, shown + 1):
            if at == shown or learned[at] != learned[start]:
                pieces.append((words.decode(ids[start:at], special=True), learned[start]))
                start = at
        counted = int((labels != IGNORED).sum())
    sequence = FirstSequence(pieces=tuple(pieces), tokens=len(ids), learned=counted)
    return found.job, "\n".join(found.notes), sequence, found.config


def _duration(found: Rehearsed, gpu: str) -> Duration:
    """By the planner. Raises HocketError where it does not predict the layout."""
    from hocket.jobs.plan import plan_training

    spec = found.job.spec
    size, workload = spec.layout.world_size, spec.workload
    nodes = -(-size // NODE)
    planned = plan_training(
        spec.model,
        cluster=f"{nodes}x{NODE}x{gpu}" if nodes > 1 else f"{size}x{gpu}",
        seq_len=workload.seq_len,
        global_batch=workload.global_batch,
        layout=spec.layout,
        precision=workload.dtype,
        lora_rank=spec.options.lora_rank,
        lora_targets=spec.options.lora_targets,
        quantize_base=spec.options.quantize_base,
        optimizer=spec.options.optimizer,
    )
    step, steps = planned.best.step_seconds, spec.options.steps
    assert planned.problem is not None
    device = planned.problem.cluster.node.gpu
    hours = step.median * steps / 3600
    return Duration(
        step_seconds=step.median,
        low=step.low,
        high=step.high,
        seconds=step.median * steps,
        dollars=None if device.price is None else device.price * size * hours,
        source=device.price_source,
    )


def dry_run_text(found: DryRun) -> str:
    from hocket.jobs.rehearsal_text import rehearsal_report as rehearsed

    spec = found.rehearsed.job.spec
    layout, workload = spec.layout, spec.workload
    size = workload.global_batch // layout.dp // (layout.microbatches or 1)
    parts = [
        f"{spec.model}: {found.task}\n"
        f"global batch {workload.global_batch} = dp {layout.dp} x "
        f"microbatches {layout.microbatches} x micro batch {size}; sequences of "
        f"{workload.seq_len} tokens\n"
        f"steps: {spec.options.steps}; checkpoints: {_saves(spec.options.save_every)}"
    ]
    if found.sequence is not None:
        parts.append(f"data: {found.data}\n{_sequence_text(found.sequence)}")
    parts.append(rehearsed(found.rehearsed))
    parts.append(_duration_text(found))
    if found.here is not None:
        steps = spec.options.steps
        seconds = format_seconds(found.here.step_seconds * steps)
        parts[-1] += (
            f"\non this machine: {forecast_policy.forecast_line(found.here)}; {seconds} for "
            f"{steps} steps"
        )
    return "\n\n".join(parts)


def _saves(every: int | str) -> str:
    if every == 0:
        return "none"
    return f"every {every}{' steps' * isinstance(every, int)}, and at the end"


def _sequence_text(sequence: FirstSequence) -> str:
    head = (
        f"first sequence: loss on {sequence.learned} of {sequence.tokens} tokens "
        "(+: with loss, -: without)"
    )
    lines = [
        f"  {'+' if learned else '-'} {line}"
        for text, learned in sequence.pieces
        for line in text.split("\n")
    ]
    return "\n".join([head, *lines])


def _duration_text(found: DryRun) -> str:
    one = found.duration
    if one is None:
        return f"time: not predicted: {found.reason}"
    steps = found.rehearsed.job.spec.options.steps
    line = (
        f"time: {format_seconds(one.step_seconds)}/step ({format_seconds(one.low)} to "
        f"{format_seconds(one.high)}), {format_seconds(one.seconds)} for {steps} steps"
    )
    if one.dollars is None:
        return line
    price = f"${one.dollars:,.2f}" if one.dollars >= 0.01 else "$0.01 or less"
    return f"{line}\nprice: {price} ({one.source})"
