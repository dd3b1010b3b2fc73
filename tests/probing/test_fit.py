"""Lines by regime: exact data gives its own lines back, noise gives honest errors."""

from __future__ import annotations

import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.probing.fit import fit_errors, latency_fit


def test_two_regimes_are_found() -> None:
    sizes = [2**i for i in range(8, 26)]
    seconds = [10e-6 + s / 2e9 if s <= 2**16 else 60e-6 + s / 8e9 for s in sizes]
    low, high = latency_fit(sizes, seconds)
    assert low.bytes == 2**16
    assert (low.latency, high.latency) == pytest.approx((10e-6, 60e-6), rel=1e-3)
    assert (low.rate, high.rate) == pytest.approx((2e9, 8e9), rel=1e-3)
    assert statistics.median(fit_errors(sizes, seconds)) < 1e-3


def test_three_where_they_pay() -> None:
    sizes = [2**i for i in range(8, 26)]
    seconds = [
        5e-6 if s <= 2**12 else 50e-6 + s / 1e9 if s <= 2**20 else 2e-3 + s / 2e8 for s in sizes
    ]
    assert len(latency_fit(sizes, seconds)) == 3


def test_few_points_have_few_lines() -> None:
    assert len(latency_fit([1024], [1e-5])) == 1
    assert len(latency_fit([1024, 2048, 4096], [1e-5, 2e-5, 4e-5])) == 1
    assert len(latency_fit([256, 4096, 65536, 2**20], [1e-5, 1.1e-5, 3e-5, 5e-4])) == 2
    assert len(latency_fit([2**i for i in range(6)], [1e-5] * 6)) == 2


def test_the_error_is_that_of_the_points() -> None:
    sizes = [2**i for i in range(10, 24)]
    draw = random.Random(0)
    seconds = [(20e-6 + s / 1e9) * (1 + draw.gauss(0, 0.1)) for s in sizes]
    assert 0.02 < statistics.median(fit_errors(sizes, seconds)) < 0.2


def test_a_line_through_two_points_is_not_said_to_be_exact() -> None:
    sizes = [2**i for i in range(8, 20, 2)]
    seconds = [1e-5, 9e-5, 2e-5, 1e-4, 1e-5, 3e-4]
    assert statistics.median(fit_errors(sizes, seconds)) > 0.3


@given(
    st.lists(
        st.tuples(st.integers(1, 2**34), st.floats(1e-7, 1e3)), min_size=1, max_size=12,
        unique_by=lambda point: point[0],
    )
)  # fmt: skip
def test_whatever_was_measured_the_fit_is_positive(points: list[tuple[int, float]]) -> None:
    sizes, seconds = zip(*sorted(points), strict=True)
    for line in latency_fit(sizes, seconds):
        assert line.latency >= 0
        assert line.rate > 0
        assert math.isfinite(line.latency)
        assert math.isfinite(line.rate)
    assert all(math.isfinite(error) for error in fit_errors(sizes, seconds))
