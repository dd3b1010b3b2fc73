"""Placement: which axis of a layout lies innermost, so that what talks most has the fastest links.

The order of axes over ranks changes nothing that is computed or sent, only which links each message
crosses. So every order is estimated on the links its groups cross, and the cheapest is taken.
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np

from hocket.planning.forecast import LayoutForecast, layout_forecast
from hocket.planning.links import calls_of, card_of, cluster_links, seconds_on
from hocket.planning.problem import Problem
from hocket.planning.search import Scored, _layout_gpus, score
from hocket.spec.layout import AXES, Layout

EQUAL = 1e-3
"""Orders whose prices differ by less than this share are equal; the default one is kept."""


LARGEST = 64
"""Ranks up to which every order is tried: beyond, each of its groups would have to be looked at."""

DATA_PART = "communication between data ranks"
INSIDE_PART = "communication inside layers"

AXIS_PARTS = {
    "tp": INSIDE_PART,
    "cp": INSIDE_PART,
    "expert": INSIDE_PART,
    "pp": "communication between stages",
}
"""The part of a step that an axis's collectives are in; any other axis joins data ranks."""


def orders(layout: Layout) -> list[tuple[str, ...]]:
    """Every order of the axes that places some rank elsewhere, the layout's own first."""
    real = [axis for axis in layout.order if layout.degree(axis) > 1]
    rest = [axis for axis in layout.order if layout.degree(axis) == 1]
    found = [layout.order]
    for permuted in itertools.permutations(real):
        if list(permuted) != real:
            found.append((*permuted, *rest))
    assert all(sorted(order) == sorted(AXES) for order in found)
    return found


def estimated_orders(problem: Problem, layout: Layout) -> list[tuple[float, tuple[str, ...]]]:
    """Seconds that a step's messages take in each order, and the order; the cheapest first.

    Args:
        layout: with its microbatches.
    """
    links, card = cluster_links(problem.cluster), card_of(problem.cluster)
    calls = calls_of(problem, layout)
    rows = []
    for place, order in enumerate(orders(layout)):
        placed = dataclasses.replace(layout, order=order)
        if place and not all(limit.order(placed) for limit in problem.limits):
            continue
        total = sum(
            seconds_on(links, placed, axis, each, card=card)[0] for axis, each in calls.items()
        )
        rows.append((total, place, order))
    least = min(total for total, _, _ in rows)
    rows.sort(key=lambda row: (row[0] > least * (1 + EQUAL), row[1] if row[0] <= least * (1 + EQUAL)
                               else row[0]))  # fmt: skip
    return [(total, order) for total, _, order in rows]


def best_order(problem: Problem, layout: Layout) -> Layout:
    """The layout in the order whose messages take least time on this cluster's links."""
    if sum(layout.degree(axis) > 1 for axis in AXES) < 2:
        return layout
    return dataclasses.replace(layout, order=estimated_orders(problem, layout)[0][1])


def placed_forecast(problem: Problem, found: LayoutForecast) -> LayoutForecast:
    """A forecast in the order whose messages take least time, where that shortens the step."""
    layout = found.layout
    several = problem.cluster.domain < layout.world_size <= LARGEST
    if not several or sum(layout.degree(axis) > 1 for axis in AXES) < 2:
        return found
    other = moved(problem, found, best_order(problem, layout).order)
    return other if other.step_seconds.median < found.step_seconds.median * (1 - EQUAL) else found


def ranked_when_placed(
    problem: Problem, best: Scored, leading: list[int], objective: str
) -> Scored:
    """Ranked rows, ranked again by what the `leading` ones take in their best order of axes."""
    gpus = _layout_gpus(best.layouts)
    several = (gpus > problem.cluster.domain) & (gpus <= LARGEST)
    if objective == "memory" or not several.any():
        return best
    values = score(best, objective).copy()
    for i in (i for i in leading if several[i]):
        found = layout_forecast(problem, best, i)
        placed = placed_forecast(problem, found).step_seconds.median
        values[i] *= placed / found.step_seconds.median
    return best.take(np.argsort([float(f"{value:.4g}") for value in values], kind="stable"))


def moved(problem: Problem, found: LayoutForecast, order: tuple[str, ...]) -> LayoutForecast:
    """The forecast of a layout whose ranks are in another order.

    What an axis's messages take on the links they cross then is, relative to now, what the step
    still waits for them where that is less; where it is more, the difference is waited for.
    """
    layout = found.layout
    if order == layout.order:
        return found
    links, card = cluster_links(problem.cluster), card_of(problem.cluster)
    there = dataclasses.replace(layout, order=order)
    before: dict[str, float] = {}
    after: dict[str, float] = {}
    for axis, calls in calls_of(problem, layout).items():
        part = AXIS_PARTS.get(axis, DATA_PART)
        for into, where in ((before, layout), (after, there)):
            seconds = seconds_on(links, where, axis, calls, card=card)[0]
            into[part] = into.get(part, 0.0) + seconds
    parts = dict(found.parts)
    for part, now in before.items():
        then = after[part]
        parts[part] = parts[part] * then / now if then < now else parts[part] + then - now
    step = found.step_seconds.median
    shift = sum(parts.values()) - sum(found.parts.values())
    factor = (step + shift) / step
    dollars = found.dollars_per_billion_tokens
    return dataclasses.replace(
        found,
        layout=there,
        step_seconds=found.step_seconds.scaled(factor),
        tokens_per_second_per_gpu=found.tokens_per_second_per_gpu.scaled(1 / factor),
        mfu=found.mfu.scaled(1 / factor),
        exposed=(found.exposed * step + shift) / (step + shift),
        parts=parts,
        dollars_per_billion_tokens=None if dollars is None else dollars.scaled(factor),
    )
