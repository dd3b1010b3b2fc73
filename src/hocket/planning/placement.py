"""Placement: which axis of a layout lies innermost, so that what talks most has the fastest links.

The order of axes over ranks changes nothing that is computed or sent, only which links each message
crosses. So every order is priced on the links its groups really cross, and the cheapest is taken.
"""

from __future__ import annotations

import dataclasses
import itertools

from hocket.planning.links import calls_of, card_of, cluster_links, seconds_on
from hocket.planning.problem import Problem
from hocket.spec.layout import AXES, Layout

EQUAL = 1e-3
"""Orders whose prices differ by less than this share are alike; the default one is kept."""


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


def priced(problem: Problem, layout: Layout) -> list[tuple[float, tuple[str, ...]]]:
    """Seconds that a step's messages take in each order, and the order; the cheapest first.

    Args:
        layout: with its microbatches.
    """
    links, card = cluster_links(problem.cluster), card_of(problem.cluster)
    calls = calls_of(problem, layout)
    rows = []
    for place, order in enumerate(orders(layout)):
        placed = dataclasses.replace(layout, order=order)
        total = sum(
            seconds_on(links, placed, axis, each, card=card)[0] for axis, each in calls.items()
        )
        rows.append((total, place, order))
    least = min(total for total, _, _ in rows)
    rows.sort(key=lambda row: (row[0] > least * (1 + EQUAL), row[1] if row[0] <= least * (1 + EQUAL)
                               else row[0]))  # fmt: skip
    return [(total, order) for total, _, order in rows]


def place(problem: Problem, layout: Layout) -> Layout:
    """The layout in the order whose messages take least time on this cluster's links."""
    if sum(layout.degree(axis) > 1 for axis in AXES) < 2:
        return layout
    return dataclasses.replace(layout, order=priced(problem, layout)[0][1])
