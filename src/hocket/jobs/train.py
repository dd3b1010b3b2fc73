"""The training job: checked, prepared, launched, summed up.

    plan -> launcher warms up  |  data tokenized -> run.json, schedule.txt -> ranks -> Summary
                  (at the same time)

Under torchrun or Slurm this process is one rank of a world that exists already: rank 0 prepares
the run folder, the others wait for it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hocket.jobs import (
    adapters,
    copies,
    defaults,
    elastic,
    forecast,
    forecast_policy,
    ledger,
    links,
    lock,
    memory,
    precision,
    prepare,
    report,
    restart,
    resume,
    topology,
    upload,
)
from hocket.jobs.background_load import BackgroundLoad
from hocket.jobs.record import JobRecorder, Listener, Summary
from hocket.jobs.request import JobRequest
from hocket.spec.errors import HocketError, RunFolderError
from hocket.spec.files import write_text
from hocket.spec.layout import TERMS, Layout
from hocket.spec.ledger import DISTURBED
from hocket.spec.run import RunFolder, RunSpec, TrainOptions

if TYPE_CHECKING:
    from hocket.launch import Launcher, RankContext

ENTRY = "hocket.training.rank:main"
STARTUP = 300.0
"""Seconds until the first word of a rank: imports, and building a large model."""


def train_model(
    request: JobRequest,
    *,
    on_event: Listener | None = None,
    faults: Sequence[Mapping[str, Any]] = (),
    launcher: Launcher | None = None,
) -> Summary:
    """Run one training job to its end.

    Args:
        request: what was asked for; see `jobs.request`.
        on_event: called with each event: `phase`, `step`, `eval`, `saved`, `timeline`, `done`.
        faults: that ranks bring on themselves (`training.faults`), for tests and `hocket chaos`.
        launcher: a warm one, which stays open; None: one of this job's own.

    Raises:
        HocketError: what the user can mend, before any rank starts wherever it can be found there;
            RankFailure with the first failing rank's own traceback.
        KeyboardInterrupt: Ctrl-C; all ranks have been ended.
    """
    from hocket.launch import joined_context

    context = joined_context()
    record = JobRecorder(on_event)
    if context is not None:
        return _join(request, context, record)
    upload.fetch_run(request, record)
    request = resume.continued(request)
    if request.again and (rows := resume.finished(request)):
        return _finished(request, rows, record)
    if request.options.resume:
        with resume.folder_locked(request), resume.unresumed_is_as_it_was(request, record):
            found = resume.resume_job(request)
            options = found.job.request.options
            forecast_policy.reject_cluster(request.cluster, options)
            with _warm(launcher, options) as warm:
                spec = resumed(found, record, launcher=warm)
                summary = _launched(
                    warm, found.folder, spec, record, request,
                    wanted=found.spec.layout, left=found.job.request.ranks, faults=faults,
                )  # fmt: skip
        return _report(summary, request, record)
    forecast_policy.reject_cluster(request.cluster, request.options)
    if request.run is not None:
        lock.reject_locked(request.run)
    request = defaults.with_layout(request)
    job = prepare.prepare_job(request)
    folder = prepare.train_folder(request)
    with (
        lock.locked(folder.path, "train"),
        resume.unstarted_is_no_run(folder, fresh=request.run is None),
        _warm(launcher, request.options) as warm,
    ):
        spec = prepare_run(job, folder, record, launcher=warm)
        summary = _launched(
            warm, folder, spec, record, request, accumulate=_may_accumulate(job), faults=faults
        )
    return _report(summary, request, record)


def _launched(
    launcher: Launcher,
    folder: RunFolder,
    spec: RunSpec,
    record: JobRecorder,
    request: JobRequest,
    *,
    wanted: Layout | None = None,
    left: int | None = None,
    **more: Any,
) -> Summary:
    """`launch_ranks`, and with `--elastic` again on the devices that are left where one is gone,
    and on more where they are back. `wanted`, `left`: as of `elastic.Growth`."""
    again = dataclasses.replace(request, run=folder.path, again=True, auto=False)
    of_run = dataclasses.replace(request, options=spec.options)
    growth = elastic.Growth(launcher, of_run, wanted or spec.layout, left)
    if spec.options.elastic:
        record.watchers.append(growth.hear)
    with copies.own_copies(folder, spec.options):
        while True:
            try:
                summary = launch_ranks(
                    launcher, folder, spec, record, cluster=request.cluster, **more
                )
            except restart.DeviceGone as gone:
                record.note(f"{gone}, twice before a step: its device counts as gone")
                growth.lost(gone.ranks)
                found = resume.resume_job(dataclasses.replace(again, ranks=gone.ranks))
            else:
                if not (summary.stopped and growth.asked) or launcher.stop_asked:
                    return summary
                larger, count = growth.grown(again)
                record.stopped = False
                record.note(f"{count} devices are there: the run grows again")
                found = resume.resume_job(larger)
            spec, more["accumulate"] = resumed(found, record, launcher=launcher), False


def _warm(
    launcher: Launcher | None, options: TrainOptions
) -> contextlib.AbstractContextManager[Launcher]:
    from hocket.launch import Launcher as New

    if launcher is not None:
        return contextlib.nullcontext(launcher)
    return New(options.device, options.threads, preload=PRELOAD)


def _finished(request: JobRequest, rows: list[dict[str, Any]], record: JobRecorder) -> Summary:
    """What a run came to that has nothing left to do."""
    assert request.run is not None
    record.note(f"{request.run} is finished: {len(rows)} steps are done and the model is exported")
    record.steps = rows
    return record.summary(RunFolder(request.run))


def _report(summary: Summary, request: JobRequest, record: JobRecorder) -> Summary:
    """With the page of a run whose layout hocket chose."""
    if request.auto:
        summary.report = report.of_ended(summary.run, record.note)
    return summary


PRELOAD = ("hocket.training.rank", "hocket.runtime.shm", "hocket.models.conversion_rules")


def prepare_run(
    job: prepare.PreparedJob,
    folder: RunFolder,
    record: JobRecorder,
    command: str = "train",
    *,
    launcher: Launcher | None = None,
) -> RunSpec:
    """Tokenize, choose the layout if that was asked for, and write the run folder, telling of it.

    `launcher` may be asked to trace the model.
    """
    found = prepare.tokenized(job, folder, record)
    job, config = found.job, found.config
    for note in (defaults.defaults_note(job.request, job.source), *found.notes):
        record.note(note)
    if job.source.weights is not None:
        from hocket.models import weight_headers

        layers = job.source.dimensions.num_layers
        if untrained := weight_headers.untrained_layers(job.source.weights, layers):
            record.note(untrained)
    if not job.request.auto:
        if idle := defaults.idle_cores(job.request.options, job.layout.world_size):
            record.note(idle)
        return prepare.write_run(job, folder, config, command)
    predicted, job = forecast_policy.auto_layout(job, config, record, launcher=launcher)
    spec = prepare.write_run(job, folder, config, command)
    forecast.write_forecast(folder, predicted)
    return spec


def resumed(found: resume.Resumed, record: JobRecorder, *, launcher: Launcher) -> RunSpec:
    """Verify a run that goes on, choose its layout if that was asked for, and write it down."""
    from hocket.training.token_manifest import verify_tokens as verify_data

    record.phase("verifying data")
    remark = verify_data(found.folder.data, found.spec.workload.seq_len)
    if remark is not None:
        record.note(remark)
    if found.spec.options.lora_rank is not None:
        record.note(f"the frozen weights are those of {found.spec.weights}, as run.json names them")
    if not found.job.request.auto:
        return resume.write_resumed(found, record)
    predicted, job = forecast_policy.auto_layout(
        found.job, found.spec.config, record, launcher=launcher
    )
    spec = resume.write_resumed(dataclasses.replace(found, job=job), record)
    forecast.write_forecast(found.folder, predicted)
    return spec


def modeling_modules(config: Mapping[str, Any]) -> list[str]:
    """Where transformers keeps a model's family: imported once by the server, not by each rank."""
    from hocket.models.registry import modeling_module

    found = modeling_module(str(config.get("model_type")))
    return [] if found is None else [found]


