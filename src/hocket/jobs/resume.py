"""Resume: a run goes on from its newest checkpoint, in its own layout or in another.

    run.json, and of it what may change -> the layout: its own, a given one, or chosen again
        -> checked as a new run's is -> what was recorded in the layout before, to earlier/N
        -> run.json, schedule.txt

A text under `layout` is read as a new run's is: whole, what it leaves out is the default, and
microbatches are chosen. Fields without a text change those of the run's own layout. Batch, data
and their order are never asked for again, so that steps are those of the run on any layout.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hocket.jobs import elastic, forecast, lock, memory, prepare, report
from hocket.jobs.request import (
    LAYOUT_FIELDS,
    OPTION_FIELDS,
    WORKLOAD_FIELDS,
    JobRequest,
    check_options,
    check_workload,
)
from hocket.spec.checkpoint import resumable_checkpoints
from hocket.spec.errors import CheckpointError, HocketError, OptionError, RunFolderError
from hocket.spec.files import MALFORMED, parse_json, write_text
from hocket.spec.layout import TERMS, Layout
from hocket.spec.run import RunFolder, RunSpec
from hocket.spec.run_names import nearest_run
from hocket.spec.schedule import Schedule

if TYPE_CHECKING:
    from hocket.jobs.record import JobRecorder

CHANGEABLE = frozenset(
    {"steps", "epochs", "resume", "eval_every", "eval_batches", "save_every", "keep_checkpoints",
     "keep_every", "save_mode", "replicate_state", "upload", "elastic",
     "log_interval", "timeline_step", "timeline_steps", "device", "backend", "threads",
     "bucket_mb", "compile", "tracker", "trust_remote_code", "timeout", "emulate_links",
     "memory_per_rank", "max_restarts", "grace_seconds", "replica_check_every", "on_divergence",
     "max_skipped_steps", "max_corrupt_records", "verify_every",
     "slow_rank_factor"}
)  # fmt: skip
"""Options that a run may go on with otherwise: none changes what its steps compute."""


_COMMIT = re.compile(r"[0-9a-f]{7,40}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Resumed:
    """A run that may go on. Nothing is written yet.

    Attributes:
        folder, spec: the run, and what run.json says of it.
        job: with what it goes on; where hocket is to choose the layout, in one rank's as yet.
        step: of the newest checkpoint, by its name.
    """

    folder: RunFolder
    spec: RunSpec
    job: prepare.PreparedJob
    step: int


def continued(request: JobRequest) -> JobRequest:
    """The job as one that continues its run, where the run folder holds that run already: so the
    same command starts a run, continues it, and reports that it is finished.

    Raises:
        RunFolderError: the folder holds a run of another model or of other data.
        CheckpointError: an option would change what the run computes.
    """
    if request.run is None or request.options.resume:
        return request
    folder = RunFolder(request.run)
    try:
        spec = folder.load(trust_remote_code=request.options.trust_remote_code)
    except HocketError:  # not a run; `prepare.train_folder` rejects what cannot be used
        return request
    if spec.command != "train":
        return request
    for name, asked, stored in (
        ("model", (_model(request, folder),), (spec.model,)),
        ("data", _pinned(request.data), spec.data),
        ("eval_data", _pinned(request.eval_data), spec.eval_data),
    ):
        same = len(asked) == len(stored) and all(map(_same_source, asked, stored))
        if asked and asked[0] and not same:
            raise RunFolderError(
                f"{folder.path} already holds a run of the {name} {', '.join(stored)}, not of "
                f"{', '.join(asked)}",
                hint=f"--run {prepare.free_name(folder.path)}",
            )
    _unchanged(request, folder, spec)
    given = request.given
    if request.auto:  # it was chosen when the run began
        given = given - {"layout", *LAYOUT_FIELDS}
    options = dataclasses.replace(request.options, resume=True)
    return dataclasses.replace(request, options=options, again=True, auto=False, given=given)


def _same_source(asked: str, stored: str) -> bool:
    """Whether data, or a model, is the stored one, and a repository at the stored commit. `main`,
    and a branch or tag that this machine has not resolved, count as that commit."""
    from hocket.models import repo_id
    from hocket.training import hub_data
    from hocket.training.mixture import unweighted

    (asked, weight), (stored, stored_weight) = unweighted(asked), unweighted(stored)
    there, wanted = hub_data.parse_data(stored), hub_data.parse_data(asked)
    if there is None or wanted is None or there.repo.commit is None:
        return (asked, weight) == (stored, stored_weight)
    subset = there.subset if wanted.subset is None else wanted.subset
    if dataclasses.replace(wanted, repo=there.repo, subset=subset) != there:
        return False
    repo, revision = wanted.repo, wanted.repo.revision or "main"
    if weight != stored_weight or repo.id != there.repo.id:
        return False
    commit = "" if revision == "main" or not _COMMIT.fullmatch(revision) else revision
    if revision != "main":
        for kind in (repo_id.MODEL, repo_id.DATASET):
            ref = repo_id.storage(dataclasses.replace(repo, kind=kind)) / "refs" / revision
            if ref.is_file():
                commit = ref.read_text().strip()
    return there.repo.commit.startswith(commit)


def _unchanged(request: JobRequest, folder: RunFolder, spec: RunSpec) -> None:
    """Raise CheckpointError for an option that would change what the run computes."""
    asked, held = _fields(request), _fields(spec)
    for name in sorted(request.given & asked.keys() - CHANGEABLE):
        if asked[name] != held[name]:
            raise CheckpointError(
                f"{name} is {asked[name]}; the run in {folder.path} was started with "
                f"{held[name]}, and this would change what it computes",
                hint=f"leave --{name.replace('_', '-')} out, or start a new run",
            )


def _model(request: JobRequest, folder: RunFolder) -> str:
    """The model as run.json names it; empty where it is that of the run folder."""
    path = Path(request.model).expanduser()
    if path.exists() and path.resolve() == folder.path.resolve():
        return ""
    return str(path.resolve()) if path.exists() else request.model


def _pinned(given: tuple[str, ...]) -> tuple[str, ...]:
    from hocket.training import data_paths

    return tuple(data_paths.local_path(path) for path in data_paths.expanded_paths(given))


def _steps(request: JobRequest, folder: RunFolder, spec: RunSpec) -> int:
    """The steps of a run that goes on: as asked for, else its own."""
    if "epochs" in request.given and request.options.epochs is not None:
        from hocket.training.data import steps_of
        from hocket.training.token_manifest import Tokens

        workload = spec.workload
        return steps_of(
            Tokens.load(folder.data),
            request.options.epochs,
            seq_len=workload.seq_len,
            global_batch=workload.global_batch,
        )
    return request.options.steps if "steps" in request.given else spec.options.steps


def finished(request: JobRequest) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl of a run that has taken all its steps and exported its model after
    them; empty where there is something left to do."""
    if request.run is None:
        return []
    folder = RunFolder(request.run)
    spec = folder.load(trust_remote_code=request.options.trust_remote_code)
    steps = _steps(request, folder, spec)
    exported = folder.model if spec.options.lora_rank is None else folder.adapter
    try:
        rows = [parse_json(row) for row in folder.metrics_file.read_text().splitlines()]
        later = exported.stat().st_mtime >= folder.metrics_file.stat().st_mtime
        return rows if later and int(rows[-1]["step"]) >= steps else []
    except (OSError, *MALFORMED, IndexError):
        return []


