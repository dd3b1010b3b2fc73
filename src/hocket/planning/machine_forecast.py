"""The forecast of a training job on CPU cores that were measured.

ModelShape x Measured x Layout x batch -> StepPrices -> the very Schedule, simulated on the
machine's cores -> Timeline, step time, memory
"""

from __future__ import annotations

import dataclasses

from hocket.cost.measured_links import CROSSED, MeasuredLinks
from hocket.cost.measured_memory import memory_rows
from hocket.cost.measured_prices import step_prices
from hocket.cost.measured_rates import Rates
from hocket.cost.step_problem import StepProblem
from hocket.schedules.registry import build_schedule
from hocket.simulation.processors import Cores, Slowdown
from hocket.simulation.step import exposed, simulate_step
from hocket.spec.collectives import total
from hocket.spec.errors import LayoutError
from hocket.spec.forecast import Forecast
from hocket.spec.layout import Layout
from hocket.spec.links import Links as Wires
from hocket.spec.measured import MachineMeasurements
from hocket.spec.model_shape import ModelShape
from hocket.spec.run import Workload
from hocket.spec.schedule import Schedule
from hocket.spec.timeline import LANES, Timeline


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeasuredMachine:
    """A measured machine, as a job uses it.

    Attributes:
        measured: what was measured. backend: of communication.
        name: for people. capacity: bytes that a rank may hold; 0: its share of the memory.
        wires: links that are emulated, with their scale.
    """

    measured: MachineMeasurements
    backend: str = "shm"
    name: str = ""
    capacity: int = 0
    wires: Wires | None = None

    def room(self, ranks: int) -> int:
        """Bytes that each of so many ranks may hold; 0 if unknown."""
        return self.capacity or self.measured.host.memory // ranks

    @property
    def slowdown(self) -> Slowdown:
        """What n ranks at work cost each other, as a step's work was measured to; where it was not,
        products and memory traffic, by halves."""
        points = tuple(
            (s.ranks, s.step or (s.product * s.stream) ** 0.5)
            for s in self.measured.sharing
            if s.ranks > 1
        )
        return Cores(self.measured.host.cores, points)

    def unlike(self, ranks: int) -> float:
        """How far apart equal ranks are, as was measured of so many or the nearest number."""
        known = [s for s in self.measured.sharing if s.ranks > 1]
        if not known:
            return 0.0
        return min(known, key=lambda s: abs(s.ranks - ranks)).unlike


def step_problem(
    shape: ModelShape,
    layout: Layout,
    workload: Workload,
    *,
    schedule: Schedule | None = None,
    bucket_mb: float = 25.0,
) -> StepProblem:
    """One layout's step.

    Args:
        shape: traced in the workload's dtype.
        layout: with its microbatches.
        schedule: what will run. None: the layout's.

    Raises:
        LayoutError, ScheduleError: the schedule cannot be built, or replicas are threads.
    """
    if layout.data_parallel == "threads":
        raise LayoutError("replicas in threads share one interpreter: no prediction")
    return StepProblem(
        shape=shape,
        layout=layout,
        workload=workload,
        schedule=schedule or build_schedule(layout, layout.microbatches or 1),
        bucket_mb=bucket_mb,
    )


def machine_forecast(job: StepProblem, machine: MeasuredMachine) -> tuple[Forecast, Timeline]:
    """What a job takes, and the Timeline of one step.

    Raises:
        OptionError: the machine's measurements hold no products.
    """
    layout, workload, schedule = job.layout, job.workload, job.schedule
    rates, links = rates_of(job, machine)
    prices = step_prices(job, rates, links)
    unlike = machine.unlike(layout.world_size)
    simulated = simulate_step(schedule, layout, prices, machine.slowdown, unlike=unlike)
    memory = memory_rows(job)
    timeline = dataclasses.replace(
        simulated.timeline, peak_bytes=tuple(row["total"] for row in memory)
    )
    measured = machine.measured
    talk = exposed(schedule, layout, prices)
    busy = [sum(e.end - e.start for e in timeline.events if e.lane == lane) for lane in LANES]
    found = Forecast(
        layout=str(layout),
        step_seconds=simulated.seconds,
        tokens_per_second=workload.global_batch * workload.seq_len / simulated.seconds,
        bubble=timeline.bubble,
        idle=timeline.idle,
        memory=tuple(memory),
        exposed=talk,
        compute=busy[0] / layout.world_size,
        communication=busy[1] / layout.world_size,
        collectives=tuple(total(job.communication())),
        capacity=machine.room(layout.world_size),
        links=dict.fromkeys(talk, _link(machine)),
        cluster=machine.name or measured.host.name,
        measured=f"{measured.date}, {'quick' if measured.quick else 'full'}",
        notes=(*rates.notes, *links.notes, *_conditions(measured)),
    )
    return found, timeline


def rates_of(job: StepProblem, machine: MeasuredMachine) -> tuple[Rates, MeasuredLinks]:
    """What a job's operations and its messages take."""
    return Rates(machine.measured, job.workload.dtype), MeasuredLinks(
        machine.measured,
        machine.backend,
        wires=machine.wires,
        layout=job.layout,
        element_bytes=job.element_bytes,
    )


def _link(machine: MeasuredMachine) -> str:
    if machine.wires is not None:
        return "+".join(link.name for link, _ in machine.wires.tiers)
    return CROSSED.get(machine.backend, machine.backend)


BUSY = 0.1
"""Cores' worth of other programs from which a probe was disturbed."""


def _conditions(measured: MachineMeasurements) -> list[str]:
    """Under what the machine was measured, where that is not how a run finds it."""
    found = []
    if measured.threads != 1:
        found.append(f"probed with {measured.threads} threads a rank")
    if measured.host.load > BUSY:
        found.append(
            f"other programs took {measured.host.load:.2g} cores while it was measured; runs are "
            "predicted as if they had the machine to themselves"
        )
    return found
