"""Fit: latency and bandwidth by regime, from sizes and seconds.

    seconds = latency_r + bytes / rate_r        for sizes of regime r

Messages of different sizes take different ways (one copy or several, eager or by appointment, in
cache or not), so one line is not enough. Neighbouring points share a regime of at least two points;
the regimes are those whose relative errors have the least sum of squares, and one more is taken
only where it pays. The lines of COST_MODEL's collectives are of this kind.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hocket.probing.repeats import rounded
from hocket.spec.measured import Line

Floats = NDArray[np.float64]

MOST = 3
_PAYS = 0.6
"""A further line is taken if it brings the root mean square error below this share of before."""
_EXACT = 0.005
"""No line is added where the error is below this already."""


def lines(sizes: Sequence[int], seconds: Sequence[float], most: int = MOST) -> tuple[Line, ...]:
    """The fit of ascending sizes (bytes) and their seconds; at least two lines from four points."""
    assert len(sizes) == len(seconds) >= 1
    s, t = np.array(sizes, dtype=np.float64), np.array(seconds, dtype=np.float64)
    best: tuple[float, tuple[Line, ...]] | None = None
    for count in range(1, most + 1):
        found = _with(s, t, count)
        if found is None:
            break
        # Few points say little, but a latency and a bandwidth are two regimes wherever they can be.
        if best is None or count == 2 or (best[0] > _EXACT and found[0] < _PAYS * best[0]):
            best = found
    assert best is not None
    return best[1]


def errors(sizes: Sequence[int], seconds: Sequence[float], fit: Sequence[Line]) -> Floats:
    """Relative error of the fit at each point."""
    found = np.array([_at(fit, size) for size in sizes])
    t = np.array(seconds, dtype=np.float64)
    return np.abs(found - t) / t


def _at(fit: Sequence[Line], size: float) -> float:
    line = next((one for one in fit if size <= one.bytes), fit[-1])
    return line.latency + size / line.rate


def _with(s: Floats, t: Floats, count: int) -> tuple[float, tuple[Line, ...]] | None:
    """The best fit of so many lines, with its root mean square error; None with too few points."""
    n = len(s)
    # Two points make a line that has no error, whatever they are: a third one needs more of them.
    if n < (1, 4, 7)[min(count, 3) - 1]:
        return None
    best: tuple[float, tuple[Line, ...]] | None = None
    for cuts in itertools.combinations(range(2, n - 1), count - 1):
        bounds = [0, *cuts, n]
        if any(b - a < 2 for a, b in itertools.pairwise(bounds)) and count > 1:
            continue
        found = tuple(_line(s[a:b], t[a:b]) for a, b in itertools.pairwise(bounds))
        error = float(np.sqrt(np.mean(errors([int(x) for x in s], list(t), found) ** 2)))
        if best is None or error < best[0]:
            best = (error, found)
    return best


def _line(s: Floats, t: Floats) -> Line:
    """Latency >= 0 and rate > 0 of least relative squares."""
    a, b = 1 / t, s / t  # a * latency + b * (1 / rate) = 1
    latency, slope = 0.0, 0.0
    if len(s) > 1:
        (latency, slope), *_ = np.linalg.lstsq(
            np.stack([a, b], axis=1), np.ones(len(s)), rcond=None
        )
    if latency < 0 or len(s) == 1:
        latency, slope = 0.0, float(b.sum() / (b * b).sum())
    if slope <= 0:
        # Flat within the noise: all latency. The rate is then only a bound: what the largest
        # message shows at least.
        latency, slope = float(a.sum() / (a * a).sum()), 0.0
        rate = rounded(_HARDLY * float(s[-1]) / latency)
        return Line(bytes=int(s[-1]), latency=rounded(latency), rate=rate)
    return Line(bytes=int(s[-1]), latency=rounded(float(latency)), rate=rounded(1 / float(slope)))


_HARDLY = 1e3
"""Where no bandwidth shows, the largest message is let add a thousandth to the latency."""
