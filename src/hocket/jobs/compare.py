"""The comparison: one model under every parallel strategy, with the same weights and data.

one process writes the reference -> each strategy: ranks -> equal? memory, collectives, idle, speed
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from hocket.jobs import forecast_policy, links, memory
from hocket.jobs.precision import device_kind, on_cuda
from hocket.jobs.prepare import job_spec
from hocket.jobs.request import JobRequest
from hocket.jobs.validate import validate_layout
from hocket.spec.collectives import total
from hocket.spec.comparison import (
    SWEEPS,
    Comparison,
    Point,
    Strategy,
    StrategyResult,
    chosen_strategies,
    strategies,
)
from hocket.spec.errors import LayoutError, ModelError, OptionError, RankMemoryError, unknown
from hocket.spec.layout import Layout, divisors
from hocket.spec.timeline import Event, Timeline

if TYPE_CHECKING:
    from hocket.jobs.forecast import Machine
    from hocket.launch import Launcher
    from hocket.models.source import ModelSource
    from hocket.spec.run import RunSpec
    from hocket.spec.schedule import Schedule

CHECKED = 2
"""Steps that are held against one process."""

MICROBATCHES = 4
"""Of the pipelines, where none are asked for."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompareRequest:
    """What to compare besides the job itself.

    Attributes:
        devices: ranks of each pure strategy. wanted: strategies by name or layout; empty: all.
        microbatches: of the pipelines. None: 4, or the most below it that divides the batch.
        input_work: milliseconds of Python for each sequence in the loaded measurement; 0: none.
    """

    devices: int = 2
    wanted: tuple[str, ...] = ()
    microbatches: int | None = None
    input_work: float = 5.0


def compare_request(**values: Any) -> CompareRequest:
    """`CompareRequest`, with values that can be. Raises OptionError."""
    found = CompareRequest(**values)
    if not 2 <= found.devices <= 64:
        raise OptionError(f"devices is {found.devices}; it must be in 2 .. 64", hint="--devices 2")
    if found.microbatches is not None and found.microbatches < 1:
        raise OptionError(
            f"microbatches is {found.microbatches}; it must be at least 1", hint="--microbatches 4"
        )
    if not 0 <= found.input_work <= 1000:
        raise OptionError(
            f"input_work is {found.input_work}; it must be in 0 .. 1000 ms", hint="--input-work 5"
        )
    return found


def pipeline_microbatches(asked: CompareRequest, batch: int) -> int:
    """Of the pipelines, for a batch of so many sequences.

    Raises:
        OptionError: as many as were asked for do not divide it; with the nearest that do.
    """
    fitting = divisors(batch)
    wanted = asked.microbatches
    if wanted is None:
        return max(count for count in fitting if count <= MICROBATCHES)
    if wanted in fitting:
        return wanted
    near = [max((n for n in fitting if n < wanted), default=None)]
    near.append(min((n for n in fitting if n > wanted), default=None))
    raise OptionError(
        f"a batch of {batch} sequences does not divide into {wanted} microbatches; it does into "
        f"{', '.join(map(str, fitting))}",
        hint=" or ".join(f"--microbatches {n}" for n in near if n is not None),
    )


def comparison_tables(found: Comparison) -> str:
    from hocket.reporting.comparison import comparison_text

    return comparison_text(found)


def sweep_report(request: JobRequest, axis: str, points: list[Point], width: int) -> str:
    from hocket.reporting import comparison

    tokens = request.workload.global_batch * request.workload.seq_len
    return comparison.sweep_text(axis, points, tokens, width)