def launch_ranks(
    launcher: Launcher,
    folder: RunFolder,
    spec: RunSpec,
    record: JobRecorder,
    *,
    cluster: str = "auto",
    accumulate: bool = False,
    faults: Sequence[Mapping[str, Any]] = (),
) -> Summary:
    """Run the ranks of a prepared run folder.

    Args:
        cluster: what the run is predicted for, see `jobs.forecast_policy.before`.
        accumulate: more microbatches are taken where the run fits only with them.
        faults: as of `train_model`.
    """
    from hocket.training.windowed import windows_made

    launcher.preload(modeling_modules(spec.config))
    _require(launcher, folder, spec, record)
    spec, predicted = _fitted(launcher, folder, spec, record, accumulate=accumulate)
    if spec.options.emulate_links is not None:
        spec = links.settle_links(launcher, folder, spec)
        record.note(f"emulated links: {spec.options.emulate_links}")
    forecast_policy.before(folder, spec, record, cluster=cluster, launcher=launcher)
    if disturbed := topology.keep(folder, cluster, spec.options.device):
        record.note(disturbed)
    remark = precision.precision_remark(spec)
    if remark is not None:
        record.note(remark)
    record.phase("starting ranks")
    background_load = BackgroundLoad()
    with upload.uploads(folder, spec, record), windows_made(folder, spec, record):
        restart.run_with_restarts(
            launcher,
            ENTRY,
            folder,
            spec,
            record,
            payload={**prepare.rank_payload(folder, spec), "faults": list(faults)},
            startup_timeout=max(STARTUP, spec.options.timeout),
            silence_timeout=spec.options.timeout,
        )
    disturbance = background_load.cores()
    with contextlib.suppress(OSError):  # it has ended well: a full disk cannot undo that
        write_text(folder.background_load_file, json.dumps({"cores": disturbance}))
    if disturbance > DISTURBED:
        record.note(
            f"other programs took {disturbance:.1f} cores while it ran: times are those of a busy "
            "machine, and the ledger marks them"
        )
    if predicted is not None and record.memory:
        record.note(memory.predicted_and_counted(predicted, record.memory))
    ledger.enter(folder.path, record.note, others=disturbance)
    return record.summary(folder)


