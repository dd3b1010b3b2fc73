"""Memory of a job: its prediction against `--memory-per-rank` or this machine, before ranks start.

One process of the warm server executes a step of each rank on tensors without memory and counts.
Where that is more than is allowed, it does so for more microbatches and for other layouts, from few
ranks to many, until some fit. CPU ranks without a limit of their own share the machine's memory: a
job that by its sizes may come near it is predicted, every other starts at once. A model that is far
too large is rejected by its configuration alone, before a process starts or weights are read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from hocket.jobs import defaults
from hocket.jobs.precision import on_cuda
from hocket.spec.allowed_memory import MOST_RANKS, Allowed
from hocket.spec.capabilities import runs
from hocket.spec.errors import HocketError, LayoutError, OptionError
from hocket.spec.files import write_text
from hocket.spec.layout import Layout, divisors
from hocket.spec.precision import QUANTIZED_BASES, state_bytes
from hocket.spec.run import RunFolder, RunSpec, TrainOptions, Workload
from hocket.spec.units import format_bytes, format_count, parse_bytes

if TYPE_CHECKING:
    from hocket.launch import Launcher
    from hocket.models.source import ModelSource

SURE = 0.25
"""Share of the machine's free memory below which a job's sizes leave no doubt that it fits."""

CERTAIN = 0.5
"""Share of the bytes that a configuration lets expect that a model has for certain: layers without
experts, or feed-forward blocks without a gate, are counted as if they had them."""

NODE = 0.8 * 8 * 80e9
"""Bytes of a node of eight GPUs that a training state may fill, of a cluster to plan on."""

PROPOSED = 3
"""Layouts that fit the GPUs, at most, among those that are named."""


@dataclasses.dataclass(frozen=True)
class Free:
    """Memory that a job's ranks can have at most. `where`: on what."""

    bytes: int
    where: str


def free_memory(
    options: TrainOptions, *, ranks: int | None = None, offloads: bool = False
) -> Free | None:
    """The memory that is free for all ranks together; None where NVML does not report it.

    Ranks of a launcher's world may each be on a host of its own, and GPUs of other hosts are taken
    for as large as those of this one.

    Args:
        ranks: of the job, each on a GPU; None: as many as there are.
        offloads: GPU ranks have the hosts' memory too.
    """
    from hocket.launch import joined_context
    from hocket.runtime.host_memory import free_host_memory

    context = joined_context()
    hosts = 1 if context is None or context.one_machine else context.world_size
    here = hosts * free_host_memory()
    if not on_cuda(options):
        return Free(here, "this machine" if hosts == 1 else f"{hosts} machines like this one")
    from hocket.probing import devices

    if ranks is None:
        ranks = devices.visible_gpus() if context is None else context.world_size
    each = devices.free_device_memory(ranks)
    if each is None:
        return None
    return Free(ranks * each + offloads * here, f"{ranks} GPU{'s' * (ranks != 1)}")


def reject_too_large(
    source: ModelSource, each: float, what: str, fix: str, free: Free | None
) -> None:
    """Reject, by its configuration alone, a model that a job's ranks cannot hold.

    Args:
        each: bytes of a parameter that all ranks together hold at least. what: names them.
        fix: the hint. free: `free_memory` of the job.

    Raises:
        LayoutError: half of what is expected is more than the memory that is free.
    """
    count = defaults.parameters(source.dimensions)
    if free is not None and count * each * CERTAIN > free.bytes:
        raise LayoutError(
            f"{source.name} is too large for {free.where}: {what} of about {format_count(count)} "
            f"parameters take {_gb(count * each)} ({each:.3g} bytes each), and {_gb(free.bytes)} "
            "of memory is free",
            hint=fix,
        )


def reject_untrainable(
    source: ModelSource, workload: Workload, options: TrainOptions, layout: Layout | None = None
) -> None:
    """`reject_too_large` for training. `layout`: None where it is to be chosen. Raises
    LayoutError."""
    state = state_bytes(workload.dtype, options.grad_dtype, options.optimizer)
    each, what = state.total, "weights, gradients and optimizer state"
    if options.lora_rank is not None:
        base = options.quantize_base
        each, what = (
            float(state.weight) if base is None else QUANTIZED_BASES[base],
            "frozen weights",
        )
    free = free_memory(
        options,
        ranks=None if layout is None else layout.world_size,
        offloads=layout is None or layout.offload != "none",
    )
    reject_too_large(source, each, what, planned(source, workload), free)


