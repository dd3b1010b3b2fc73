"""Memory of a job: what `--memory-per-rank` allows, held against the forecast before ranks start.

One process of the warm server plays a step of each rank on tensors without memory and counts; where
that is more than a rank may hold, it plays other layouts, from few ranks to many, until some fit.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from hocket.jobs.precision import on_cuda
from hocket.spec.capabilities import runs
from hocket.spec.errors import HocketError, LayoutError, OptionError
from hocket.spec.layout import Layout, divisors
from hocket.spec.run import RunSpec, TrainOptions
from hocket.spec.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from hocket.launch import Launcher, RankContext

SEARCH = 20.0
"""Seconds after which no larger worlds are looked at."""

MOST_RANKS = 16
"""Ranks up to which layouts that fit are looked for."""


def limit(options: TrainOptions) -> int | None:
    """Bytes that a rank may hold; None: what there is. Raises OptionError."""
    if options.memory_per_rank is None:
        return None
    found = parse_bytes(options.memory_per_rank)
    if found < 1:
        raise OptionError("memory_per_rank is 0; a rank needs some", hint="--memory-per-rank 1.2GB")
    return found


def checked(options: TrainOptions) -> None:
    """Refuse a limit that would not be held. Raises OptionError."""
    if limit(options) is None:
        return
    if on_cuda(options):
        raise OptionError(
            "--memory-per-rank counts the tensors of CPU ranks; a GPU has the memory it has",
            hint="--device cpu",
        )


def require(launcher: Launcher, spec: RunSpec, schedule: str) -> list[dict[str, int]] | None:
    """What each rank will hold, by kind, if that is allowed; None where it cannot be foretold.

    Args:
        spec: with the limit in its options. schedule: its text.

    Raises:
        LayoutError: a rank would hold more, with the layouts that fit.
    """
    allowed = limit(spec.options)
    if allowed is None or spec.layout.data_parallel == "threads":
        return None
    events = _forecast(launcher, spec, schedule)
    first = events[0]
    if "error" in first:
        return None
    ranks: list[dict[str, int]] = first["ranks"]
    need = max(row["total"] for row in ranks)
    if need <= allowed:
        return ranks
    has = f"a rank of {_named(spec.layout)} needs {_gb(need)} of {_gb(allowed)}"
    fitting = [e for e in events[1:] if e["peak"] <= allowed]
    if fitting:
        told = ", ".join(f"{e['layout']} with {_gb(e['peak'])} each" for e in fitting)
        raise LayoutError(f"{has}; fits at {told}", hint=f"--layout {fitting[0]['layout']}")
    least = min(events[1:], key=lambda e: e["peak"], default=None)
    if least is not None:
        raise LayoutError(
            f"{has}, and no layout that was tried fits: {least['layout']} comes nearest with "
            f"{_gb(least['peak'])}",
            hint="a smaller --global-batch or --seq-len, or more memory",
        )
    standing = sum(row["total"] - row["activations"] for row in ranks) // spec.layout.dp
    raise LayoutError(
        f"{has}; parameters, gradients and optimizer state alone are {_gb(standing)}, more than "
        f"{MOST_RANKS} ranks of {_gb(allowed)} hold",
        hint=f"--memory-per-rank {_gb(need).replace(' ', '')}",
    )


def beside(predicted: list[dict[str, int]], counted: tuple[dict[str, int], ...]) -> str:
    """The fullest rank as foretold and as counted, in words."""
    was = max(row["total"] for row in counted)
    said = max(row["total"] for row in predicted)
    return (
        f"memory of the fullest rank: {_gb(said)} predicted, {_gb(was)} counted "
        f"({(said - was) / was:+.1%})"
    )


def _named(layout: Layout) -> str:
    """A layout as it can be pasted after --layout: its degrees, and its ZeRO stage."""
    return f"{layout.axes_text()}:zero={layout.zero}" if layout.zero else layout.axes_text()


def _gb(count: float) -> str:
    return format_bytes(count)


def _forecast(launcher: Launcher, spec: RunSpec, schedule: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []

    def hear(event: dict[str, Any]) -> None:
        if event["event"] == "memory forecast":
            found.append(event)

    launcher.run(
        "hocket.jobs.memory:main",
        1,
        {"spec": spec.to_json(), "schedule": schedule},
        hear,
        startup_timeout=300.0,
        silence_timeout=600.0,
    )
    return found


def main(context: RankContext, payload: dict[str, Any]) -> None:
    """The process's side: the run's own layout, and others if it does not fit."""
    from hocket.spec.schedule import Schedule
    from hocket.training.memory_forecast import forecast

    spec, schedule = RunSpec.from_json(payload["spec"]), Schedule.parse(payload["schedule"])
    allowed = limit(spec.options)
    assert allowed is not None
    say = "memory forecast"
    try:
        rows = [m.to_json() for m in forecast(spec, schedule)]
    except HocketError:
        raise
    except Exception as error:  # fake tensors do not know every operation of every family
        context.emit({"event": say, "error": f"{type(error).__name__}: {error}"})
        return
    context.emit({"event": say, "layout": _named(spec.layout), "ranks": rows})
    if max(row["total"] for row in rows) <= allowed:
        return
    standing = sum(row["total"] - row["activations"] for row in rows) / spec.layout.dp
    if standing > MOST_RANKS * allowed:
        return
    ranks, fits = 0, False
    end = time.monotonic() + SEARCH
    fit: set[str] = set()
    for layout in candidates(spec):
        if layout.world_size > ranks and (fits or time.monotonic() > end):
            return
        # With ZeRO data ranks share a state; what they share of it is at most all.
        if standing / layout.world_size * (1 if layout.zero else layout.dp) > allowed:
            continue
        if layout.axes_text() in fit:
            continue  # a lower stage is enough
        ranks = layout.world_size
        peak = _peak(spec, layout)
        context.emit({"event": say, "layout": _named(layout), "peak": peak})
        if peak <= allowed:
            fits = True
            fit.add(layout.axes_text())


def _peak(spec: RunSpec, layout: Layout) -> int:
    from hocket.schedules.registry import build
    from hocket.training.memory_forecast import forecast

    schedule = build(layout, layout.microbatches or 1)
    other = dataclasses.replace(spec, layout=layout)
    return max(memory.total for memory in forecast(other, schedule))


def candidates(spec: RunSpec) -> Iterator[Layout]:
    """Other legal layouts of at least as many ranks, the fewest first: the same ranks under ZeRO,
    then pipelines before tensors, and data parallel under ZeRO."""
    from hocket.jobs.validate import validate
    from hocket.models.source import of_run

    model = of_run(spec).dimensions
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
                yield validate(model, layout, spec.workload)
            except HocketError:
                continue
        size *= 2