def _require(launcher: Launcher, folder: RunFolder, spec: RunSpec, record: JobRecorder) -> None:
    """Refuse what only a look at the model itself can find."""
    verify_architecture(launcher, spec, record)
    prepare.require_weights(launcher, folder, spec)
    _adapt(launcher, folder, spec, record)


def _fitted(
    launcher: Launcher, folder: RunFolder, spec: RunSpec, record: JobRecorder, *, accumulate: bool
) -> tuple[RunSpec, list[dict[str, int]] | None]:
    """The run as it fits, and what each rank will hold, where that is limited."""
    if memory.allowed(spec) is None:
        return spec, None
    record.phase("predicting memory")
    asked = spec.layout.microbatches
    spec, rows = memory.fitted(launcher, folder, spec, accumulate=accumulate)
    if spec.layout.microbatches != asked:
        record.note(
            f"{spec.layout.microbatches} microbatches instead of {asked}, so that it fits the "
            "memory; gradients are accumulated over them"
        )
    return spec, rows


def _may_accumulate(job: prepare.PreparedJob) -> bool:
    """Whether the number of microbatches is hocket's to choose."""
    return not job.request.auto and "microbatches" not in job.request.given


def verify_architecture(launcher: Launcher, spec: RunSpec, record: JobRecorder) -> None:
    """Refuse an architecture that would compute something else when it is split."""
    from hocket.jobs.proxy import require_equal
    from hocket.models.source import run_source

    if spec.layout.num_stages > 1 or spec.layout.tp > 1:
        record.phase("checking that the architecture can be split")
    verdict = require_equal(
        launcher,
        run_source(spec),
        spec.layout,
        attention=spec.options.attention,
        packed=spec.options.packing == "documents",
    )
    if verdict.note and spec.layout.tp > 1:
        record.note(f"replicated on every rank of tp: {verdict.note}")


def _adapt(launcher: Launcher, folder: RunFolder, spec: RunSpec, record: JobRecorder) -> None:
    """Reject adapters that the model's layers cannot have; say how many there are."""
    layers = adapters.adapted_layers(launcher, spec, folder.schedule_file.read_text())
    if layers:
        record.note(f"LoRA of rank {spec.options.lora_rank} on {layers} frozen layers")


def _join(request: JobRequest, context: RankContext, record: JobRecorder) -> Summary:
    """Be one rank of a foreign launcher's world. The lock of the run folder is rank 0's."""
    from hocket.launch import end_with_launcher

    end_with_launcher()
    request = of_world(request, context.world_size)
    if context.rank > 0:
        return _run_joined(request, context, record, None)
    if context.world_size > 1:
        context.store(STARTUP)  # the other ranks see that this one lives, however long it prepares
    with contextlib.ExitStack() as stack:
        try:
            upload.fetch_run(request, record)
            request = resume.continued(request)
            if request.again and (rows := resume.finished(request)):
                if context.world_size > 1:
                    from hocket.launch import leave_together

                    context.store().set("hocket/prepared", json.dumps({"finished": True}))
                    leave_together(context)
                return _finished(request, rows, record)
            if request.options.resume:
                stack.enter_context(resume.folder_locked(request))
                stack.enter_context(resume.unresumed_is_as_it_was(request, record))
            folder = _prepare_joined(request, context.world_size, record, stack)
        except BaseException as error:  # whatever it is, the other ranks must not wait for it
            if context.world_size > 1:
                text = str(error) if isinstance(error, HocketError) else repr(error)
                context.store().set("hocket/prepared", json.dumps({"error": text}))
            raise
        if request.options.elastic and (note := elastic.shared_store_note(os.environ)):
            record.note(note)
        if context.world_size > 1:
            ready = {"run": str(folder.path.resolve())}
            context.store().set("hocket/prepared", json.dumps(ready))
        return _run_joined(request, context, record, folder)


