"""The choice among the layouts that a machine can run: the fastest that fits, and those considered.

candidates -> what each can take at the least -> simulated from the least upwards, as long as a
layout can still be the fastest; and where none fits, the same again with what saves memory
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from hocket.cost.measured_memory import memory_rows
from hocket.cost.measured_prices import step_prices
from hocket.cost.step_problem import StepProblem
from hocket.planning.machine_forecast import (
    MeasuredMachine,
    machine_forecast,
    rates_of,
    step_problem,
)
from hocket.spec.errors import LayoutError, OptionError, ScheduleError
from hocket.spec.forecast import Alternative, Forecast
from hocket.spec.layout import Layout
from hocket.spec.model_shape import ModelShape
from hocket.spec.run import Workload
from hocket.spec.schedule import Schedule
from hocket.spec.step_prices import StepPrices
from hocket.spec.timeline import Timeline
from hocket.spec.units import format_bytes

MARGIN = 1.05
"""What a chosen layout must leave free: peaks were predicted within 5%."""


def best_of(
    ranked: list[tuple[Forecast, Timeline]], shape: ModelShape, workload: Workload, shown: int = 12
) -> tuple[Forecast, Timeline]:
    """The first of what `evaluate_layouts` returned, with the others.

    Raises:
        OptionError: there is none.
        LayoutError: none fits into what a rank may hold.
    """
    if not ranked:
        raise OptionError(
            f"no layout of {shape.name} with a global batch of {workload.global_batch} is legal "
            "on this machine",
            hint="--layout dp1",
        )
    best, timeline = ranked[0]
    require_fit([one for one, _ in ranked], shape)
    return with_considered_layouts(best, (one for one, _ in ranked), shown), timeline


def require_fit(rows: Iterable[Forecast], shape: ModelShape) -> None:
    """Reject layouts of which none fits into what a rank may hold. Raises LayoutError."""
    least = min(rows, key=lambda one: (not fits_machine(one), max(one.peak_bytes)))
    if not fits_machine(least):
        raise LayoutError(
            f"{shape.name} fits in no layout of this machine: the least is "
            f"{format_bytes(max(least.peak_bytes))} a rank in {least.layout}, a rank may hold "
            f"{format_bytes(least.capacity)}",
            hint="a smaller --global-batch or --seq-len, or more --microbatches",
        )


def with_considered_layouts(
    best: Forecast, ranked: Iterable[Forecast], shown: int = 12
) -> Forecast:
    """A forecast with what else was considered, itself among it, best first."""
    others = (
        Alternative(
            layout=one.layout,
            step_seconds=one.step_seconds,
            memory=max(one.peak_bytes),
            bubble=one.bubble,
            fits=fits_machine(one),
        )
        for one in ranked
        if one.layout != best.layout
    )
    return best.among(others, fits=fits_machine(best), shown=shown)


def evaluate_layouts(
    shape: ModelShape,
    workload: Workload,
    machine: MeasuredMachine,
    layouts: Iterable[Layout],
    *,
    otherwise: Callable[[], Iterable[Layout]] | None = None,
    bucket_mb: float = 25.0,
    shown: int = 12,
) -> list[tuple[Forecast, Timeline]]:
    """Forecasts of layouts, those that fit first, then the fastest first.

    At least `shown` are simulated (as far as there are so many), and all that could be the fastest.

    Args:
        otherwise: further ones, considered as well where none of `layouts` fits.
    """
    ranked: list[tuple[Forecast, Timeline]] = []
    best_yet = math.inf
    for bound, job in _bounded(shape, workload, machine, layouts, bucket_mb=bucket_mb):
        if bound > best_yet and len(ranked) >= shown:
            continue  # it cannot be the fastest, and enough is shown
        one, timeline = machine_forecast(job, machine)
        ranked.append((one, timeline))
        if fits_machine(one):
            best_yet = min(best_yet, one.step_seconds)
    if otherwise is not None and best_yet == math.inf:
        ranked += evaluate_layouts(
            shape, workload, machine, otherwise(), bucket_mb=bucket_mb, shown=shown
        )
    return sorted(ranked, key=lambda pair: (not fits_machine(pair[0]), pair[0].step_seconds))


def fits_machine(one: Forecast) -> bool:
    """Whether its peak rank, with the margin that a choice leaves, is what a rank may hold."""
    return not one.capacity or MARGIN * max(one.peak_bytes) <= one.capacity


def holds(job: StepProblem, machine: MeasuredMachine) -> bool:
    """As `fits_machine`, of a layout whose step is not predicted."""
    room = machine.room(job.layout.world_size)
    return not room or MARGIN * max(row["total"] for row in memory_rows(job)) <= room


def _bounded(
    shape: ModelShape,
    workload: Workload,
    machine: MeasuredMachine,
    layouts: Iterable[Layout],
    *,
    bucket_mb: float,
) -> list[tuple[float, StepProblem]]:
    """The layouts with the least that each can take, the least first."""
    found = []
    for layout in layouts:
        try:
            job = step_problem(shape, layout, workload, bucket_mb=bucket_mb)
            prices = step_prices(job, *rates_of(job, machine))
        except (LayoutError, ScheduleError):
            continue
        found.append((least_seconds(prices, job.schedule, layout, machine), job))
    return sorted(found, key=lambda pair: pair[0])


def least_seconds(
    prices: StepPrices, schedule: Schedule, layout: Layout, machine: MeasuredMachine
) -> float:
    """What a step cannot be faster than: its slowest rank's work, and all work over the cores."""
    each = []
    for index, rank in enumerate(prices.ranks):
        work = rank.before + rank.norm + rank.optimizer + rank.after
        for stage in (prices.stages[number] for number in schedule.stages_of(index)):
            inside = (*stage.forward_collectives, *stage.backward_collectives)
            one = stage.forward + stage.backward + sum(c.give + c.take for c in inside)
            work += schedule.num_microbatches * one + stage.first_weight
        each.append(work)
    ranks = layout.world_size
    at_once = max(n / machine.slowdown(n) for n in range(1, ranks + 1))
    return max(*each, sum(each) * ranks / layout.pp / at_once)