def compare_strategies(
    request: JobRequest, asked: CompareRequest, *, on_strategy: Callable[[str], None] | None = None
) -> Comparison:
    """Run every strategy.

    Args:
        request: model, sizes and options; its layout and data are not looked at.
        on_strategy: called with each strategy's name before it runs.

    Raises:
        HocketError: the model cannot be found; RankFailure with a rank's own traceback.
    """
    from hocket.runtime.host_cores import usable_cores

    workload = request.workload
    count = pipeline_microbatches(asked, workload.global_batch)
    known = strategies(asked.devices, count, workload.global_batch)
    runs = chosen_strategies(asked.wanted, known)
    with Bench(request, asked, on_strategy) as bench:
        bench.say("the reference: one process, plain transformers")
        bench.reference()
        outcomes = []
        for strategy in runs:
            bench.say(f"{strategy.title}: {strategy.layout.axes_text()}")
            outcomes.append(bench.run(strategy))
    return Comparison(
        model=request.model,
        tokens=workload.global_batch * workload.seq_len,
        cores=usable_cores(),
        input_work=asked.input_work,
        outcomes=tuple(outcomes),
    )


def compare_sweep(
    request: JobRequest,
    asked: CompareRequest,
    axis: str,
    *,
    on_strategy: Callable[[str], None] | None = None,
) -> list[Point]:
    """Run the pipelines (or, over devices, each kind of parallelism) along one number.

    Args:
        axis: `microbatches`, `layers` or `devices`.

    Raises:
        OptionError: another axis.
    """
    if axis not in SWEEPS:
        message, hint = unknown("sweep", axis, SWEEPS)
        raise OptionError(message, hint=hint)
    pipeline_microbatches(asked, request.workload.global_batch)  # refused before anything starts
    points = []
    with Bench(request, dataclasses.replace(asked, input_work=0.0), on_strategy) as bench:
        for at, strategy, layers in _points(request, asked, axis):
            bench.say(f"{axis} {at}: {strategy.title}")
            source = None if layers is None else source_with_layers(bench.source, layers)
            points.append(Point(at=at, outcome=bench.run(strategy, source=source)))
    return points


def _points(
    request: JobRequest, asked: CompareRequest, axis: str
) -> Iterator[tuple[int, Strategy, int | None]]:
    batch, n = request.workload.global_batch, asked.devices
    if axis == "devices":
        yield 1, strategies(2, 1, batch)[0], None
        count = 2
        while count <= n:
            for strategy in strategies(count, pipeline_microbatches(asked, batch), batch):
                if strategy.name in ("data", "1f1b", "tensor"):
                    yield count, strategy, None
            count *= 2
        return
    pipelines = [("gpipe", "GPipe"), ("1f1b", "1F1B")]
    if axis == "microbatches":
        for count in divisors(batch):
            for name, title in pipelines:
                layout = Layout(pp=n, schedule=name, microbatches=count)
                yield count, Strategy(name=name, title=title, layout=layout), None
        return
    for layers in (n * 2**k for k in range(4)):
        for name, title in pipelines:
            layout = Layout(pp=n, schedule=name, microbatches=pipeline_microbatches(asked, batch))
            yield layers, Strategy(name=name, title=title, layout=layout), layers