def resume_job(request: JobRequest, *, world_size: int | None = None) -> Resumed:
    """Check a resume as `prepare.prepare_job` checks a new run.

    Args:
        world_size: ranks that a launcher has started, None where hocket starts its own.

    Raises:
        RunFolderError: no run is there.
        CheckpointError: it has no checkpoint, no step is left to take, or an option was given that
            would change what the run computes.
        HocketError: the layout does not fit, or this machine cannot have what the run asks for.
    """
    from hocket.models.source import fetch_again, require_own_base, run_source

    if request.run is None:
        if "/" in request.model and Path(request.model).parent.is_dir():
            RunFolder(request.model).load()  # names the runs that are there
        raise OptionError(
            "--resume continues a run, and none was named", hint="hocket train --run RUN --resume"
        )
    folder = RunFolder(request.run)
    near = nearest_run(folder.path) or ""
    if request.data and not folder.spec_file.exists() and not near.startswith("did you mean"):
        raise RunFolderError(f"{folder.path} holds no run to resume", hint="leave --resume out")
    spec = folder.load(trust_remote_code=request.options.trust_remote_code)
    has = any(folder.checkpoints.glob("step-*"))
    if not has and not request.again:
        raise CheckpointError(
            f"{folder.path} holds no checkpoint to resume from",
            hint=f"--run {prepare.free_name(folder.path)}, with --save-every to have some",
        )
    _unchanged(request, folder, spec)
    step = next((int(p.name.split("-")[1]) for p in resumable_checkpoints(folder.checkpoints)), 0)
    steps = _steps(request, folder, spec)
    if steps < step:
        raise CheckpointError(
            f"steps is {steps}; the run in {folder.path} holds a checkpoint of step {step}",
            hint=f"--steps {max(step, spec.options.steps)}",
        )
    _streamed_so_far(folder, spec, steps)
    changed = {name: getattr(request.options, name) for name in request.given & CHANGEABLE}
    options = dataclasses.replace(spec.options, **{**changed, "steps": steps, "resume": has})
    check_workload(spec.workload)
    check_options(options)
    prepare.device_checked(options)
    prepare.choice_checked(request, world_size)
    elastic.checked(options, world_size)
    memory.reject_memory_limit(options)
    own = dataclasses.replace(
        request,
        model=spec.model,
        data=spec.data,
        eval_data=spec.eval_data,
        workload=spec.workload,
        options=options,
    )
    layout = spec.layout if request.auto else _layout(request, spec.layout)
    fixed = None if request.auto or options.elastic else layout
    memory.reject_untrainable(run_source(spec), spec.workload, options, fixed)
    fetch_again(spec)
    require_own_base(folder, spec)
    unsplit = Layout(microbatches=1)
    job = prepare.PreparedJob(
        request=own, source=run_source(spec), layout=unsplit, schedule=prepare.scheduled(unsplit)
    )
    ranks = elastic.ranks_there(request, options, layout, world_size)
    if ranks is not None:
        job = dataclasses.replace(job, request=elastic.chosen_for(own, ranks), layout=layout)
    elif not request.auto:
        kept = _schedule(folder, layout) if layout == spec.layout else None
        job = prepare.job_in_layout(job, layout, world_size=world_size, schedule=kept)
    if ranks is None and (request.auto or job.layout != spec.layout) and steps == step:
        raise CheckpointError(
            f"the run in {folder.path} has taken all of its {steps} steps: there are none to take "
            "in another layout",
            hint=f"--steps {2 * steps}, or hocket export {folder.path} --to DIR",
        )
    return Resumed(folder=folder, spec=spec, job=job, step=step)


