"""Comparison: parallel strategies for one job, and the result of each.

A strategy is a layout with its usual name. Every strategy runs the same model, weights and data, so
that the rows of a comparison differ in nothing else.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from hocket.spec.capabilities import runs
from hocket.spec.errors import LayoutError, OptionError, unknown
from hocket.spec.layout import Layout


@dataclasses.dataclass(frozen=True, kw_only=True)
class Strategy:
    """One way to split a job.

    Attributes:
        name: as `--strategies` takes it. title: its usual name. layout: how it is run.
    """

    name: str
    title: str
    layout: Layout


@dataclasses.dataclass(frozen=True, kw_only=True)
class StrategyResult:
    """The result of one strategy.

    Attributes:
        strategy: the one that ran. reason: why it could not; empty where it did.
        step_seconds: median of the timed steps. processor_seconds: of all ranks, a step.
        loaded_seconds: median with an input pipeline that is heavy on the CPU; None if not timed.
        idle: share of the recorded step in which ranks, on average, did not compute.
        bubble: share of the recorded step's pipeline span without compute.
        memory: of each rank (of each replica, under threads): bytes by kind, and their total.
        collectives: of all ranks in one step: rows of name, axis, phase, count, bytes.
        layers: of the model, held by each rank.
        equal: whether losses, gradients and values are those of one process; None if not asked.
        worst: the largest difference found, relative to what is allowed.
        predicted: the same names (`step_seconds`, `idle`, `bubble`, `peak_bytes`) as forecast
            before the run; empty where there is no forecast.
    """

    strategy: Strategy
    reason: str = ""
    step_seconds: float = 0.0
    processor_seconds: float = 0.0
    loaded_seconds: float | None = None
    idle: float = 0.0
    bubble: float = 0.0
    memory: tuple[dict[str, int], ...] = ()
    collectives: tuple[dict[str, Any], ...] = ()
    layers: tuple[int, ...] = ()
    equal: bool | None = None
    worst: float | None = None
    predicted: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def ran(self) -> bool:
        return not self.reason

    @property
    def peak_rank(self) -> dict[str, int]:
        """The bytes by kind of the rank that holds most; empty if nothing ran."""
        return max(self.memory, key=lambda row: row["total"], default={})

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        data = dataclasses.asdict(self)
        strategy = data.pop("strategy")
        names = {"strategy": strategy["name"], "title": strategy["title"]}
        return {**names, "layout": str(self.strategy.layout), **data}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """All strategies of one job.

    Attributes:
        model: as it was named. tokens: of one step. cores: that the ranks share.
        input_work: milliseconds of Python for each sequence, in the loaded measurement.
    """

    model: str
    tokens: int
    cores: int
    input_work: float
    outcomes: tuple[StrategyResult, ...]

    @property
    def equal(self) -> bool:
        """Whether every strategy that ran computes what one process computes."""
        return all(outcome.equal is not False for outcome in self.outcomes)

    def to_json(self) -> dict[str, Any]:
        """Plain data, throughput included."""
        rows = []
        for outcome in self.outcomes:
            row = outcome.to_json()
            seconds = outcome.step_seconds
            row["tokens_per_second"] = self.tokens / seconds if seconds else None
            rows.append(row)
        return {
            "model": self.model,
            "tokens_per_step": self.tokens,
            "cores": self.cores,
            "input_work_ms": self.input_work,
            "strategies": rows,
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
    """One point of a sweep: the number that is swept, and the result of one strategy there."""

    at: int
    outcome: StrategyResult


SWEEPS = ("microbatches", "layers", "devices")


def strategies(devices: int, microbatches: int, global_batch: int) -> tuple[Strategy, ...]:
    """One process, each kind of parallelism over `devices`, and pairs of them over four or more;
    of these, what the runtime can carry out.

    Args:
        devices: ranks (replicas, stages, slices) of each pure kind.
        microbatches: of the pipelines; fewer where a data rank has not as many sequences.
    """
    if devices < 2:
        raise OptionError(f"devices is {devices}; splitting takes two", hint="--devices 2")
    n = devices
    found = [
        ("one", "one process", "dp1"),
        ("threads", "DataParallel (threads)", f"dp{n}:data_parallel=threads"),
        ("data", "DistributedDataParallel", f"dp{n}"),
        ("zero1", "ZeRO-1: sharded optimizer", f"dp{n}:zero=1"),
        ("zero2", "ZeRO-2: gradients too", f"dp{n}:zero=2"),
        ("zero3", "ZeRO-3: parameters too", f"dp{n}:zero=3"),
        ("layerwise", "layer-wise, one batch at a time", f"pp{n}:schedule=sequential"),
        ("gpipe", "pipeline, GPipe", f"pp{n}:schedule=gpipe"),
        ("1f1b", "pipeline, 1F1B", f"pp{n}"),
        ("tensor", "tensor parallel", f"tp{n}"),
    ]
    half = max(4, n) // 2
    found += [
        ("data+pipeline", "data x pipeline", f"dp{half}.pp2"),
        ("data+tensor", "data x tensor", f"dp{half}.tp2"),
        ("pipeline+tensor", "pipeline x tensor", f"pp{half}.tp2"),
    ]
    if n >= 8:
        found.append(("all three", "data x pipeline x tensor", f"dp{n // 4}.pp2.tp2"))
    return tuple(
        Strategy(
            name=name, title=title, layout=_timed(Layout.parse(text), microbatches, global_batch)
        )
        for name, title, text in found
        if runs(Layout.parse(text))
    )


ALIASES = {
    "ddp": "data",
    "dp": "data",
    "fsdp": "zero3",
    "tp": "tensor",
    "pp": "1f1b",
    "dataparallel": "threads",
}
"""Other names that `--strategies` takes."""


def _timed(layout: Layout, microbatches: int, global_batch: int) -> Layout:
    """The layout with as many microbatches as it can take; layer-wise takes the batch whole."""
    if layout.pp == 1 or layout.schedule == "sequential":
        return dataclasses.replace(layout, microbatches=1)
    most = max(1, min(microbatches, global_batch // layout.dp))
    while (global_batch // layout.dp) % most:
        most -= 1
    return dataclasses.replace(layout, microbatches=most)


def chosen_strategies(wanted: tuple[str, ...], known: tuple[Strategy, ...]) -> tuple[Strategy, ...]:
    """The strategies given by name or by layout; one process is always the first.

    Raises:
        OptionError: neither a strategy nor a layout; the nearest name is suggested.
    """
    if not wanted:
        return known
    by_name = {one.name: one for one in known}
    found = [by_name["one"]]
    for name in wanted:
        name = ALIASES.get(name, name)
        if name in by_name:
            strategy = by_name[name]
        else:
            try:
                layout = Layout.parse(name)
            except LayoutError:
                message, hint = unknown("strategy", name, (*by_name, *ALIASES))
                raise OptionError(f"{message}, or a layout", hint=hint) from None
            strategy = Strategy(name=name, title=layout.axes_text(), layout=layout)
        if strategy.layout not in [each.layout for each in found]:
            found.append(strategy)
    return tuple(found)