def planned(source: ModelSource, workload: Workload) -> str:
    """The command that plans this training on as many GPUs as hold its state."""
    need = state_bytes("bf16").total * defaults.parameters(source.dimensions)
    nodes = 1 << max(0, math.ceil(math.log2(need / NODE)))
    cluster = "8xH100" if nodes == 1 else f"{nodes}x8xH100"
    return (
        f"hocket plan {source.name} --cluster {cluster} --seq-len {workload.seq_len} "
        f"--global-batch {workload.global_batch}"
    )


def memory_limit(options: TrainOptions) -> int | None:
    """Bytes that a rank may hold; None: what there is. Raises OptionError."""
    if options.memory_per_rank is None:
        return None
    found = parse_bytes(options.memory_per_rank)
    if found < 1:
        raise OptionError("memory_per_rank is 0; a rank needs some", hint="--memory-per-rank 1.2GB")
    return found


def reject_memory_limit(options: TrainOptions) -> None:
    """Refuse a limit that would not be held. Raises OptionError."""
    if memory_limit(options) is None:
        return
    if on_cuda(options):
        raise OptionError(
            "--memory-per-rank counts the tensors of CPU ranks; a GPU has the memory it has",
            hint="--device cpu",
        )


def allowed(spec: RunSpec) -> Allowed | None:
    """What a job may hold; None: where it is sure to fit this machine, or its GPUs are not known.

    Raises:
        OptionError: a limit that is none.
    """
    each = memory_limit(spec.options)
    if each is not None:
        return Allowed(each)
    if on_cuda(spec.options):
        from hocket.planning.fit import HEADROOM
        from hocket.probing import devices

        free = devices.free_device_memory(spec.layout.world_size)
        return None if free is None else Allowed(int(free * (1 - HEADROOM)), gpu=True)
    from hocket.runtime.host_memory import free_host_memory

    here = free_host_memory()
    return Allowed(here, together=True) if _least(spec) > SURE * here else None


def _least(spec: RunSpec) -> float:
    """About the bytes of all ranks, by the sizes alone: a dense model's state, and activations of
    34 bytes a value (Korthikanti et al. 2022, section 4.1, without attention's matrix)."""
    from hocket.models.source import run_source

    sizes, layout = run_source(spec).dimensions, spec.layout
    width = sizes.hidden_size
    base = spec.options.quantize_base
    state = 4.0 if spec.options.lora_rank is not None else 16.0
    state = state if base is None else QUANTIZED_BASES[base]
    tokens = spec.workload.global_batch * spec.workload.seq_len / (layout.microbatches or 1)
    activations = tokens * (34 * width * sizes.num_layers + 8 * sizes.vocab_size)
    return defaults.parameters(sizes) * state * (1 if layout.zero else layout.dp) + activations


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fit:
    """What a job is predicted to hold against what it may.

    Attributes:
        ranks: bytes by kind, a row for each rank.
        need, may: bytes of the ranks that count, and what they may hold.
        tried: other layouts and their need, those that change least first.
    """

    ranks: list[dict[str, int]]
    may: Allowed
    tried: list[tuple[Layout, int]] = dataclasses.field(default_factory=list)

    @property
    def need(self) -> int:
        return self.may.need([row["total"] for row in self.ranks])

    @property
    def ok(self) -> bool:
        return self.need <= self.may.bytes

    @property
    def fitting(self) -> list[tuple[Layout, int]]:
        return [(layout, need) for layout, need in self.tried if need <= self.may.bytes]


def require_memory(launcher: Launcher, spec: RunSpec, schedule: str) -> list[dict[str, int]] | None:
    """What each rank will hold, by kind, if that is allowed; None where it is not predicted.

    Args:
        spec: with the limit in its options. schedule: its text.

    Raises:
        LayoutError: the job would hold more, with the layouts that fit.
    """
    fit = predicted(launcher, spec, schedule)
    if fit is None:
        return None
    if not fit.ok:
        raise _over_limit(fit, spec)
    return fit.ranks


