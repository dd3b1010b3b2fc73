"""Request: what a person asked for, by the names of the flags, checked value by value.

A flag, a key of `--config` and a keyword of `hocket.train` are the same word and pass through here.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import re
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hocket.jobs import memory
from hocket.spec import expert_dispatch, renamed
from hocket.spec.capabilities import CHECKED, GRADIENTS, TRAINED
from hocket.spec.errors import LayoutError, OptionError, unknown
from hocket.spec.install import install_line
from hocket.spec.layout import TERMS, Layout
from hocket.spec.links import Links
from hocket.spec.precision import OPTIMIZERS, QUANTIZED_BASES
from hocket.spec.run import TrainOptions, Workload
from hocket.spec.synonyms import ALIAS, unknown_option
from hocket.spec.units import parse_bytes, parse_duration

DEVICES = ("auto", "cpu", "cuda")
BACKENDS = ("auto", "shm", "gloo", "nccl")
ATTENTION = ("sdpa", "eager")
CONTEXT_PARALLEL = ("auto", "ring", "ulysses")
DATA_FORMATS = ("auto", "text", "chat", "completion")
LR_SCHEDULES = ("cosine", "linear", "constant")
DIVERGENCE = ("stop", "repair")
SAVE_MODES = ("auto", "background", "blocking")
PACKINGS = ("across", "documents", "none")

LAYOUT_FIELDS = tuple(field.name for field in dataclasses.fields(Layout))
WORKLOAD_FIELDS = tuple(field.name for field in dataclasses.fields(Workload))
OPTION_FIELDS = tuple(field.name for field in dataclasses.fields(TrainOptions))
BATCH_FIELDS = ("micro_batch_size", "gradient_accumulation_steps")
"""Other words for `microbatches`: sequences of one, and their count."""
NAMES = (
    "model", "data", "eval_data", "run", "layout", "cluster", *BATCH_FIELDS, *LAYOUT_FIELDS,
    *WORKLOAD_FIELDS, *OPTION_FIELDS,
)  # fmt: skip
"""Every name a training job knows."""

MOST_RECORDED = 20
"""Steps whose timelines are recorded: a trace of more is too long to look at."""

_LARGEST = 2**62
_USUAL = {"lr": 5e-5, "seq_len": 256, "eps": 1e-8}
"""Values to offer where the least one that is allowed trains nothing."""

AUTO = "auto"
"""A layout that hocket chooses; a cluster that is this machine."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobRequest:
    """A job's options, each with a value that can be.

    Attributes:
        model: a Hugging Face directory, a run folder, or a name of the catalogue.
        data: files or directories of text. eval_data: those that are held out.
        run: the run folder. None: a new one under `runs/`.
        layout, workload, options: as flags said, or their defaults.
        auto: hocket chooses the layout; `layout` holds the fields that it must keep.
        cluster: `auto` (this machine, as it was probed), a file that `hocket probe` wrote, or
            `none`: no prediction.
        again: the run folder held this run already; without a checkpoint it starts over.
        micro_batch_size: sequences of a microbatch that a layout hocket chooses must have.
        ranks: that a layout hocket chooses may have at most, where devices are gone or back; None:
            all devices.
    """

    model: str
    data: tuple[str, ...] = ()
    eval_data: tuple[str, ...] = ()
    run: Path | None = None
    layout: Layout = dataclasses.field(default_factory=Layout)
    workload: Workload = dataclasses.field(default_factory=Workload)
    options: TrainOptions = dataclasses.field(default_factory=TrainOptions)
    auto: bool = False
    cluster: str = AUTO
    micro_batch_size: int | None = None
    again: bool = False
    ranks: int | None = None
    given: frozenset[str] = frozenset()
    """Names that were given a value, even if it is the default: what a resumed run must match."""


