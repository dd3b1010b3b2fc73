"""Preparation: from a Request to a run folder that ranks can start from.

    model, layout, schedule checked -> data tokenized -> vocabulary resolved
        -> run.json, schedule.txt

Torch-free throughout, so that it runs while the launcher's server still imports torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hocket.jobs import defaults, elastic, links, lock, memory, precision
from hocket.jobs.request import JobRequest, check_options
from hocket.jobs.validate import validate_layout
from hocket.jobs.writable import require_writable
from hocket.spec import expert_dispatch
from hocket.spec.errors import (
    DataError,
    ModelError,
    OptionError,
    RunFolderError,
    ScheduleError,
)
from hocket.spec.files import write_text
from hocket.spec.layout import Layout
from hocket.spec.links import Links
from hocket.spec.run import RunFolder, RunSpec, TrainOptions
from hocket.spec.schedule import Schedule
from hocket.spec.units import parse_bytes

if TYPE_CHECKING:
    from hocket.jobs.record import JobRecorder
    from hocket.launch import Launcher
    from hocket.models.source import ModelSource
    from hocket.training.token_manifest import Tokens
    from hocket.training.tokenizer import Tokenizer

Progress = Callable[[int, int], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreparedJob:
    """A job whose model, layout and schedule fit each other. Nothing is written yet."""

    request: JobRequest
    source: ModelSource
    layout: Layout
    schedule: Schedule


def prepare_job(
    request: JobRequest, *, world_size: int | None = None, any_size: bool = False
) -> PreparedJob:
    """Check a request as far as that goes without reading through its data.

    Args:
        world_size: ranks that a launcher has started, None where hocket starts its own.
        any_size: a model that this machine cannot hold passes.

    Raises:
        HocketError: the model is unknown, the layout or the schedule does not fit, the data is
            not there.
    """
    from hocket.models.source import resolve_model
    from hocket.training import data_paths, mixture, tokenizer

    device_checked(request.options)
    request = defaults.with_dtype(request)
    trusted = request.options.trust_remote_code
    source = resolve_model(request.model, trust_remote_code=trusted, weights=False)
    request = defaults.with_batch(defaults.with_length(request, source), world_size)
    choice_checked(request, world_size)
    elastic.checked(request.options, world_size)
    asked = Layout() if request.auto else request.layout  # chosen once the vocabulary is known
    layout = validate_layout(source.dimensions, asked, request.workload, world_size=world_size)
    schedule = scheduled(layout)
    if not request.auto:
        links.checked_links(request.options, layout, joined=world_size is not None)
    memory.reject_memory_limit(request.options)
    precision.reject_precision(request.workload, request.options, layout, schedule)
    if not any_size:
        asked_for = None if request.auto else layout
        memory.reject_untrainable(source, request.workload, request.options, asked_for)
    if not request.data:
        raise DataError(
            "no data was named",
            hint="--data FILE_OR_FOLDER..., or a data set of the Hub: --data ORG/NAME",
        )
    weights = mixture.weights_of(request.data)
    if weights:
        mixture.slots_of(weights)
    # One commit for all of the job, whatever is pushed to a branch meanwhile.
    fixed = []
    for flag, paths in (("--data", request.data), ("--eval-data", request.eval_data)):
        with _hints_with(flag):
            fixed.append(tuple(map(data_paths.fixed, data_paths.expanded_paths(paths))))
    data, eval_data = fixed
    request = dataclasses.replace(request, data=data, eval_data=eval_data)
    mixture.reject_weights(eval_data)
    found = []
    for flag, paths in (("--data", data), ("--eval-data", eval_data)):
        if paths:
            with _hints_with(flag):
                found.append(data_paths.find_sources(paths))
    data_paths.reject_repeated(*found)
    # All of a model of the Hub is downloaded once nothing else is known to be wrong.
    source = resolve_model(source.repo or request.model, trust_remote_code=trusted)
    if request.options.lora_rank is not None and source.weights is None:
        raise ModelError(
            f"LoRA adapts weights that are there, and {source.name} has none",
            hint=_with_weights(source.name),
        )
    request = defaults.with_rates(request, source)
    if request.options.tokenizer is None and source.weights is not None and not source.tokenizer:
        raise ModelError(
            f"{source.name} holds weights and no tokenizer; without the one they were trained "
            "with, training spoils them",
            hint="--tokenizer DIR (or --tokenizer bytes, if they were trained on bytes)",
        )
    if request.options.tokenizer not in (None, "train"):
        tokenizer.resolve_tokenizer(
            request.options.tokenizer,
            model_dir=source.tokenizer,
            trust_remote_code=request.options.trust_remote_code,
        )
    return PreparedJob(request=request, source=source, layout=layout, schedule=schedule)


@contextlib.contextmanager
def _hints_with(flag: str) -> Iterator[None]:
    """Errors of data whose hints have the flag that named it."""
    try:
        yield
    except DataError as error:
        error.hint = error.hint and error.hint.replace("--data", flag)
        raise


def device_checked(options: TrainOptions) -> None:
    """Refuse a device, a backend or a folder in memory that is not there. Raises OptionError."""
    memory_folder = RunFolder(".").state_copies.parents[1]
    if options.replicate_state and not os.access(memory_folder, os.W_OK):
        raise OptionError(
            f"--replicate-state {options.replicate_state} keeps copies below {memory_folder}, "
            "which is not a folder that can be written to",
            hint="HOCKET_STATE_COPIES=DIR of a file system in memory, or --replicate-state 0",
        )
    precision.device_kind(options)
    precision.reject_compile(options)


def _with_weights(name: str) -> str:
    """Where a model has its weights, of which only the configuration was named."""
    from hocket.catalogue import models

    repo = models.entry(name).hub_id if name in models.model_names() else None
    other = "or a directory with safetensors weights"
    return (
        "leave --lora-rank out" if repo is None else f"hocket train {repo}, which has them; {other}"
    )


def choice_checked(request: JobRequest, world_size: int | None) -> None:
    """Refuse to choose a layout for ranks that are there already. Raises OptionError."""
    if request.auto and world_size is not None:
        raise OptionError(
            "--layout auto starts as many ranks as it chooses; another launcher has started "
            f"{world_size} already",
            hint="run it without torchrun, or give a --layout",
        )


def scheduled(layout: Layout) -> Schedule:
    """The schedule of a layout with microbatches. Raises ScheduleError."""
    from hocket.schedules.registry import build_schedule

    assert layout.microbatches is not None
    if "," in layout.schedule:
        raise ScheduleError(
            f"the path {layout.schedule!r} holds a comma, which separates a layout's fields",
            hint="rename the schedule file",
        )
    return build_schedule(layout, layout.microbatches)


def train_folder(request: JobRequest) -> RunFolder:
    """The run folder asked for, or a new name under `runs/`.

    Raises:
        RunFolderError: the folder already holds a run, is written by another process, or is not a
            folder.
    """
    if request.run is None:
        return RunFolder(new_folder(Path("runs") / (short_name(request.model) or "run")))
    folder = RunFolder(request.run)
    lock.reject_locked(folder.path)
    if folder.spec_file.exists():
        if not folder.metrics_file.exists() and not folder.checkpoints.exists():
            raise RunFolderError(
                f"{folder.path} already holds a run: one that was ended before its first step, "
                "or that is just starting",
                hint=f"rm -r {folder.path}, or another name: --run {free_name(folder.path)}",
            )
        raise RunFolderError(
            f"{folder.path} already holds a run",
            hint=f"--resume to continue it, or another name: --run {free_name(folder.path)}",
        )
    if folder.path.exists() and not folder.path.is_dir():
        raise RunFolderError(f"{folder.path} is a file, not a folder", hint="--run runs/first")
    # Found here, before the launcher warms up, rather than when the first file is written.
    require_writable(folder, "runs/first")
    return folder


def short_name(model: str) -> str:
    """A model's name without the folder or the organization before it."""
    from hocket.models import repo_id

    repo = None if Path(model).expanduser().exists() else repo_id.parse_repo(model)
    return Path(model if repo is None else repo.id).name


