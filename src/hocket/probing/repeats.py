"""Repeats: medians of interleaved samples, so that what else the machine does falls on all.

One round takes a sample of every case; a burst of another program then spoils one sample of each
instead of all samples of one. A sample runs its case often enough for the clock.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeVar

Key = TypeVar("Key", bound=Hashable)

Reads = Callable[[], float]
"""A clock: `time.perf_counter`, or `time.thread_time` for what one thread computes alone."""

SHORTEST = 3e-4
"""Seconds that a sample lasts at least; the clock is read to some 1e-7."""


@dataclasses.dataclass(frozen=True)
class Taken:
    """Seconds of one call: the median, and the distance of the quartiles over it."""

    seconds: float
    spread: float


def repeat_summary(samples: Sequence[float]) -> Taken:
    assert samples
    middle = statistics.median(samples)
    if len(samples) < 2 or middle <= 0:
        return Taken(rounded(middle), 0.0)
    low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
    return Taken(rounded(middle), round((high - low) / middle, 3))


def rounded(value: float) -> float:
    """Four digits, which is more than a measurement knows."""
    return float(f"{value:.4g}")


def interleaved_seconds(
    cases: Mapping[Key, Callable[[], object]],
    *,
    seconds: float,
    least: int = 5,
    most: int = 200,
    longest: float = math.inf,
    settle: Callable[[], None] = lambda: None,
    reads: Reads = time.perf_counter,
    each_round: Callable[[], None] = lambda: None,
    prepare: Mapping[Key, Callable[[], object]] | None = None,
) -> dict[Key, Taken]:
    """Seconds of one call of each case.

    Args:
        cases: what to call.
        seconds: that all of it may take; at least `least` rounds are made.
        longest: a case whose one call takes more is left out of what is returned.
        settle: waits until what was called has run (CUDA).
        reads: the clock.
        each_round: called before every round.
        prepare: of cases that have it, called before every sample, outside of what is timed.
    """
    ahead = prepare or {}
    begin = time.perf_counter()
    counts: dict[Key, int] = {}
    for key, call in cases.items():
        if _sample(call, 1, settle, reads) <= longest:
            counts[key] = _count(call, settle, reads)
    samples: dict[Key, list[float]] = {key: [] for key in counts}
    for number in range(most):
        if enough(number, least, time.perf_counter() - begin, seconds):
            break
        each_round()
        for key, count in counts.items():
            if key in ahead:
                ahead[key]()
            samples[key].append(_sample(cases[key], count, settle, reads))
    return {key: repeat_summary(taken) for key, taken in samples.items()}


def enough(rounds: int, least: int, passed: float, seconds: float) -> bool:
    """Whether so many rounds in so much time will do: where others hold the cores, two will."""
    return passed >= seconds and (
        rounds >= least or (rounds >= _FEWEST and passed >= _LATE * seconds)
    )


_FEWEST, _LATE = 2, 3.0
"""Rounds that will do when so many times the seconds are over."""


def _count(call: Callable[[], object], settle: Callable[[], None], reads: Reads) -> int:
    """Calls that make a sample."""
    count = 1
    while True:
        took = _sample(call, count, settle, reads) * count
        if took >= SHORTEST:
            return count
        count = max(2 * count, min(10 * count, int(count * SHORTEST / max(took, 1e-7)) + 1))


def _sample(
    call: Callable[[], object], count: int, settle: Callable[[], None], reads: Reads
) -> float:
    start = reads()
    for _ in range(count):
        call()
    settle()
    return (reads() - start) / count
