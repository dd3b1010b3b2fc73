"""The choice among the layouts that a machine can run: the fastest that fits, and what was weighed.

candidates -> what each can take at the least -> played from the least upwards, as long as a
layout can still be the fastest; and where none fits, the same again with what saves memory
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable

from hocket.cost.measured_prices import StepProblem, step_prices
from hocket.planning.machine_forecast import MeasuredMachine, forecast, rates_of
from hocket.schedules.registry import build
from hocket.spec import legality
from hocket.spec.errors import LayoutError, OptionError, ScheduleError
from hocket.spec.forecast import Alternative, Forecast
from hocket.spec.layout import Layout, divisors
from hocket.spec.model_shape import ModelShape
from hocket.spec.run import Workload
from hocket.spec.schedule import Schedule
from hocket.spec.step_prices import StepPrices
from hocket.spec.timeline import Timeline
from hocket.spec.units import format_bytes

SCHEDULES = ("1f1b", "gpipe", "zero-bubble")
"""Those that are weighed for a pipeline."""

MOST_MICROBATCHES = 8
"""Times pp: beyond that a bubble is small and every microbatch only costs its overhead."""

MARGIN = 1.05
"""What a chosen layout must leave free: peaks were foretold within 5%."""


def candidates(shape: ModelShape, workload: Workload, most_ranks: int) -> list[Layout]:
    """Layouts of up to `most_ranks` ranks that a model and a batch allow, simplest first."""
    found = []
    for world in range(1, most_ranks + 1):
        for tp in divisors(world):
            if not legality.attention(shape.heads, shape.kv_heads, tp):
                continue
            for pp in divisors(world // tp):
                dp = world // tp // pp
                if not legality.stages(len(shape.layers), pp):
                    continue
                if not legality.batch(workload.global_batch, dp):
                    continue
                batch = workload.global_batch // dp
                if pp == 1:
                    found.append(Layout(dp=dp, tp=tp, microbatches=1))
                    found += [
                        Layout(dp=dp, tp=tp, microbatches=n)
                        for n in divisors(batch)
                        if 1 < n <= MOST_MICROBATCHES
                    ]
                    continue
                for count in divisors(batch):
                    if pp <= count <= MOST_MICROBATCHES * pp:
                        found += [
                            Layout(dp=dp, tp=tp, pp=pp, microbatches=count, schedule=name)
                            for name in SCHEDULES
                        ]
    return found


def leaner(layouts: Iterable[Layout]) -> list[Layout]:
    """The same layouts with what holds less and takes longer: the state in shares (ZeRO), slices of
    the sequence, layers that are run again in backward."""
    found = []
    for layout in layouts:
        for recompute in ("none", "full"):
            for zero in (0, 1, 2, 3) if layout.dp > 1 else (0,):
                for slices in (False, True) if layout.tp > 1 else (False,):
                    if recompute != "none" or zero or slices:
                        one = dataclasses.replace(
                            layout, recompute=recompute, zero=zero, sequence_parallel=slices
                        )
                        found.append(one)
    return found


def choose(
    shape: ModelShape,
    workload: Workload,
    machine: MeasuredMachine,
    layouts: Iterable[Layout],
    *,
    otherwise: Callable[[], Iterable[Layout]] | None = None,
    bucket_mb: float = 25.0,
    clip: bool = True,
    shown: int = 12,
) -> tuple[Forecast, Timeline]:
    """The forecast of the fastest layout that fits, with what else was weighed.

    Args: as `weigh`.

    Raises:
        OptionError: none of the layouts fits into what a rank may hold.
    """
    weighed = weigh(
        shape, workload, machine, layouts,
        otherwise=otherwise, bucket_mb=bucket_mb, clip=clip, shown=shown,
    )  # fmt: skip
    return best_of(weighed, shape, workload, shown)


def best_of(
    weighed: list[tuple[Forecast, Timeline]], shape: ModelShape, workload: Workload, shown: int = 12
) -> tuple[Forecast, Timeline]:
    """The first of what `weigh` returned, with the others beside it.

    Raises:
        OptionError: there is none, or none fits into what a rank may hold.
    """
    if not weighed:
        raise OptionError(
            f"no layout of {shape.name} with a global batch of {workload.global_batch} is legal "
            "on this machine",
            hint="--layout dp1",
        )
    best, timeline = weighed[0]
    if not _fits(best):
        least = min(weighed, key=lambda pair: max(pair[0].peak_bytes))[0]
        raise OptionError(
            f"{shape.name} fits in no layout of this machine: the least is "
            f"{format_bytes(max(least.peak_bytes))} a rank in {least.layout}, a rank may hold "
            f"{format_bytes(least.capacity)}",
            hint="a smaller --global-batch or --seq-len, or more --microbatches",
        )
    return beside(best, (one for one, _ in weighed), shown), timeline


def beside(best: Forecast, weighed: Iterable[Forecast], shown: int = 12) -> Forecast:
    """A forecast with what else was weighed, itself among it, best first."""
    others = [one for one in weighed if one.layout != best.layout]
    rows = sorted([best, *others], key=_order)[:shown]
    if best not in rows:
        rows[-1] = best
    return dataclasses.replace(
        best,
        alternatives=tuple(
            Alternative(
                layout=one.layout,
                step_seconds=one.step_seconds,
                memory=max(one.peak_bytes),
                bubble=one.bubble,
                fits=_fits(one),
                chosen=one is best,
            )
            for one in rows
        ),
    )


def weigh(
    shape: ModelShape,
    workload: Workload,
    machine: MeasuredMachine,
    layouts: Iterable[Layout],
    *,
    otherwise: Callable[[], Iterable[Layout]] | None = None,
    bucket_mb: float = 25.0,
    clip: bool = True,
    shown: int = 12,
) -> list[tuple[Forecast, Timeline]]:
    """Forecasts of layouts, those that fit first, then the fastest first.

    At least `shown` are played (as far as there are so many), and all that could be the fastest.

    Args:
        otherwise: further ones, weighed as well where none of `layouts` fits.
    """
    weighed: list[tuple[Forecast, Timeline]] = []
    best_yet = math.inf
    for bound, job in _bounded(shape, workload, machine, layouts, bucket_mb=bucket_mb, clip=clip):
        if bound > best_yet and len(weighed) >= shown:
            continue  # it cannot be the fastest, and enough is shown
        one, timeline = forecast(
            shape,
            job.layout,
            workload,
            machine,
            schedule=job.schedule,
            bucket_mb=bucket_mb,
            clip=clip,
        )
        weighed.append((one, timeline))
        if _fits(one):
            best_yet = min(best_yet, one.step_seconds)
    if otherwise is not None and best_yet == math.inf:
        weighed += weigh(
            shape, workload, machine, otherwise(), bucket_mb=bucket_mb, clip=clip, shown=shown
        )
    return sorted(weighed, key=lambda pair: _order(pair[0]))


def _order(one: Forecast) -> tuple[bool, float]:
    return not _fits(one), one.step_seconds


def _fits(one: Forecast) -> bool:
    return not one.capacity or MARGIN * max(one.peak_bytes) <= one.capacity


def _bounded(
    shape: ModelShape,
    workload: Workload,
    machine: MeasuredMachine,
    layouts: Iterable[Layout],
    *,
    bucket_mb: float,
    clip: bool,
) -> list[tuple[float, StepProblem]]:
    """The layouts with the least that each can take, the least first."""
    found = []
    for layout in layouts:
        try:
            schedule = build(layout, layout.microbatches or 1)
            job = StepProblem(
                shape=shape,
                layout=layout,
                workload=workload,
                schedule=schedule,
                bucket_mb=bucket_mb,
                clip=clip,
            )
            prices = step_prices(job, *rates_of(job, machine))
        except (LayoutError, ScheduleError):
            continue
        found.append((least_seconds(prices, schedule, layout, machine), job))
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