def of_world(request: JobRequest, world_size: int) -> JobRequest:
    """Without a layout, data parallelism over the ranks that the launcher started, as torchrun's
    users expect; a resumed run has a layout."""
    if request.auto or request.options.resume or request.given & {"layout", *TERMS}:
        return request
    return dataclasses.replace(request, layout=dataclasses.replace(request.layout, dp=world_size))


def _run_joined(
    request: JobRequest, context: RankContext, record: JobRecorder, folder: RunFolder | None
) -> Summary:
    """Train as one rank of a foreign launcher's world; `folder` is prepared, or None: rank 0 of
    another process prepares it."""
    from hocket.launch import await_key, leave_together, leave_unused, run_joined
    from hocket.models.source import fetch_again
    from hocket.training.windowed import windows_made

    world, options = context.world_size, request.options
    if folder is None:
        # Whatever can be refused alone is refused at once; the data is rank 0's.
        if not (resume.continued(request).options.resume or options.elastic):
            prepare.prepare_job(request, world_size=world)
        ready = json.loads(await_key(context.store(STARTUP), "hocket/prepared"))
        if "finished" in ready:
            leave_together(context)
            return Summary(run=request.run or Path())
        if "error" in ready:
            raise HocketError(f"rank 0 rejected the job: {ready['error']}")
        folder = RunFolder(ready["run"])
        if not folder.spec_file.exists():
            raise RunFolderError(
                f"rank {context.rank} does not see {folder.path}, which rank 0 has written",
                hint="--run FOLDER on a file system that all machines share",
            )
    spec = folder.load(trust_remote_code=options.trust_remote_code)
    fetch_again(spec)  # of this host's cache, where it is another one than rank 0's
    options = spec.options  # those of the run, where it is resumed
    if context.rank >= spec.layout.world_size:  # --elastic: the layout has fewer ranks
        leave_unused()
        return Summary(run=folder.path)
    if context.rank > 0 and context.local_rank == 0 and not context.one_machine:
        # Rank 0 has verified what its host sees of the file system; this is another host.
        from hocket.training.token_manifest import verify_tokens as verify_data

        verify_data(folder.data, spec.workload.seq_len, adopt=False)
    uploading = upload.uploads(folder, spec, record)
    if context.local_rank == 0:
        copies.claim_copies(folder, options, copies.JOINED)
    with (
        resume.unstarted_is_no_run(folder, mine=context.rank == 0 and not options.resume),
        uploading if context.rank == 0 else contextlib.nullcontext(),
        windows_made(folder, spec, record, here=context.rank == 0),
    ):
        if context.rank == 0:
            unpredicted = request.cluster == forecast_policy.NONE
            cluster = forecast_policy.NONE if unpredicted else forecast_policy.AUTO
            forecast_policy.before(folder, spec, record, cluster=cluster)
            topology.keep(folder, cluster, options.device)
        run_joined(
            ENTRY,
            prepare.rank_payload(folder, spec),
            record if context.rank == 0 else None,
            threads=options.threads,
            device=options.device,
            world_size=spec.layout.world_size,
        )
    if context.local_rank == 0 and options.replicate_state:
        copies.release_copies(folder)
    if context.rank == 0:
        ledger.enter(folder.path, record.note)
    return record.summary(folder)


def _prepare_joined(
    request: JobRequest, world_size: int, record: JobRecorder, stack: contextlib.ExitStack
) -> RunFolder:
    """On rank 0 of a foreign launcher's world: the run folder, ready for its ranks, and locked
    until `stack` is closed."""
    from hocket.launch import Launcher

    threads = request.options.threads
    if request.options.resume:
        found = resume.resume_job(request, world_size=world_size)
        folder = found.folder
        with Launcher("cpu", threads) as launcher:
            spec = resumed(found, record, launcher=launcher)
            _require(launcher, folder, spec, record)
            _fitted(launcher, folder, spec, record, accumulate=False)
        return folder
    asked, fewer = (
        request.layout,
        elastic.ranks_there(request, request.options, request.layout, world_size),
    )
    if fewer is None:
        job = prepare.prepare_job(request, world_size=world_size)
    else:  # a host was lost before the first checkpoint, or has not come yet
        job = prepare.prepare_job(elastic.chosen_for(request, fewer))
        job = dataclasses.replace(job, layout=asked)
    folder = prepare.train_folder(request)
    stack.enter_context(lock.locked(folder.path, "train"))
    with Launcher("cpu", threads) as launcher:
        spec = prepare_run(job, folder, record)
        with resume.unstarted_is_no_run(folder):
            _require(launcher, folder, spec, record)
            _fitted(launcher, folder, spec, record, accumulate=_may_accumulate(job))
    return folder