class Bench:
    """A warm launcher, the model, and a folder for what one process computed.

    A context: strategies run inside it, one after the other.

    Args:
        request: what every strategy runs. asked: see `CompareRequest`.
        on_strategy: called with what is being done.
    """

    def __init__(
        self,
        request: JobRequest,
        asked: CompareRequest,
        on_strategy: Callable[[str], None] | None = None,
    ) -> None:
        from hocket.launch import joined_context
        from hocket.models.source import resolve_model

        if joined_context() is not None:
            raise OptionError(
                "compare starts its own ranks; it was started as one of another launcher's",
                hint="run it without torchrun",
            )
        if request.workload.dtype != "fp32":
            raise OptionError(
                f"dtype is {request.workload.dtype}; equality is checked in fp32",
                hint="--dtype fp32",
            )
        device_kind(request.options)
        options = dataclasses.replace(request.options, dropout=0.0)
        self.request = dataclasses.replace(request, data=(), options=options)
        self.asked = asked
        trusted = options.trust_remote_code
        source = resolve_model(request.model, trust_remote_code=trusted, weights=False)
        memory.reject_untrainable(source, request.workload, options)
        self.source = resolve_model(source.repo or request.model, trust_remote_code=trusted)
        self.loops = _loops(asked.input_work) if asked.input_work > 0 else 0
        self.say: Callable[[str], None] = on_strategy or (lambda text: None)
        self._reference: str | None = None
        self._target: Machine | None = None
        forecast_policy.reject_cluster(request.cluster, options)
        links.checked_links(options, Layout(tp=asked.devices))
        memory.reject_memory_limit(options)

    def __enter__(self) -> Self:
        from hocket.launch import Launcher

        options = self.request.options
        preload = ("hocket.training.compare", "hocket.runtime.shm")
        with contextlib.ExitStack() as stack:
            folder = tempfile.TemporaryDirectory(prefix="hocket-compare-")
            self._folder = Path(stack.enter_context(folder))
            launcher = Launcher(options.device, options.threads, preload=preload)
            self.launcher: Launcher = stack.enter_context(launcher)
            self._open = stack.pop_all()
        try:
            self._target = self._machine()
            self._feel(self.asked.devices)
        except BaseException:
            self._open.close()
            raise
        return self

    def _machine(self) -> Machine | None:
        """What strategies are predicted for, CPU cores measured now if need be; None: nothing."""
        from hocket.jobs import gpu_run, machine

        wanted, device = self.request.cluster, self.request.options.device
        if wanted == forecast_policy.NONE:
            return None
        if on_cuda(self.request.options):
            return gpu_run.gpu_cluster(wanted)
        if wanted == forecast_policy.AUTO and machine.kept(device) is None:
            self.say(f"measuring this machine, once: up to {forecast_policy.LONGEST:.0f} s")
        return machine.named_cluster(wanted, device=device).measured

    def _feel(self, ranks: int) -> None:
        """Scale the links once, so that every strategy feels the same ones."""
        if self.request.options.emulate_links is None:
            return
        workload = self.request.workload
        config = self.source.config
        spec = job_spec(self.source, self.request, Layout(tp=ranks), config, "compare")
        self.say(
            f"scaling {spec.options.emulate_links} to {workload.seq_len} x {workload.global_batch}"
        )
        emulated = links.settled(self.launcher, spec).options.emulate_links
        options = dataclasses.replace(self.request.options, emulate_links=emulated)
        self.request = dataclasses.replace(self.request, options=options)

    def __exit__(self, *_: object) -> None:
        self._open.close()

    @property
    def referred(self) -> bool:
        """Whether the reference has been computed."""
        return self._reference is not None

    def reference(self) -> None:
        """What one process computes, with plain transformers and torch."""
        workload = self.request.workload
        layout = validate_layout(self.source.dimensions, Layout(), workload)
        spec = job_spec(self.source, self.request, layout, self.source.config, "compare")
        folder = str(self._folder / "reference")
        payload = {"spec": spec.to_json(), "folder": folder, "steps": CHECKED}
        self._launch("hocket.training.check:run_reference", 1, payload)
        self._reference = folder

    def run(
        self,
        strategy: Strategy,
        *,
        source: ModelSource | None = None,
        request: JobRequest | None = None,
    ) -> StrategyResult:
        """One strategy; of another model or with other sizes than the bench's, if asked, which are
        then not held against one process.
        """
        from hocket.jobs.proxy import require_equal
        from hocket.schedules.registry import build_schedule

        other = source is not None or request is not None
        held: list[dict[str, int]] | None = None
        source, request = source or self.source, request or self.request
        try:
            layout = validate_layout(source.dimensions, strategy.layout, request.workload)
            assert layout.microbatches is not None
            schedule = build_schedule(layout, layout.microbatches)
            require_equal(self.launcher, source, layout, attention=request.options.attention)
            if request.options.memory_per_rank is not None:
                spec = job_spec(source, request, layout, source.config, "compare")
                held = memory.require_memory(self.launcher, spec, str(schedule))
        except (LayoutError, ModelError) as error:
            return StrategyResult(strategy=strategy, reason=error.message)
        strategy = dataclasses.replace(strategy, layout=layout)
        if layout.world_size == 1:  # threads and one process have no links
            options = dataclasses.replace(request.options, emulate_links=None)
            request = dataclasses.replace(request, options=options)
        spec = job_spec(source, request, layout, source.config, "compare")
        predicted = self._predicted(spec, schedule)
        if held is not None:
            predicted["required_bytes"] = float(max(row["total"] for row in held))
        payload = {
            "spec": spec.to_json(),
            "schedule": str(schedule),
            "steps": request.options.steps,
            "loops": 0 if other else self.loops,
        }
        if self._reference is not None and not other:
            payload |= {"reference": self._reference, "checked": CHECKED}
        try:
            found = self._launch("hocket.training.compare:main", layout.world_size, payload)
        except RankMemoryError as error:  # of replicas in threads it cannot be predicted
            return StrategyResult(strategy=strategy, reason=error.message)
        (event,) = (e for e in found if e["event"] == "way")
        return dataclasses.replace(outcome(strategy, event), predicted=predicted)

    def _predicted(self, spec: RunSpec, schedule: Schedule) -> dict[str, float]:
        """What the strategy is expected to come to; empty where there is no prediction."""
        from hocket.jobs import forecast

        if self._target is None or spec.layout.data_parallel == "threads":
            return {}
        found, timeline = forecast.predicted_run(
            spec, self._target, launcher=self.launcher, schedule=schedule
        )
        if not found.known:
            return {}
        known = {
            "step_seconds": found.step_seconds,
            "bubble": found.bubble,
            "peak_bytes": float(max(found.peak_bytes)),
        }
        return known if timeline is None else {**known, "idle": timeline.idle}

    def _launch(self, entry: str, ranks: int, payload: dict[str, Any]) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        self.launcher.run(
            entry,
            ranks,
            payload,
            events.append,
            startup_timeout=300.0,
            silence_timeout=max(600.0, self.request.options.timeout),
        )
        return events


