"""The forecast of a training job on GPUs, in the form that a run folder stores.

Problem x Layout -> `plan.plan_one`   the very figures that `hocket plan` shows
                 -> the pipeline's simulation, then data ranks and optimizer: the Timeline
                 -> spec.forecast.Forecast
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from hocket.planning.forecast import LayoutForecast
from hocket.planning.layouts import row
from hocket.planning.links import AxisLinks, axis_links
from hocket.planning.placement import AXIS_PARTS, DATA_PART, INSIDE_PART
from hocket.planning.plan import best_layouts, plan_one
from hocket.planning.problem import Problem
from hocket.planning.search import estimate_layouts
from hocket.spec.errors import HocketError
from hocket.spec.forecast import Alternative, Forecast
from hocket.spec.layout import Layout
from hocket.spec.timeline import LANES, Event, Timeline

MOST_EVENTS = 50_000
"""Of a predicted timeline; beyond, it shows fewer microbatches, at least `LEAST`."""

LEAST = 16
"""Microbatches that a timeline shows at least."""

MemoryRows = Callable[[Layout], Sequence[dict[str, int]]]
"""Of each rank of a layout: bytes by kind and their `total`."""


def gpu_forecast(
    problem: Problem,
    layout: Layout,
    memory: MemoryRows,
    *,
    collectives: Iterable[dict[str, Any]] = (),
    considered: int = 0,
    measured: str = "",
) -> tuple[Forecast, Timeline]:
    """What a job takes, and the Timeline of one step.

    Args:
        layout: of the run, with its microbatches.
        memory: of a layout's ranks, as allocated tensors.
        collectives: of all ranks in one step, as `Forecast.collectives`.
        considered: how many of the planner's layouts are shown with it.
        measured: when the machine was probed, and how; empty: it was not.

    Raises:
        LayoutError: more ranks than the cluster has GPUs, or a layout that does not fit the model.
        OptionError: a schedule or a precision that the planner does not estimate.
    """
    plan = plan_one(problem, layout)
    best = plan.best
    rows = tuple(dict(one) for one in memory(layout))
    links = axis_links(problem, best.layout)
    seconds = best.step_seconds.median
    compute = best.parts["compute"] + best.parts["optimizer"]
    exposed = _exposed(best, links)
    timeline = _timeline(problem, best, layout, exposed, [one["total"] for one in rows])
    found = Forecast(
        layout=str(layout),
        step_seconds=seconds,
        step_range=(best.step_seconds.low, best.step_seconds.high),
        tokens_per_second=problem.tokens / seconds,
        bubble=best.bubble,
        idle=max(0.0, 1 - compute / seconds),
        memory=rows,
        exposed=exposed,
        compute=compute,
        communication=sum(one.seconds for one in links),
        collectives=tuple(collectives),
        capacity=problem.cluster.node.gpu.usable,
        links={one.axis: one.link for one in links},
        cluster=problem.cluster.name,
        measured=measured,
        notes=plan.notes,
    )
    if considered:
        others = _others(problem, (str(layout), str(best.layout)), memory, considered)
        found = found.among(others, fits=best.fits, shown=considered)
    return found, timeline


def _exposed(best: LayoutForecast, links: Iterable[AxisLinks]) -> dict[str, float]:
    """Axis to the seconds of its communication that no computation overlaps: each part of the step
    divided over its axes by what they take on their links."""
    by_part: dict[str, dict[str, float]] = {}
    for one in links:
        part = AXIS_PARTS.get(one.axis, DATA_PART)
        by_part.setdefault(part, {})[one.axis] = one.seconds
    found = {}
    for part, axes in by_part.items():
        whole = sum(axes.values())
        for axis, seconds in axes.items():
            found[axis] = best.parts[part] * (seconds / whole if whole else 1 / len(axes))
    return found


def _timeline(
    problem: Problem,
    best: LayoutForecast,
    layout: Layout,
    exposed: dict[str, float],
    peaks: Sequence[int],
) -> Timeline:
    """One step of every rank: the pipeline as it is simulated, then what data ranks exchange that
    no computation overlaps, then the optimizer. Of the communication inside layers each action
    shows its share at its end, as one collective."""
    problem = dataclasses.replace(problem, division=layout.pipeline_split)
    only = row(best.layout, problem.shape, problem.seq_len, problem.global_batch)
    most = max(LEAST, MOST_EVENTS // (8 * layout.world_size * layout.virtual_stages))
    pipeline = problem.timeline(best.layout, estimate_layouts(problem, only).times, most=most)
    # Under ZeRO-2 and 3 data ranks communicate layer by layer, within the pipeline's actions.
    woven = layout.zero >= 2 and bool(problem.constants.per_layer_state)
    inside, between = best.parts[INSIDE_PART], best.parts[DATA_PART]
    if woven:
        inside, between = inside + between, 0.0
    share = inside / (inside + best.parts["compute"])
    data = "shard" if layout.zero else "dp"
    axis = max(
        (axis for axis in exposed if axis in COLLECTIVES and (woven or axis != data)),
        key=lambda name: exposed[name],
        default="tp",
    )
    lines: list[list[Event]] = [[] for _ in range(layout.pp)]
    for event in pipeline.events:
        lines[event.rank].append(event)
        if event.lane == LANES[0] and share > 0:
            start = event.end - share * (event.end - event.start)
            collective = _collective(event.rank, COLLECTIVES[axis], axis, start, event.end)
            lines[event.rank].append(collective)
    end = pipeline.duration
    update = best.parts["optimizer"]
    events: list[Event] = []
    for rank in range(layout.world_size):
        mine = lines[layout.coordinate(rank)["pp"]]
        events += [dataclasses.replace(event, rank=rank) for event in mine]
        if between > 0:
            events.append(_collective(rank, COLLECTIVES[data], data, end, end + between))
        events.append(
            Event(
                rank=rank,
                lane=LANES[0],
                kind="optimizer",
                name="optimizer",
                start=end + between,
                end=end + between + update,
            )
        )
    return Timeline.of("predicted", layout.world_size, events, peaks)


COLLECTIVES = {
    "tp": "all-reduce",
    "cp": "all-to-all",
    "expert": "all-to-all",
    "shard": "reduce-scatter",
    "dp": "all-reduce",
}
"""What is drawn for the communication over each axis."""


def _collective(rank: int, name: str, axis: str, start: float, end: float) -> Event:
    return Event(rank=rank, lane=LANES[1], kind=name, name=name, start=start, end=end, axis=axis)


def _others(
    problem: Problem, own: Sequence[str], memory: MemoryRows, count: int
) -> Iterator[Alternative]:
    """The planner's best layouts of the same GPUs, without the run's `own`."""
    try:
        found = best_layouts(problem, top=count).layouts
    except HocketError:  # nothing fits with room to spare
        return
    for one in found:
        if str(one.layout) in own:
            continue
        try:
            peak = max(rank["total"] for rank in memory(one.layout))
        except HocketError:  # a layout that this hocket does not run
            peak = sum(one.memory_by_kind.values())
        yield Alternative(
            layout=str(one.layout),
            step_seconds=one.step_seconds.median,
            memory=peak,
            bubble=one.bubble,
            fits=one.fits,
        )
