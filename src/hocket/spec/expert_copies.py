"""Which ranks have copies of which experts, and how even their rows are then.

    copies     one at a time, to the expert with most rows a copy
    place      copies by rows, the heaviest first, to the rank with least rows that has room

A server places copies by the rows that it counted, a plan by rows that it assumes: of each layer a
sample of log-normal numbers, as a router gives whose logits differ by normal numbers (their
spread makes the busiest rank as busy as is assumed without copies).

Legend: E experts, P slots of a rank, ep ranks.
"""

from __future__ import annotations

import functools
import math
import random
import statistics
from collections.abc import Sequence

LAYERS = 8
"""Samples of the assumed rows, of which the mean is taken."""

WIDEST = 12.0
"""Largest standard deviation of the logarithm of an expert's rows that is looked at."""

WORTH = 0.95
"""Rows of the rank with most, relative to those before, below which weights are moved."""


def place_copies(load: Sequence[float], ranks: int, previous: Sequence[int]) -> list[int]:
    """The expert of each slot, rank after rank; as before where another placement gains little.

    Args:
        load: [E] rows of each expert.
        ranks: with equally many slots each; together at least E.
        previous: [ep P] the expert of each slot until now: what stays on a rank stays in its slot.
    """
    slots = len(previous) // ranks
    assert len(load) <= len(previous) <= len(load) * ranks, (len(load), len(previous), ranks)
    copies = [1] * len(load)
    for _ in range(len(previous) - len(load)):
        open_ones = [e for e, count in enumerate(copies) if count < ranks]
        copies[max(open_ones, key=lambda e: (load[e] / copies[e], -e))] += 1
    each = [load[e] / copies[e] for e in range(len(load))]
    rows, held = [0.0] * ranks, [list[int]() for _ in range(ranks)]
    order = sorted(range(len(load)), key=lambda e: (-copies[e], -each[e], e))
    # Those with most copies have least choice of ranks, and come first.
    for e in [e for e in order if copies[e] > 1] + [e for e in order if copies[e] == 1]:
        free = sorted(
            (r for r in range(ranks) if len(held[r]) < slots),
            key=lambda r: (rows[r], len(held[r]), e not in previous[r * slots : (r + 1) * slots]),
        )
        for i in range(copies[e]):
            r = free[i % len(free)]
            if len(held[r]) == slots:  # fewer ranks have room than it has copies
                r = min((r for r in range(ranks) if len(held[r]) < slots), key=rows.__getitem__)
            held[r].append(e)
            rows[r] += each[e]
    found = [e for r in range(ranks) for e in _settled(held[r], previous[r * slots :][:slots])]
    gains = most_rows(found, load, ranks) < WORTH * most_rows(previous, load, ranks)
    return found if gains else list(previous)


def most_rows(experts: Sequence[int], load: Sequence[float], ranks: int) -> float:
    """Rows of the rank that has most, each expert's evenly over its copies."""
    slots = len(experts) // ranks
    rows = [load[e] / experts.count(e) for e in experts]
    return max(sum(rows[r * slots : (r + 1) * slots]) for r in range(ranks))


def _settled(held: Sequence[int], previous: Sequence[int]) -> list[int]:
    """A rank's experts, in their slots of before where they had one."""
    coming = list(held)
    found: list[int | None] = []
    for e in previous:
        found.append(e if e in coming else None)
        if e in coming:
            coming.remove(e)
    return [coming.pop(0) if e is None else e for e in found]


def first_copies(experts: int, redundant: int, ranks: int) -> list[int]:
    """Experts in order, and on each rank as many copies of the first of the next ranks."""
    count, more = experts // ranks, redundant // ranks
    found: list[int] = []
    for first in range(0, experts, count):
        found += [(first + i) % experts for i in range(count + more)]
    return found


@functools.lru_cache(maxsize=256)
def copied_imbalance(experts: int, ranks: int, redundant: int, imbalance: float) -> float:
    """Rows of the busiest rank over the mean, once copies have been placed.

    Args:
        redundant: copies in each layer. imbalance: without them.
    """
    if not redundant:
        return imbalance
    draws = random.Random(0)
    layers = [[draws.gauss(0, 1) for _ in range(experts)] for _ in range(LAYERS)]
    placed = first_copies(experts, 0, ranks)

    def loads(spread: float) -> list[list[float]]:
        return [[math.exp(spread * z) for z in layer] for layer in layers]

    def uneven(spread: float) -> float:
        return statistics.mean(
            ranks * most_rows(placed, load, ranks) / sum(load) for load in loads(spread)
        )

    low, high = 0.0, WIDEST
    for _ in range(24):
        middle = (low + high) / 2
        low, high = (middle, high) if uneven(middle) < imbalance else (low, middle)
    before = first_copies(experts, redundant, ranks)
    found = statistics.mean(
        ranks * most_rows(place_copies(load, ranks, before), load, ranks) / sum(load)
        for load in loads(high)
    )
    return min(found, imbalance)