def new_folder(stem: Path) -> Path:
    """Make STEM-1, or the first number that is free; of two processes, each gets its own."""
    for k in itertools.count(1):
        path = stem.with_name(f"{stem.name}-{k}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        return path
    raise AssertionError


def free_name(path: Path) -> Path:
    """A folder's name with the first number that is free."""
    names = (path.with_name(f"{path.name}-{k}") for k in itertools.count(2))
    return next(name for name in names if not name.exists())


def trained_config(source: ModelSource, vocab_size: int, eos_id: int | None) -> dict[str, Any]:
    """The configuration that a run trains: of a model of the catalogue with random weights it has
    as many embedding rows as the tokenizer has ids."""
    if (
        source.directory is None
        and source.weights is None
        and not Path(source.name).expanduser().exists()
    ):
        return with_vocabulary(source.config, vocab_size, eos_id)
    return source.config


def data(
    job: PreparedJob, folder: RunFolder, progress: Progress | None = None
) -> tuple[Tokenizer, Tokens, dict[str, Any]]:
    """Tokenize the data into the run folder; the model's configuration with its vocabulary.

    A model of the catalogue with random weights gets as many embedding rows as the tokenizer has
    ids; a configuration or weights of the user's own are never changed.

    Raises:
        DataError: unreadable, empty or too short data, or an id beyond the vocabulary.
        OptionError: an unknown tokenizer.
    """
    from hocket.training import conversation, data_paths, data_sources, documents, tokenizer
    from hocket.training import data as tokens_of
    from hocket.training.corrupt import CorruptRecords

    request, source = job.request, job.source
    options, workload = request.options, request.workload
    found = data_paths.find_sources(request.data, streaming=options.streaming).sources
    held = documents.source_kinds(found, options.data_format)
    if options.tokenizer == "train" and set(held) != {conversation.TEXT}:
        raise OptionError(
            "--tokenizer train learns from text; the data holds chats or completions",
            hint="--tokenizer bytes, or a directory that has one",
        )
    words = tokenizer.resolve_tokenizer(
        options.tokenizer,
        model_dir=source.tokenizer,
        texts=lambda: data_sources.source_documents(
            found, options.text_field, CorruptRecords(options.max_corrupt_records)
        ),
        vocab_size=options.vocab_size,
        trust_remote_code=options.trust_remote_code,
    )
    config = trained_config(source, words.vocab_size, words.eos_id)
    if config is not source.config:
        sizes = dataclasses.replace(source.dimensions, vocab_size=words.vocab_size)
        validate_layout(sizes, job.layout, workload, world_size=job.layout.world_size)
    templates = documents.templates_of(
        words, words.directory or source.tokenizer, options.chat_template_file
    )
    tokens = tokens_of.prepare_data(
        folder.data,
        words,
        request.data,
        eval_paths=request.eval_data,
        seq_len=workload.seq_len,
        global_batch=_fewest(job) or workload.global_batch,
        text_field=options.text_field,
        eval_fraction=options.eval_fraction,
        seed=options.seed,
        model_vocab_size=int(config.get("vocab_size") or source.dimensions.vocab_size),
        data_format=options.data_format,
        packing=options.packing,
        templates=templates,
        chat_template=options.chat_template_file,
        streaming=options.streaming,
        samples=None if options.epochs else options.steps * workload.global_batch,
        max_corrupt_records=options.max_corrupt_records,
        token_window=parse_bytes(options.token_window) if options.token_window else 0,
        progress=progress,
    )
    return words, tokens, config


def with_vocabulary(config: dict[str, Any], vocab_size: int, eos: int | None) -> dict[str, Any]:
    """A configuration with another vocabulary: no token id in it lies beyond its rows."""
    changed = {**config, "vocab_size": vocab_size, "eos_token_id": eos}
    for name in ("bos_token_id", "pad_token_id"):
        value = changed.get(name)
        if isinstance(value, int) and value >= vocab_size:
            changed[name] = eos
    return changed


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreparedData:
    """A job whose data is tokenized.

    Attributes:
        job: with the packing and the steps that its data asks for.
        words, tokens: the tokenizer, and what it made.
        config: the model's configuration with the tokenizer's vocabulary.
        notes: for the user: files read and left out, tokens and steps, records skipped.
    """

    job: PreparedJob
    words: Tokenizer
    tokens: Tokens
    config: dict[str, Any]
    notes: tuple[str, ...]


def tokenized(job: PreparedJob, folder: RunFolder, record: JobRecorder) -> PreparedData:
    """Tokenize a job's data into the run folder, with what the user is to know of it.

    Raises:
        DataError: unreadable, empty or too short data, or an id beyond the vocabulary.
        OptionError: an unknown tokenizer, or epochs that are no step.
    """
    from hocket.training import data_paths
    from hocket.training.dataset import drawn_text

    asked = job.request
    read = [
        notice
        for paths in filter(None, (asked.data, asked.eval_data))
        for notice in data_paths.find_sources(paths, streaming=asked.options.streaming).notices
    ]
    record.phase("tokenizing")
    words, tokens, config = data(job, folder, record.tokenized)
    job = fitted_to(job, tokens)
    options, workload = job.request.options, job.request.workload
    said = tokens.said(workload.seq_len)
    if workload.global_batch < asked.workload.global_batch:
        said += f"; a step takes all {workload.global_batch} sequences that they are"
    if options.epochs is not None:
        said += f"; {options.epochs:g} epochs are {options.steps} steps"
    said += f"; {words.kind} tokenizer of {words.vocab_size} ids"
    skipped = [f"skipped: {note}" for note in tokens.corrupt]
    drawn = drawn_text(tokens, workload.seq_len, options.steps * workload.global_batch)
    notes = tuple(filter(None, [*read, said, *skipped, drawn]))
    return PreparedData(job=job, words=words, tokens=tokens, config=config, notes=notes)


def _fewest(job: PreparedJob) -> int:
    """Sequences of the smallest step that a global batch may become which was chosen, not given; 0
    where it stays: data that is streamed has no size yet."""
    asked, layout = job.request, job.layout
    if "global_batch" in asked.given or asked.options.streaming:
        return 0
    return layout.dp * (layout.microbatches or 1) * (asked.micro_batch_size or 1)


def fitted_to(job: PreparedJob, tokens: Tokens) -> PreparedJob:
    """The job with the packing that its data asks for, a chosen global batch of which the data has
    one, and the steps of its epochs."""
    from hocket.training.data import num_samples, steps_of

    options = dataclasses.replace(job.request.options, packing=tokens.packing)
    workload = job.request.workload
    samples = tokens.train_rows or num_samples(tokens.train_tokens, workload.seq_len)
    if (unit := _fewest(job)) and samples < workload.global_batch:
        workload = dataclasses.replace(workload, global_batch=samples // unit * unit)
        request = dataclasses.replace(job.request, workload=workload)
        job = dataclasses.replace(job, request=request)
    if options.epochs is not None:
        steps = steps_of(
            tokens, options.epochs, seq_len=workload.seq_len, global_batch=workload.global_batch
        )
        options = dataclasses.replace(options, steps=steps)
        check_options(options)
    return dataclasses.replace(job, request=dataclasses.replace(job.request, options=options))


def job_in_layout(
    job: PreparedJob,
    layout: Layout,
    *,
    world_size: int | None = None,
    schedule: Schedule | None = None,
) -> PreparedJob:
    """The job in another layout, with its schedule.

    Args:
        world_size: as `prepare_job`.
        schedule: of the layout, where it is not to be built.

    Raises:
        LayoutError, ScheduleError: the layout does not fit.
        OptionError: the links, the dtype or an offload cannot be had in it.
    """
    options, workload = job.request.options, job.request.workload
    layout = validate_layout(job.source.dimensions, layout, workload, world_size=world_size)
    links.checked_links(options, layout, joined=world_size is not None)
    schedule = schedule or scheduled(layout)
    precision.reject_precision(workload, options, layout, schedule)
    return dataclasses.replace(job, layout=layout, schedule=schedule)


def write_run(job: PreparedJob, folder: RunFolder, config: dict[str, Any], command: str) -> RunSpec:
    """Write run.json and schedule.txt: from here on the folder holds a run."""
    from hocket.models.base_weights import base_fingerprint

    spec = job_spec(job.source, job.request, job.layout, config, command)
    if spec.options.lora_rank is not None and job.source.weights is not None:
        spec = dataclasses.replace(spec, base=base_fingerprint(job.source.weights))
    folder.path.mkdir(parents=True, exist_ok=True)
    write_text(folder.schedule_file, str(job.schedule))
    folder.create(spec)
    return spec


def job_spec(
    source: ModelSource, request: JobRequest, layout: Layout, config: dict[str, Any], command: str
) -> RunSpec:
    """The RunSpec of a job; its paths hold from any working folder."""
    from hocket.training import data_paths

    known = Path(request.model).expanduser()
    return RunSpec(
        model=source.repo or (str(known.resolve()) if known.exists() else request.model),
        config=config,
        layout=layout,
        workload=request.workload,
        options=_with_dispatch(request.options, layout),
        weights=str(source.weights.resolve()) if source.weights is not None else None,
        data=tuple(data_paths.pinned_path(path) for path in request.data),
        eval_data=tuple(data_paths.pinned_path(path) for path in request.eval_data),
        command=command,
    )


def _with_dispatch(options: TrainOptions, layout: Layout) -> TrainOptions:
    """The options, with tokens dispatched to experts as this job's nodes let them. Emulated links
    have nodes of their innermost domain. Raises LayoutError."""
    if options.emulate_links is not None:
        here = Links.parse(options.emulate_links).tiers[0][1]
    else:
        here = expert_dispatch.local_ranks(os.environ)
    found = expert_dispatch.settle_dispatch(options.expert_dispatch, layout, here)
    return dataclasses.replace(options, expert_dispatch=found)


def rank_payload(folder: RunFolder, spec: RunSpec) -> dict[str, Any]:
    """What ranks that read a run folder need besides it: the command's permission to run code."""
    return {
        "run": str(folder.path.resolve()),
        "trust_remote_code": spec.options.trust_remote_code,
    }


def require_weights(launcher: Launcher, folder: RunFolder, spec: RunSpec) -> None:
    """Reject weight files whose names or shapes do not fit. Raises WeightsError, listing them.

    Only headers are read, by a process of the warm server: shapes need the model, and so torch.
    """
    if spec.weights is not None:
        launcher.run("hocket.ranks.weights:main", 1, rank_payload(folder, spec))