def fitted(
    launcher: Launcher, folder: RunFolder, spec: RunSpec, *, accumulate: bool
) -> tuple[RunSpec, list[dict[str, int]] | None]:
    """As `require_memory`, of a run that is written down: with more microbatches where that makes
    it fit
    and `accumulate` allows it, its folder rewritten.

    Raises:
        LayoutError: as `require_memory`.
    """
    fit = predicted(launcher, spec, folder.schedule_file.read_text())
    if fit is None or fit.ok:
        return spec, None if fit is None else fit.ranks
    plain = dataclasses.replace(spec.layout, microbatches=None)
    for layout, _ in fit.fitting if accumulate else ():
        if dataclasses.replace(layout, microbatches=None) == plain:
            from hocket.schedules.registry import build_schedule

            spec = dataclasses.replace(spec, layout=layout)
            schedule = str(build_schedule(layout, layout.microbatches or 1))
            write_text(folder.schedule_file, schedule)
            folder.save(spec)
            return spec, require_memory(launcher, spec, schedule)
    raise _over_limit(fit, spec)


def predicted(launcher: Launcher, spec: RunSpec, schedule: str) -> Fit | None:
    """What a job is predicted to hold, and of other layouts where it is too much; None where it is
    not predicted: it is sure to fit, or the model's operations are not known."""
    may = allowed(spec)
    if may is None or spec.layout.data_parallel == "threads":
        return None
    if on_cuda(spec.options):
        return _on_gpus(launcher, spec, schedule, may)
    events = _forecast(launcher, spec, schedule, may)
    if "error" in events[0]:
        return None
    tried = [(Layout.parse(event["layout"]), event["need"]) for event in events[1:]]
    return Fit(ranks=events[0]["ranks"], may=may, tried=tried)


def _on_gpus(launcher: Launcher, spec: RunSpec, schedule: str, may: Allowed) -> Fit | None:
    """By the planner's model of memory: nothing is executed."""
    from hocket.cost.measured_memory import gpu_memory_rows
    from hocket.jobs.forecast import run_shape
    from hocket.jobs.rehearsal_fit import alternatives
    from hocket.schedules.registry import build_schedule
    from hocket.spec.schedule import Schedule

    try:
        shape = run_shape(spec, launcher)
    except HocketError:
        return None
    fit = Fit(ranks=gpu_memory_rows(shape, spec, Schedule.parse(schedule)), may=may)
    if fit.ok:
        return fit
    tried = []
    for layout in [*microbatched(spec), *alternatives(spec)]:
        other = dataclasses.replace(spec, layout=layout)
        with contextlib.suppress(HocketError):
            rows = gpu_memory_rows(shape, other, build_schedule(layout, layout.microbatches or 1))
            tried.append((layout, max(row["total"] for row in rows)))
        if sum(need <= may.bytes for _, need in tried) == PROPOSED:
            break
    return dataclasses.replace(fit, tried=tried)


def accumulated(spec: RunSpec, capacity: int) -> Layout:
    """The layout with as few microbatches, but at least its own, as are predicted to fit a GPU of
    `capacity` bytes; as it is where none of them does, or the model cannot be traced."""
    from hocket.cost.measured_memory import gpu_memory_rows
    from hocket.jobs.forecast import run_shape
    from hocket.planning.fit import HEADROOM
    from hocket.schedules.registry import build_schedule

    with contextlib.suppress(HocketError):
        shape = run_shape(spec)
        for layout in [spec.layout, *microbatched(spec)]:
            other = dataclasses.replace(spec, layout=layout)
            rows = gpu_memory_rows(shape, other, build_schedule(layout, layout.microbatches or 1))
            if max(row["total"] for row in rows) <= capacity * (1 - HEADROOM):
                return layout
    return spec.layout


def _over_limit(fit: Fit, spec: RunSpec) -> LayoutError:
    """A job that holds more than it may, with the layouts that fit."""
    from hocket.models.source import run_source

    may, ranks, need = fit.may, fit.ranks, fit.need
    name = _named(spec.layout, spec)
    if may.together:
        many = len(ranks)
        has = f"{name} needs {_gb(need)} on its {many} rank{'s' * (many > 1)}, "
        has += f"and this machine has {_gb(may.bytes)} of memory free"
    else:
        has = f"a rank of {name} needs {_gb(need)} of {_gb(may.bytes)}"
        if may.gpu:
            from hocket.planning.fit import HEADROOM

            has += f", what is free on its GPU less {HEADROOM:.0%}"
    each = "in all" if may.together else "each"
    plan = planned(run_source(spec), spec.workload)
    limited = spec.options.memory_per_rank is not None
    if fit.fitting:
        listed = [(_named(layout, spec), size) for layout, size in fit.fitting]
        found = ", ".join(f"{layout} with {_gb(size)} {each}" for layout, size in listed)
        return LayoutError(f"{has}; fits at {found}", hint=f"--layout {listed[0][0]}")
    least = min(fit.tried, key=lambda one: one[1], default=None)
    if least is not None:
        return LayoutError(
            f"{has}, and no layout that was tried fits: {_named(least[0], spec)} comes nearest "
            f"with {_gb(least[1])}",
            hint=f"--layout {_named(least[0], spec)} {_limit(least[1])}" if limited else plan,
        )
    standing = sum(row["total"] - row["activations"] for row in ranks) // spec.layout.dp
    room = "this machine" if may.together else f"{MOST_RANKS} ranks of {_gb(may.bytes)}"
    return LayoutError(
        f"{has}; parameters, gradients and optimizer state alone are {_gb(standing)}, more than "
        f"{room} {'can hold' if may.together else 'hold'}",
        hint=_limit(need) if limited else plan,
    )


