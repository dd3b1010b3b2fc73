"""Fit: latency and bandwidth by regime, from sizes and seconds.

    seconds = latency_r + bytes / rate_r        for sizes of regime r

Messages of different sizes take different ways (one copy or several, eager or by appointment, in
cache or not), so one line is not enough. Neighbouring points share a regime of at least two points;
the regimes are those whose relative errors have the least sum of squares, and one more is taken
only where it pays. Two points make a line without an error, so the error of a fit is taken from
points that were held out of it, one after the other.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from hocket.probing.repeats import rounded
from hocket.spec.measured import LatencyFit

MOST = 3
_POINTS = (1, 4, 7)
"""Points from which one, two, three lines may be drawn."""
_PAYS = 0.6
"""A third line is taken if it brings the root mean square error below this share of before."""


def latency_fit(sizes: Sequence[int], seconds: Sequence[float]) -> tuple[LatencyFit, ...]:
    """The fit of ascending sizes (bytes) and their seconds; at least two lines from four points."""
    assert len(sizes) == len(seconds) >= 1
    best = _with(sizes, seconds, 1)
    for count in range(2, MOST + 1):
        if len(sizes) < _POINTS[count - 1]:
            break
        found = _with(sizes, seconds, count)
        # A latency and a bandwidth are two regimes wherever there are points for them.
        if count == 2 or found[0] < _PAYS * best[0]:
            best = found
    return best[1]


def fit_errors(sizes: Sequence[int], seconds: Sequence[float]) -> list[float]:
    """Relative errors of fits at points that they were not given: of each but the first and the
    last, which would have to be extrapolated. With fewer than five points, of the fit itself.
    """
    if len(sizes) < 5:
        return _off(sizes, seconds, latency_fit(sizes, seconds))
    found = []
    for i in range(1, len(sizes) - 1):
        fit = latency_fit([*sizes[:i], *sizes[i + 1 :]], [*seconds[:i], *seconds[i + 1 :]])
        found += _off(sizes[i : i + 1], seconds[i : i + 1], fit)
    return found


def _off(sizes: Sequence[int], seconds: Sequence[float], fit: Sequence[LatencyFit]) -> list[float]:
    return [abs(_at(fit, s) - t) / t for s, t in zip(sizes, seconds, strict=True)]


def _at(fit: Sequence[LatencyFit], size: float) -> float:
    line = next((one for one in fit if size <= one.bytes), fit[-1])
    return line.latency + size / line.rate


def _with(
    sizes: Sequence[int], seconds: Sequence[float], count: int
) -> tuple[float, tuple[LatencyFit, ...]]:
    """The best fit of so many lines, with its root mean square error."""
    n, best = len(sizes), None
    for cuts in itertools.combinations(range(2, n - 1), count - 1):
        bounds = [0, *cuts, n]
        if count > 1 and any(b - a < 2 for a, b in itertools.pairwise(bounds)):
            continue
        fit = tuple(_line(sizes[a:b], seconds[a:b]) for a, b in itertools.pairwise(bounds))
        wrong = _off(sizes, seconds, fit)
        error = (sum(e * e for e in wrong) / n) ** 0.5
        if best is None or error < best[0]:
            best = (error, fit)
    assert best is not None, (n, count)
    return best


def _line(sizes: Sequence[int], seconds: Sequence[float]) -> LatencyFit:
    """Latency >= 0 and rate > 0 of least relative squares: the sum of
    ((latency + slope size) / seconds - 1)^2 over the points."""
    a, b = [1 / t for t in seconds], [s / t for s, t in zip(sizes, seconds, strict=True)]
    aa, bb = sum(x * x for x in a), sum(y * y for y in b)
    ab = sum(x * y for x, y in zip(a, b, strict=True))
    determinant = aa * bb - ab * ab
    latency = slope = -1.0
    if determinant > 1e-12 * aa * bb:
        latency = (sum(a) * bb - sum(b) * ab) / determinant
        slope = (sum(b) * aa - sum(a) * ab) / determinant
    if latency < 0:
        latency, slope = 0.0, sum(b) / bb
    last = sizes[-1]
    if slope <= 0:
        # Flat within the noise: all latency, and the rate is only a bound.
        latency = sum(a) / aa
        slope = latency / (_HARDLY * last)
    return LatencyFit(bytes=last, latency=rounded(latency), rate=rounded(min(1 / slope, _FASTEST)))


_HARDLY = 1e3
"""Where no bandwidth shows, the largest message is let add a thousandth to the latency."""
_FASTEST = 1e15
"""Bytes/s, far above any link."""