def request(values: Mapping[str, Any]) -> JobRequest:
    """Read options by name; a value of None is absent.

    Raises:
        OptionError: an unknown name (the nearest one is suggested), or a value that cannot be.
        LayoutError: a layout that cannot be, or a flag that contradicts the layout's text.
    """
    given = batched(typed_options(values))
    if not given.get("model"):
        raise OptionError("no model was named", hint="hocket train tiny-llama --data FILE")
    workload = Workload(**{name: given[name] for name in WORKLOAD_FIELDS if name in given})
    options = TrainOptions(**{name: given[name] for name in OPTION_FIELDS if name in given})
    if "min_lr" not in given:
        # The default suits the default peak; a smaller peak still decays to a tenth.
        options = dataclasses.replace(options, min_lr=min(options.min_lr, options.lr / 10))
    if "epochs" in given and "steps" in given:
        raise OptionError(
            f"steps is {options.steps} and epochs {options.epochs:g}; one of them sets the length",
            hint="leave --steps out",
        )
    if "eval_data" in given and "eval_fraction" in given and options.eval_fraction:
        raise OptionError(
            f"eval_fraction is {options.eval_fraction:g} and there is eval_data, which is all that "
            "is held out",
            hint="leave --eval-fraction out",
        )
    if given.get("eval_data") and "eval_batches" not in given:
        options = dataclasses.replace(options, eval_batches=0)
    check_workload(workload)
    check_options(options)
    auto = given.get("layout") == AUTO
    if auto and given.get("data_parallel") == "threads":
        raise LayoutError(
            "--layout auto chooses among processes; replicas in threads are asked for by hand",
            hint="--layout dp2 --data-parallel threads",
        )
    return JobRequest(
        model=given["model"],
        data=given.get("data", ()),
        eval_data=given.get("eval_data", ()),
        run=Path(given["run"]) if "run" in given else None,
        layout=layout_of(given),
        workload=workload,
        options=options,
        auto=auto,
        cluster=given.get("cluster", AUTO),
        micro_batch_size=given.get("micro_batch_size"),
        given=frozenset({*given, *layout_values(given)}),
    )