def _streamed_so_far(folder: RunFolder, spec: RunSpec, steps: int) -> None:
    """Raise CheckpointError where steps would repeat data that was streamed as far as the run's
    own steps took it."""
    from hocket.training.data import num_samples
    from hocket.training.token_manifest import MANIFEST, Tokens

    if steps <= spec.options.steps or not (folder.data / MANIFEST).is_file():
        return
    tokens, workload = Tokens.load(folder.data), spec.workload
    there = num_samples(tokens.train_tokens, workload.seq_len) // workload.global_batch
    if tokens.partial and steps > max(there, spec.options.steps):
        raise CheckpointError(
            f"steps is {steps}; the run in {folder.path} has streamed its data for {there} steps, "
            "and further ones would repeat it",
            hint=f"--steps {there}, or a new run of the model with the data that follows",
        )


def _layout(request: JobRequest, own: Layout) -> Layout:
    """The layout that is asked for; the run's own where nothing is."""
    given = request.given & {"layout", *LAYOUT_FIELDS}
    asked = own
    if given & {"layout", *TERMS}:
        asked = request.layout
    elif given:
        asked = dataclasses.replace(own, **{name: getattr(request.layout, name) for name in given})
    if "microbatches" not in given:
        same_microbatches = dataclasses.replace(asked, microbatches=own.microbatches)
        return own if same_microbatches == own else asked
    return asked


def _schedule(folder: RunFolder, layout: Layout) -> Schedule:
    """What the run's schedule.txt holds, if it is of the run's own layout; else built again. A
    process that ended between the writing of two files leaves one that is not. Messages in an order
    that does not complete on NCCL, which earlier versions wrote, are ordered again."""
    from hocket.schedules.lower import relower
    from hocket.schedules.registry import NAMES
    from hocket.schedules.validate import validate_schedule

    def checked(schedule: Schedule) -> Schedule:
        validate_schedule(schedule, layout=layout, num_microbatches=layout.microbatches)
        return schedule

    try:
        found = Schedule.parse(folder.schedule_file.read_text())
        try:
            checked(found)
        except HocketError:
            found = checked(relower(found))
    except (OSError, ValueError, HocketError):
        return prepare.scheduled(layout)
    if layout.schedule in NAMES and found.name != layout.schedule:
        return prepare.scheduled(layout)
    return found


def _fields(job: JobRequest | RunSpec) -> dict[str, Any]:
    """What a resumed run is held against: all but the layout."""
    return {
        **{name: getattr(job.workload, name) for name in WORKLOAD_FIELDS},
        **{name: getattr(job.options, name) for name in OPTION_FIELDS},
    }


