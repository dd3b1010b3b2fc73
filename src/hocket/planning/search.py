"""The search: every legal layout, discarded by memory, sorted by closed forms, the best simulated.

legal layouts -> fit at the 95th percentile -> estimated at once -> the best few hundred simulated
event by event over the schedule that the runtime would run -> sorted again
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from hocket.cost.layout_batch import Layouts
from hocket.cost.step import StepTimes
from hocket.cost.terms import Floats
from hocket.planning.layouts import concatenate, layout_at, runs_here, unmet_pin
from hocket.planning.pins import Pins, pins_text
from hocket.planning.problem import CHUNK, Problem, simulated_microbatches
from hocket.spec.errors import OptionError, unknown
from hocket.spec.layout import Layout

OBJECTIVES = ("time", "tokens-per-dollar", "memory")

SIMULATED = 200
"""Layouts that are simulated, of those that run here and of the others each."""

EXTRA = 50
"""Of the others where only the best few of them are shown, next to those that run here."""

MOST_ACTIONS = 200_000
"""Of all simulated schedules together: a limit in work, so that an answer never depends on how
fast a machine is. Schedules are taken in the order of their best layout."""

SIZES = 6
"""Numbers of GPUs looked at where fewer may be cheaper, each half of the one before."""


@dataclasses.dataclass(frozen=True)
class Scored:
    """Layouts with what they cost, [r], best first.

    Attributes:
        here: whether the runtime can carry out the layout.
        seconds: of a step; where `simulated`, with the pipeline simulated event by event.
        pipeline: of it, the pipeline.
        times: by closed forms.
        high: bytes at the 95th percentile.
    """

    layouts: Layouts
    here: np.ndarray
    seconds: Floats
    pipeline: Floats
    simulated: np.ndarray
    times: StepTimes
    high: Floats

    def __len__(self) -> int:
        return len(self.layouts)

    def take(self, index: np.ndarray) -> Scored:
        """Some of the rows."""
        return Scored(
            layouts=self.layouts.take(index),
            here=self.here[index],
            seconds=self.seconds[index],
            pipeline=self.pipeline[index],
            simulated=self.simulated[index],
            times=_take(self.times, index),
            high=self.high[index],
        )


@dataclasses.dataclass(frozen=True)
class SearchResult:
    """What a search found.

    Attributes:
        best: the simulated layouts, best first.
        num_legal: layouts looked at. num_fitting: of them, those that fit.
        num_gpus: most GPUs that a layout of these uses.
        least: the layout of least memory where nothing fits, else None.
    """

    best: Scored
    num_legal: int
    num_fitting: int
    num_gpus: int
    least: tuple[Layout, float] | None


def search_layouts(
    problem: Problem,
    *,
    objective: str = "time",
    pins: Pins | None = None,
    here: bool = False,
    simulated: int = SIMULATED,
    extra: int | None = None,
) -> SearchResult:
    """The best layouts.

    Args:
        objective: `time` of a step, `tokens-per-dollar` (fewer GPUs are looked at as well), or
            `memory` of the peak GPU.
        pins: axis to the only value that it may have, see `layouts.layout_pins`.
        here: only what this hocket can carry out itself.
        simulated: how many layouts are simulated, of those that run here and of the others each.
        extra: how many of the others where some run here. None: as many.

    Raises:
        OptionError: an unknown objective, or a batch that no number of these GPUs divides.
    """
    if objective not in OBJECTIVES:
        message, hint = unknown("objective", objective, OBJECTIVES)
        raise OptionError(message, hint=hint)
    pins = dict(pins or {})
    space = _space(problem, objective, pins, here)
    scored = estimate_layouts(problem, concatenate(space.fitting), high=np.concatenate(space.high))
    if not len(scored):
        return SearchResult(scored, space.num_legal, 0, space.num_gpus, space.least)
    num_fitting = len(scored)
    exchanged = np.flatnonzero(problem.exchanged(scored.layouts, scored.times))
    if len(exchanged):
        scored = scored.take(exchanged)
    extra = simulated if extra is None else min(extra, simulated)
    best = _best(problem, scored, objective, simulated, extra)
    return SearchResult(best, space.num_legal, num_fitting, space.num_gpus, None)


def estimate_layouts(problem: Problem, layouts: Layouts, *, high: Floats | None = None) -> Scored:
    """Layouts estimated by closed forms, in their order."""
    high = problem.high_memory(layouts) if high is None else high
    times = problem.times(layouts)
    count = len(layouts)
    return Scored(
        layouts=layouts,
        here=runs_here(layouts, problem.axes),
        seconds=times.step,
        pipeline=times.pipeline,
        simulated=np.zeros(count, dtype=bool),
        times=times,
        high=high,
    )


def simulate_all(problem: Problem, scored: Scored, *, most: int = MOST_ACTIONS) -> Scored:
    """With the pipelines simulated, in the order of the rows, `most` actions in all."""
    at = scored.layouts
    groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
    found: dict[int, Layout] = {}
    for i in range(len(scored)):
        if at.pp[i] > 1:
            layout = layout_at(at, i)
            found[i] = layout
            counts = simulated_microbatches(layout, int(at.microbatches[i]))
            key = layout.pp, layout.virtual_stages, int(at.schedule[i]), int(at.lighter[i])
            groups[*key, *counts].append(i)
    pipeline = scored.pipeline.copy()
    simulated = at.pp == 1  # microbatch after microbatch: nothing to play
    for (pp, virtual, _, _, short, long), rows in groups.items():
        actions = 6 * pp * virtual * (short if short == long else short + long)
        if actions > most:
            continue
        most -= actions
        layouts = [found[i] for i in rows]
        pipeline[rows] = problem.pipelines(layouts, _take(scored.times, np.array(rows)))
        simulated[rows] = True
    return dataclasses.replace(
        scored,
        pipeline=pipeline,
        seconds=scored.seconds - scored.pipeline + pipeline,
        simulated=simulated,
    )


def _layout_gpus(layouts: Layouts) -> Floats:
    """GPUs that each layout uses, [r]."""
    found: Floats = layouts.dp * layouts.pp * layouts.cp * layouts.tp
    return found


def score(scored: Scored, objective: str) -> Floats:
    """What is made small, [r]."""
    if objective == "memory":
        return scored.high
    if objective == "tokens-per-dollar":
        return scored.seconds * _layout_gpus(scored.layouts)
    return scored.seconds


def ranked_rows(scored: Scored, objective: str) -> np.ndarray:
    """Rows from best to worst; equals by memory, then by how little they ask for."""
    at = scored.layouts
    again = (at.recompute > 0) + 1.0 * at.recomputes("full")
    asks = at.zero + again + at.sequence_parallel + np.log2(at.cp) + (at.virtual > 1)
    rounded = np.array([float(f"{value:.4g}") for value in score(scored, objective)])
    second = scored.seconds if objective == "memory" else scored.high
    return np.lexsort((second, asks, rounded))


def _best(problem: Problem, scored: Scored, objective: str, simulated: int, extra: int) -> Scored:
    chosen: list[np.ndarray] = []
    for rows in (np.flatnonzero(scored.here), np.flatnonzero(~scored.here)):
        values = score(scored, objective)[rows]
        count = min(extra if chosen else simulated, len(rows))
        if count:
            first = np.argpartition(values, count - 1)[:count]
            chosen.append(rows[first[np.argsort(values[first], kind="stable")]])
    parts = [
        simulate_all(problem, scored.take(rows), most=MOST_ACTIONS // len(chosen))
        for rows in chosen
    ]
    joined = parts[0] if len(parts) == 1 else _join(*parts)
    return joined.take(ranked_rows(joined, objective))


def _join(one: Scored, other: Scored) -> Scored:
    def both(name: str) -> Any:
        return np.concatenate([getattr(one, name), getattr(other, name)])

    names = [f.name for f in dataclasses.fields(StepTimes)]
    times = {
        n: np.concatenate(
            [np.broadcast_to(getattr(part.times, n), part.high.shape) for part in (one, other)]
        )
        for n in names
    }
    return Scored(
        layouts=concatenate([one.layouts, other.layouts]),
        times=StepTimes(**times),
        **{n: both(n) for n in ("here", "seconds", "pipeline", "simulated", "high")},
    )


def _take(times: StepTimes, index: np.ndarray) -> StepTimes:
    rows = len(times.step)
    names = [f.name for f in dataclasses.fields(StepTimes)]
    return StepTimes(**{n: np.broadcast_to(getattr(times, n), (rows,))[index] for n in names})


def fitting_memory(problem: Problem, layouts: Layouts) -> Floats:
    """As `Problem.high_memory`, of rows that may fit, [r]; infinite for rows that cannot, since
    they differ by a larger microbatch alone from one before them that does not.

    Rows of equal layouts but for their microbatches follow each other, from the smallest on.
    """
    count = len(layouts)
    found = np.full(count, np.inf)
    begins = np.ones(count, dtype=bool)
    same = layouts.microbatch[1:] > layouts.microbatch[:-1]
    for field in dataclasses.fields(Layouts):
        if field.name not in ("microbatch", "microbatches"):
            column = getattr(layouts, field.name)
            same &= column[1:] == column[:-1]
    begins[1:] = ~same
    rows = np.flatnonzero(begins)
    ends, width = np.append(rows[1:], count), 1
    while len(rows):
        window = rows[:, None] + np.arange(width)
        some = window[window < ends[:, None]]
        found[some] = problem.high_memory(layouts.take(some))
        last = np.minimum(rows + width, ends) - 1
        more = (found[last] <= problem.usable) & (last + 1 < ends)
        rows, ends, width = last[more] + 1, ends[more], 2 * width
    return found


def _batches(parts: Iterable[Layouts]) -> Iterator[Layouts]:
    """Parts joined until they have `CHUNK` rows: a hundred rows take as long as one."""
    joined: list[Layouts] = []
    for part in parts:
        joined.append(part)
        if sum(map(len, joined)) >= CHUNK:
            yield concatenate(joined)
            joined = []
    yield concatenate(joined)


class _Space:
    """Legal layouts: how many there are, and those that fit.

    Attributes:
        fitting, high: parts of them, and their bytes of `Problem.high_memory`.
        num_gpus: the most that a legal one uses.
        least: the layout of least memory, and its bytes; None: there is none.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.fitting: list[Layouts] = []
        self.high: list[Floats] = []
        self.num_legal = self.num_gpus = 0
        self.least: tuple[Layout, float] | None = None

    def add(self, size: int, pins: Pins, here: bool) -> None:
        """Those of so many GPUs."""
        for part in _batches(self.problem.legal_parts(size, pins=pins, here=here)):
            high = fitting_memory(self.problem, part)
            kept = np.flatnonzero(self.problem.proposable(part, high))
            self.fitting.append(part.take(kept))
            self.high.append(high[kept])
            self.num_legal += len(part)
            if len(part):
                self.num_gpus = max(self.num_gpus, size)
                at = int(high.argmin())
                if self.least is None or high[at] < self.least[1]:
                    self.least = layout_at(part, at), float(high[at])