def typed_options(values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` without those that are None, each as the type its name asks for.

    Raises:
        OptionError: an unknown name (the nearest one is suggested), or a value of another type.
    """
    given = {name: value for name, value in values.items() if value is not None}
    given = renamed.present_options(given, NAMES)
    for name in given:
        if name not in NAMES:
            raise unknown_option(name, NAMES)
    for kind, names in ((Workload, WORKLOAD_FIELDS), (TrainOptions, OPTION_FIELDS)):
        hints = typing.get_type_hints(kind)
        given.update(
            {name: _value(name, given[name], hints[name]) for name in given if name in names}
        )
    if given.get("dtype") == AUTO:  # as the device has it (`jobs.defaults.with_dtype`)
        del given["dtype"]
    for name in ("dtype", "grad_dtype"):
        if name in given:
            given[name] = ALIAS.get(given[name], given[name])
    if re.fullmatch("[0-9]{1,18}", str(given.get("save_every", ""))):
        given["save_every"] = int(given["save_every"])
    for name in ("model", "run", "cluster"):
        if name in given:
            if not isinstance(given[name], str | Path):
                raise OptionError(f"{name} is {given[name]!r}; a text is needed")
            given[name] = str(given[name])
    for name in ("data", "eval_data"):
        if name in given:
            given[name] = _paths(name, given[name])
    return given


def batched(given: dict[str, Any]) -> dict[str, Any]:
    """Options with `microbatches` for sequences of a microbatch and steps of accumulation, and the
    global batch where those two alone were given.

    Raises:
        OptionError: numbers below 1, or that contradict each other.
    """
    size, count = (given.get(name) for name in BATCH_FIELDS)
    if size is None and count is None:
        return given
    for name in BATCH_FIELDS:
        if name in given:
            given[name] = _value(name, given[name], int)
            _at_least(name, given[name], 1)
    layout = layout_of(given)
    auto = given.get("layout") == AUTO
    many = given.get("microbatches", count)
    if many is None and not auto:
        many = layout.microbatches
    if layout.microbatches not in (None, many) or (count is not None and many != count):
        raise OptionError(
            f"gradient_accumulation_steps is {count} and microbatches {layout.microbatches}; "
            "they are the same number",
            hint=f"--gradient-accumulation-steps {layout.microbatches}",
        )
    if size is None:
        return {**given, "microbatches": many}
    if auto and many is None:
        return given
    dp = layout.dp
    if many is not None and "global_batch" not in given and not auto:
        return {**given, "microbatches": many, "global_batch": dp * many * size}
    if "global_batch" not in given:  # `defaults.with_batch` chooses, once the devices are known
        return given if many is None else {**given, "microbatches": many}
    batch = given["global_batch"]
    fixed = many is not None
    many = many or max(1, batch // (dp * size))
    if not auto and dp * many * size != batch:
        near = max(1, batch // (dp * size)) * dp * size
        raise OptionError(
            f"global_batch {batch} is not dp{dp} x {many} microbatches x micro_batch_size {size} "
            f"= {dp * many * size}",
            hint=f"--global-batch {dp * many * size if fixed else near}",
        )
    return {**given, "microbatches": many}


def _paths(name: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, str | Path):
        return (str(value),)
    if isinstance(value, Iterable):
        return tuple(str(path) for path in value)
    raise OptionError(f"{name} is {value!r}; it is one path or a list of paths")


def layout_of(given: Mapping[str, Any]) -> Layout:
    """The layout of a text under `layout` and further fields. Raises LayoutError."""
    fields = {n: given[n] for n in LAYOUT_FIELDS if given.get(n) is not None}
    layout = given.get("layout")
    if layout is None or layout == AUTO:
        # Without a text, the degrees among the fields are the axes.
        degrees = [name for name in TERMS if name in fields]
        layout = ".".join(f"{name}{fields.pop(name)}" for name in degrees) or "dp1"
    if isinstance(layout, Layout):
        layout = str(layout)
    if not isinstance(layout, str):
        raise LayoutError(f"layout is {layout!r}; it is a text", hint="dp2.pp2.tp2")
    # Numbers and lists of a TOML file or a keyword read the same as their text.
    for name, value in fields.items():
        if isinstance(value, list | tuple):
            fields[name] = "-".join(str(v) for v in value)
        elif isinstance(value, bool):
            fields[name] = str(value).lower()
        elif not isinstance(value, str):
            fields[name] = str(value)
    return Layout.parse(layout, **fields)


def layout_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """The layout that `values` describe, field by field, so that another source can override it.

    The text form under `layout` and the other fields must not contradict each other. Where
    there is a text, its axes are complete: those it leaves out are 1.
    """
    given = {name: value for name, value in values.items() if value is not None}
    layout = layout_of(given)
    found = {name: given[name] for name in LAYOUT_FIELDS if name in given}
    if given.get("layout") == AUTO:
        return {"layout": AUTO, **found}
    if "layout" in given:
        default = Layout()
        for name in LAYOUT_FIELDS:
            value = getattr(layout, name)
            if name in TERMS or value != getattr(default, name):
                found[name] = value
    return found


def _value(name: str, value: Any, hint: Any) -> Any:
    """`value` as the type that the field declares; OptionError where it is another."""
    wanted = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if isinstance(value, int) and abs(value) > _LARGEST:
        raise OptionError(f"{name} is {value!r:.40}; it is at most {_LARGEST:,}")
    if float in wanted and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if bool not in wanted and isinstance(value, bool):
        raise OptionError(f"{name} is {value}; {_say(wanted)} is needed")
    if not isinstance(value, wanted):
        raise OptionError(f"{name} is {value!r}; {_say(wanted)} is needed")
    return value


def _say(wanted: tuple[Any, ...]) -> str:
    words = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
    return " or ".join(words[kind] for kind in wanted if kind in words)


def _at_least(name: str, value: float, least: float) -> None:
    if not value >= least or not math.isfinite(value):
        good = _USUAL.get(name, least)
        raise OptionError(
            f"{name} is {value}; it must be at least {least}",
            hint=f"--{name.replace('_', '-')} {good}",
        )


def _below_one(name: str, value: float) -> None:
    if not 0 <= value < 1:
        raise OptionError(
            f"{name} is {value}; it must be at least 0 and below 1",
            hint=f"leave --{name.replace('_', '-')} out",
        )


def _one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        message, hint = unknown(name, value, choices)
        raise OptionError(message, hint=hint)


def check_workload(workload: Workload) -> None:
    """Refuse sizes that cannot be. Raises OptionError."""
    _at_least("seq_len", workload.seq_len, 2)
    _at_least("global_batch", workload.global_batch, 1)
    _one_of("dtype", workload.dtype, (*TRAINED, *CHECKED))


def check_options(options: TrainOptions) -> None:
    """Refuse values that cannot be. Raises OptionError."""
    for name, least in (
        ("steps", 1), ("seed", 0), ("lr", 0), ("min_lr", 0), ("weight_decay", 0), ("eps", 0),
        ("max_grad_norm", 0), ("vocab_size", 257), ("eval_every", 0), ("eval_batches", 0),
        ("timeline_steps", 1), ("threads", 1), ("timeout", 1), ("keep_checkpoints", 1),
        ("keep_every", 0),
        ("max_restarts", 0), ("max_skipped_steps", 0), ("replica_check_every", 0),
        ("replicate_state", 0), ("max_corrupt_records", 0),
        ("verify_every", 0), ("slow_rank_factor", 1.01),
    ):  # fmt: skip
        _at_least(name, getattr(options, name), least)
    if options.epochs is not None and not 0 < options.epochs < math.inf:
        raise OptionError(f"epochs is {options.epochs}; it must be above 0", hint="--epochs 1")
    if isinstance(options.save_every, str):
        parse_duration(options.save_every)
    else:
        _at_least("save_every", options.save_every, 0)
    for name in ("beta1", "beta2", "eval_fraction"):
        _below_one(name, getattr(options, name))
    if options.dropout is not None:
        _below_one("dropout", options.dropout)
    if options.warmup is not None:
        _at_least("warmup", options.warmup, 0)
    if options.bucket_mb is not None:
        _at_least("bucket_mb", options.bucket_mb, 0.001)
    if options.log_interval is not None:
        _at_least("log_interval", options.log_interval, 1)
    if options.timeline_step is not None and not 1 <= options.timeline_step <= options.steps:
        raise OptionError(
            f"timeline_step is {options.timeline_step}; the run has the steps 1 .. {options.steps}"
        )
    last = (options.timeline_step or 1) + options.timeline_steps - 1
    if last > options.steps or options.timeline_steps > MOST_RECORDED:
        raise OptionError(
            f"timeline_steps is {options.timeline_steps} from step {options.timeline_step or 1}; "
            f"the run has {options.steps} steps, and at most {MOST_RECORDED} are recorded",
            hint="--timeline-steps 3",
        )
    if options.min_lr > options.lr:
        raise OptionError(
            f"min_lr {options.min_lr} is above lr {options.lr}", hint=f"--min-lr {options.lr / 10}"
        )
    _check_lora(options)
    _one_of("optimizer", options.optimizer, OPTIMIZERS)
    if options.optimizer == "adamw_8bit" and importlib.util.find_spec("bitsandbytes") is None:
        raise OptionError(
            "--optimizer adamw_8bit needs the package bitsandbytes",
            hint=install_line("lora"),
        )
    memory.memory_limit(options)
    if options.token_window is not None:
        _check_window(options.token_window, options)
    if options.emulate_links is not None:
        Links.parse(options.emulate_links)
    if options.grace_seconds is not None:
        _at_least("grace_seconds", options.grace_seconds, 1)
    _one_of("on_divergence", options.on_divergence, DIVERGENCE)
    _one_of("save_mode", options.save_mode, SAVE_MODES)
    _one_of("grad_dtype", options.grad_dtype, GRADIENTS)
    _one_of("device", options.device, DEVICES)
    _one_of("backend", options.backend, BACKENDS)
    if options.tracker is not None:
        from hocket.training.trackers import tracker_names

        tracker_names(options.tracker)
    _one_of("attention", options.attention, ATTENTION)
    _one_of("context_parallel", options.context_parallel, CONTEXT_PARALLEL)
    expert_dispatch.parse_dispatch(options.expert_dispatch)
    _one_of("lr_schedule", options.lr_schedule, LR_SCHEDULES)
    _one_of("data_format", options.data_format, DATA_FORMATS)
    if options.packing is not None:
        _one_of("packing", options.packing, PACKINGS)


def _check_window(size: str, options: TrainOptions) -> None:
    """Refuse a window of tokens that is no size, or of data that is not taken as a stream."""
    parse_bytes(size)
    if not options.streaming:
        raise OptionError(
            f"--token-window {size} is of a stream, and --streaming is not given",
            hint=f"--streaming --token-window {size}",
        )
    if options.epochs is not None:
        raise OptionError(
            "--token-window does not read the data before the run, which --epochs needs to",
            hint="--steps N instead of --epochs",
        )
    if options.upload is not None:
        raise OptionError(
            "--upload copies all that a run needs, and with --token-window its tokens change",
            hint="leave --upload or --token-window out",
        )


def _check_lora(options: TrainOptions) -> None:
    """Refuse adapters that cannot be, and words about them where there are none."""
    if options.lora_rank is None:
        default = TrainOptions()
        for name in ("lora_alpha", "lora_dropout", "lora_targets", "quantize_base"):
            if getattr(options, name) != getattr(default, name):
                raise OptionError(
                    f"{name} is {getattr(options, name)}, and no lora_rank is given",
                    hint="--lora-rank 8",
                )
        return
    _at_least("lora_rank", options.lora_rank, 1)
    if options.lora_alpha is not None and not 0 < options.lora_alpha < math.inf:
        raise OptionError(
            f"lora_alpha is {options.lora_alpha}; it must be above 0",
            hint=f"--lora-alpha {2 * options.lora_rank}",
        )
    _below_one("lora_dropout", options.lora_dropout)
    if importlib.util.find_spec("peft") is None:
        raise OptionError("--lora-rank needs the package peft", hint=install_line("lora"))
    if options.quantize_base is not None:
        _one_of("quantize_base", options.quantize_base, tuple(QUANTIZED_BASES))
    if options.quantize_base is not None and importlib.util.find_spec("bitsandbytes") is None:
        raise OptionError(
            "--quantize-base needs the package bitsandbytes", hint=install_line("lora")
        )