def write_resumed(found: Resumed, record: JobRecorder) -> RunSpec:
    """Write run.json and schedule.txt: from here on the run is one of its new layout."""
    folder, before, job = found.folder, found.spec, found.job
    options = job.request.options
    if job.layout != before.layout:
        if options.timeline_step is not None and options.timeline_step <= found.step:
            # That step was recorded in the layout before; of this one it is its own middle.
            options = dataclasses.replace(options, timeline_step=None)
        kept = _set_aside(folder)
        record.note(
            f"from step {found.step + 1} on the layout is {job.layout}"
            + (f"; what was recorded in {before.layout} is in {kept}" if kept else "")
        )
    spec = dataclasses.replace(before, layout=job.layout, options=options)
    folder.save(spec)
    write_text(folder.schedule_file, str(job.schedule))
    return spec


# --- what was recorded in the layout before ------------------------------------------------------


def _of_layout(folder: RunFolder) -> tuple[Path, ...]:
    """Files that tell of a layout and not of the run."""
    return (
        folder.timeline_file,
        folder.later_file,
        folder.communication_file,
        folder.memory_file,
        folder.experts_file,
        folder.background_load_file,
        folder.forecast_file,
        forecast.predicted_timeline_file(folder),
        folder.topology_file,
        *(folder.path / name for name in report.FILES.values()),
    )


def _of_run(folder: RunFolder) -> tuple[Path, ...]:
    return folder.spec_file, folder.schedule_file, folder.metrics_file, folder.options_file


def _set_aside(folder: RunFolder) -> Path | None:
    """Move what tells of the layout before into a run folder of its own, earlier/N, which can be
    reported; None where nothing was recorded. A crash in between leaves the files in both places,
    or in the new one."""
    files = [file for file in _of_layout(folder) if file.is_file()]
    if not files:
        return None
    there = folder.earlier
    aside = there / ".partial"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    for file in (*_of_run(folder), *files):
        if file.is_file():
            shutil.copy2(file, aside / file.name)
    kept = next(path for n in itertools.count(1) if not (path := there / str(n)).exists())
    os.rename(aside, kept)
    for file in files:
        file.unlink(missing_ok=True)
    return kept


@contextlib.contextmanager
def folder_locked(request: JobRequest) -> Iterator[None]:
    """Within, no other process writes the run that is resumed. Raises RunFolderError."""
    if request.run is None or not request.run.is_dir():  # which `resume_job` refuses
        yield
        return
    with lock.locked(request.run, "train --resume"):
        yield


@contextlib.contextmanager
def unresumed_is_as_it_was(request: JobRequest, record: JobRecorder) -> Iterator[None]:
    """Within, a run that is resumed and ends before its next step stays the run that it was: one
    that was refused must not be refused the next time."""
    if request.run is None:
        yield
        return
    folder = RunFolder(request.run)
    files = (*_of_run(folder), *_of_layout(folder))
    before = {file: file.read_bytes() if file.is_file() else None for file in files}
    known = set(folder.earlier.glob("*"))
    try:
        yield
    except BaseException:
        if not record.steps and before[folder.spec_file] is not None:
            for file, held in before.items():
                _put_back(file, held)
            for path in set(folder.earlier.glob("*")) - known:
                shutil.rmtree(path, ignore_errors=True)
            with contextlib.suppress(OSError):
                folder.earlier.rmdir()  # if nothing is left in it
        raise


def _put_back(file: Path, held: bytes | None) -> None:
    if held is None:
        file.unlink(missing_ok=True)
    elif not file.is_file() or file.read_bytes() != held:
        aside = file.with_name(f".{file.name}.{os.getpid()}")
        aside.write_bytes(held)
        os.replace(aside, file)


@contextlib.contextmanager
def unstarted_is_no_run(
    folder: RunFolder, *, mine: bool = True, fresh: bool = False
) -> Iterator[None]:
    """Within, a job that ends before its first step leaves no run behind, so that it can be
    mended and started again under the same name.

    `fresh`: hocket named the folder itself, and no one would look for it.
    """
    try:
        yield
    except BaseException:
        metrics = folder.metrics_file
        if mine and not (metrics.exists() and metrics.stat().st_size):
            folder.spec_file.unlink(missing_ok=True)
            folder.schedule_file.unlink(missing_ok=True)
            if fresh:
                shutil.rmtree(folder.path, ignore_errors=True)
        raise