def _limit(need: int) -> str:
    """The flag of a limit of at least `need` bytes."""
    return f"--memory-per-rank {-(-need // 10**6)}MB"


def predicted_and_counted(
    predicted: list[dict[str, int]], counted: tuple[dict[str, int], ...]
) -> str:
    """The peak rank as predicted and as counted, in words."""
    was = max(row["total"] for row in counted)
    said = max(row["total"] for row in predicted)
    return (
        f"peak memory per rank: {_gb(said)} predicted, {_gb(was)} counted "
        f"({(said - was) / was:+.1%})"
    )


def _named(layout: Layout, spec: RunSpec) -> str:
    """A layout as it can be pasted after --layout: its degrees, its ZeRO stage, what is recomputed,
    and its microbatches where they would be others without."""
    from hocket.jobs.validate import resolved_microbatches

    fields = [f"zero={layout.zero}"] if layout.zero else []
    if layout.recompute != "none":
        fields.append(f"recompute={layout.recompute}")
    usual = resolved_microbatches(dataclasses.replace(layout, microbatches=None), spec.workload)
    if layout.microbatches not in (None, usual):
        fields.append(f"microbatches={layout.microbatches}")
    return ":".join([layout.axes_text(), *([",".join(fields)] if fields else [])])


def _gb(count: float) -> str:
    return format_bytes(count)


def _forecast(
    launcher: Launcher, spec: RunSpec, schedule: str, may: Allowed
) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []

    def hear(event: dict[str, Any]) -> None:
        if event["event"] == "memory forecast":
            found.append(event)

    launcher.run(
        "hocket.ranks.memory:main",
        1,
        {
            "spec": spec.to_json(),
            "schedule": schedule,
            "allowed": dataclasses.asdict(may),
            "others": [str(layout) for layout in (*microbatched(spec), *_smaller_layouts(spec))],
        },
        hear,
        startup_timeout=300.0,
        silence_timeout=600.0,
    )
    return found


def microbatched(spec: RunSpec) -> Iterator[Layout]:
    """The same layout with more microbatches."""
    from hocket.jobs.validate import validate_layout
    from hocket.models.source import run_source

    model = run_source(spec).dimensions
    for count in divisors(spec.workload.global_batch // spec.layout.dp):
        if count > (spec.layout.microbatches or 1):
            more = dataclasses.replace(spec.layout, microbatches=count)
            with contextlib.suppress(HocketError):
                yield validate_layout(model, more, spec.workload)


def _smaller_layouts(spec: RunSpec) -> Iterator[Layout]:
    """Other legal layouts of at least as many ranks, the fewest first: the same ranks under ZeRO,
    then pipelines before tensors, and data parallel under ZeRO."""
    from hocket.jobs.validate import validate_layout
    from hocket.models.source import run_source

    model = run_source(spec).dimensions
    size = spec.layout.world_size
    while size <= MOST_RANKS:
        shapes = [(dp, pp) for dp in divisors(size) for pp in divisors(size // dp)]
        splits = [
            Layout(dp=dp, pp=pp, tp=size // dp // pp)
            for dp, pp in sorted(shapes, key=lambda each: (each[0], -each[1]))
        ]
        mine = spec.layout.axes_text()
        same = [
            dataclasses.replace(spec.layout, zero=zero)
            for zero in range(spec.layout.zero + 1, 4)
            if size == spec.layout.world_size and spec.layout.dp > 1
        ]
        plain = [each for each in splits if each.axes_text() != mine]
        others = [Layout(dp=size, zero=zero) for zero in (1, 2, 3) if mine != f"dp{size}"]
        for layout in [*same, *plain, *others]:
            if not runs(layout):
                continue
            try:
                yield validate_layout(model, layout, spec.workload)
            except HocketError:
                continue
        size *= 2