def _space(problem: Problem, objective: str, pins: Pins, here: bool) -> _Space:
    """Of all GPUs that are there, or of the most for which a layout is legal; by price, of halves
    of these too. Raises OptionError where there is none."""
    cluster = problem.cluster
    step = cluster.node.num_gpus if cluster.num_nodes > 1 else 1
    found = _Space(problem)
    for size in range(cluster.num_gpus, 0, -step):
        found.add(size, pins, here)
        if found.num_legal:
            break
    else:
        asked = pins_text(pins)
        shape, seq_len, batch = problem.shape, problem.seq_len, problem.global_batch
        reason = unmet_pin(shape, cluster.num_gpus, seq_len, batch, pins)
        if reason is None and problem.limits:
            reason = f"it must run on {' and '.join(limit.software for limit in problem.limits)}"
        why = f": {reason}" if reason else ""
        raise OptionError(
            f"no layout of {problem.shape.name} with a global batch of {problem.global_batch} is "
            f"legal on {cluster.name}" + (f" with {asked}" if asked else "") + why,
            hint="leave --pin out" if asked else f"--global-batch {cluster.num_gpus}",
        )
    sizes = 1
    while objective == "tokens-per-dollar" and sizes < SIZES and size % 2 == 0:
        size //= 2
        sizes += 1
        found.add(size, pins, here)
    return found
