"""The forecast of a training job on a machine that was measured, and the choice among layouts.

ModelShape x Measured x Layout x batch -> StepPrices -> the very Schedule, played on the
machine's cores -> Timeline, step time, memory
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from hocket.cost.measured_links import Links
from hocket.cost.measured_memory import memory_rows
from hocket.cost.measured_prices import Job, step_prices
from hocket.cost.measured_rates import Rates
from hocket.schedules.registry import build
from hocket.simulation.processors import Cores, Slowdown, alone
from hocket.simulation.step import exposed, play_step
from hocket.spec.errors import LayoutError, OptionError
from hocket.spec.forecast import Alternative, Forecast
from hocket.spec.layout import Layout, divisors
from hocket.spec.links import Links as Wires
from hocket.spec.measured import Measured
from hocket.spec.model_shape import ModelShape
from hocket.spec.run import Workload
from hocket.spec.schedule import Schedule
from hocket.spec.timeline import LANES, Timeline
from hocket.spec.units import format_bytes

SCHEDULES = ("1f1b", "gpipe", "zero-bubble")
"""Those that are weighed for a pipeline."""

MOST_MICROBATCHES = 8
"""Times pp: beyond that a bubble is small and every microbatch only costs its overhead."""

MARGIN = 1.05
"""What a chosen layout must leave free: peaks were foretold within 5%."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """A measured machine, as a job uses it.

    Attributes:
        measured: what was measured. backend: of communication.
        name: for people. capacity: bytes that a rank may hold; 0: its share of the memory.
        wires: links that are to be felt, with their scale.
    """

    measured: Measured
    backend: str = "shm"
    name: str = ""
    capacity: int = 0
    wires: Wires | None = None

    def room(self, ranks: int) -> int:
        """Bytes that each of so many ranks may hold; 0 if unknown."""
        if self.capacity:
            return self.capacity
        if self.measured.device == "cpu":
            return self.measured.host.memory // ranks
        return min((device.memory for device in self.measured.devices), default=0)

    @property
    def slowdown(self) -> Slowdown:
        """What n ranks at work cost each other: products and memory traffic, by halves."""
        if self.measured.device != "cpu":
            return alone
        points = tuple(
            (s.ranks, (s.product * s.stream) ** 0.5) for s in self.measured.sharing if s.ranks > 1
        )
        return Cores(self.measured.host.cores, points)


def forecast(
    shape: ModelShape,
    layout: Layout,
    workload: Workload,
    machine: Machine,
    *,
    schedule: Schedule | None = None,
    bucket_mb: float = 25.0,
    clip: bool = True,
) -> tuple[Forecast, Timeline]:
    """What a job takes, and the Timeline of one step.

    Args:
        shape: traced in the workload's dtype.
        layout: with its microbatches.
        schedule: what will run. None: the layout's.

    Raises:
        OptionError: the machine's measurements hold no products.
        LayoutError: what is no layout of processes.
    """
    if layout.data_parallel == "threads":
        raise LayoutError("replicas in threads share one interpreter: not foretold")
    schedule = schedule or build(layout, layout.microbatches or 1)
    job = Job(
        shape=shape,
        layout=layout,
        workload=workload,
        schedule=schedule,
        bucket_mb=bucket_mb,
        clip=clip,
    )
    rates = Rates(machine.measured, workload.dtype)
    links = Links(
        machine.measured,
        machine.backend,
        wires=machine.wires,
        layout=layout,
        element_bytes=job.element_bytes,
    )
    prices = step_prices(job, rates, links)
    played = play_step(schedule, layout, prices, machine.slowdown)
    memory = memory_rows(job)
    timeline = dataclasses.replace(
        played.timeline, peak_bytes=tuple(row["total"] for row in memory)
    )
    measured = machine.measured
    talk = exposed(schedule, layout, prices)
    busy = [sum(e.end - e.start for e in timeline.events if e.lane == lane) for lane in LANES]
    found = Forecast(
        layout=str(layout),
        step_seconds=played.seconds,
        tokens_per_second=workload.global_batch * workload.seq_len / played.seconds,
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
        notes=(*rates.notes, *links.notes, *_threads(measured)),
    )
    return found, timeline


def _link(machine: Machine) -> str:
    if machine.wires is not None:
        return "+".join(link.name for link, _ in machine.wires.tiers)
    return {"shm": "shared memory", "gloo": "sockets"}.get(machine.backend, machine.backend)


def _threads(measured: Measured) -> list[str]:
    return [] if measured.threads == 1 else [f"probed with {measured.threads} threads a rank"]


def total(ranks: Iterable[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The rows of all ranks added up: name, axis and phase, with count and bytes."""
    sums: dict[tuple[str, str, str], list[int]] = {}
    for row in (row for rows in ranks for row in rows):
        entry = sums.setdefault((row["name"], row["axis"], row["phase"]), [0, 0])
        entry[0] += row["count"]
        entry[1] += row["bytes"]
    return [
        {"name": name, "axis": axis, "phase": phase, "count": count, "bytes": nbytes}
        for (name, axis, phase), (count, nbytes) in sorted(sums.items())
    ]


# --- choosing ------------------------------------------------------------------------------------


def candidates(shape: ModelShape, workload: Workload, most_ranks: int) -> list[Layout]:
    """Layouts of up to `most_ranks` ranks that a model and a batch allow, simplest first."""
    found = []
    for world in range(1, most_ranks + 1):
        for tp in divisors(world):
            if shape.heads % tp or (shape.kv_heads % tp and tp % max(1, shape.kv_heads)):
                continue
            for pp in divisors(world // tp):
                dp = world // tp // pp
                if pp > len(shape.layers) or workload.global_batch % dp:
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


def choose(
    shape: ModelShape,
    workload: Workload,
    machine: Machine,
    layouts: Iterable[Layout],
    *,
    bucket_mb: float = 25.0,
    clip: bool = True,
    shown: int = 12,
) -> tuple[Forecast, Timeline]:
    """The forecast of the fastest layout that fits, with what else was weighed.

    Raises:
        OptionError: none of the layouts fits into `machine.capacity`.
    """
    weighed: list[tuple[Forecast, Timeline]] = []
    for layout in layouts:
        try:
            weighed.append(
                forecast(shape, layout, workload, machine, bucket_mb=bucket_mb, clip=clip)
            )
        except (LayoutError, OptionError) as error:
            if not machine.measured.products:
                raise error from None
    if not weighed:
        raise OptionError(
            f"no layout of {shape.name} with a global batch of {workload.global_batch} is legal "
            "on this machine",
            hint="--layout dp1",
        )

    def fits(one: Forecast) -> bool:
        return not one.capacity or MARGIN * max(one.peak_bytes) <= one.capacity

    weighed.sort(key=lambda pair: (not fits(pair[0]), pair[0].step_seconds))
    best, timeline = weighed[0]
    if not fits(best):
        least = min(weighed, key=lambda pair: max(pair[0].peak_bytes))[0]
        raise OptionError(
            f"{shape.name} fits in no layout of this machine: the least is "
            f"{format_bytes(max(least.peak_bytes))} a rank in {least.layout}, a rank may hold "
            f"{format_bytes(least.capacity)}",
            hint="a smaller --global-batch or --seq-len, or more --microbatches",
        )
    rows = tuple(
        Alternative(
            layout=one.layout,
            step_seconds=one.step_seconds,
            memory=max(one.peak_bytes),
            bubble=one.bubble,
            fits=fits(one),
            chosen=one is best,
        )
        for one, _ in weighed[:shown]
    )
    return dataclasses.replace(best, alternatives=rows), timeline