def outcome(strategy: Strategy, event: dict[str, Any]) -> StrategyResult:
    """What the ranks of a strategy said, put together."""
    from hocket.spec.check import CheckReport

    ranks = event["ranks"]
    events = [Event(**each) for rank in ranks for each in rank["events"]]
    timeline = Timeline.of("measured", len(ranks), events)
    equal = worst = None
    if event["report"] is not None:
        report = CheckReport.from_json(json.dumps(event["report"]))
        equal, worst = report.ok, report.worst_ratio
    return StrategyResult(
        strategy=strategy,
        step_seconds=max(rank["step_seconds"] for rank in ranks),
        processor_seconds=sum(rank["processor_seconds"] for rank in ranks),
        loaded_seconds=max((rank["loaded_seconds"] for rank in ranks), default=None)
        if "loaded_seconds" in ranks[0]
        else None,
        idle=timeline.idle,
        bubble=timeline.bubble,
        memory=tuple(row for rank in ranks for row in rank["memory"]),
        collectives=tuple(total(rank["collectives"] for rank in ranks)),
        layers=tuple(rank["layers"] for rank in ranks),
        equal=equal,
        worst=worst,
    )


def source_with_layers(source: ModelSource, layers: int) -> ModelSource:
    """The model with another number of layers, and random weights.

    Raises:
        ModelError: its configuration does not say how many it has.
    """
    from hocket.models.depth import config_with_layers

    config = config_with_layers(source.name, source.config, layers)
    return dataclasses.replace(source, config=config, weights=None)


def _loops(milliseconds: float) -> int:
    """Rounds of `training.compare.spend` that take so long on this processor by itself."""
    tried = 20_000
    best = min(_seconds_of(tried) for _ in range(5))
    return max(1, round(tried * milliseconds / 1e3 / best))


def _seconds_of(loops: int) -> float:
    began, total = time.thread_time(), 0
    for number in range(loops):
        total = (total * 31 + number) & 0xFFFFFFFF
    return max(1e-6, time.thread_time() - began)
