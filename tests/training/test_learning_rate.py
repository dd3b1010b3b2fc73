"""Warm-up rises to the peak, cosine falls to the least."""

from __future__ import annotations

import pytest

from hocket.spec.run import TrainOptions
from hocket.training.learning_rate import learning_rate, warmup_steps


def test_by_hand() -> None:
    options = TrainOptions(steps=9, warmup=4, lr=1.0, min_lr=0.2)
    found = [learning_rate(step, options) for step in range(9)]
    # 4 steps of warm-up, then cos over 4 steps: 1, (1 + cos 45) / 2 ...
    expected = [0.25, 0.5, 0.75, 1.0, 1.0, 0.882843, 0.6, 0.317157, 0.2]
    assert found == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("steps", "warmup"), [(100, 10), (5, 0), (5000, 100)])
def test_warmup_by_default_is_a_tenth_at_most_100(steps: int, warmup: int) -> None:
    assert warmup_steps(TrainOptions(steps=steps)) == warmup


@pytest.mark.parametrize("steps", [1, 2, 10])
def test_short_runs_stay_within_bounds(steps: int) -> None:
    options = TrainOptions(steps=steps, lr=1e-2, min_lr=1e-3)
    assert all(0.99999e-3 <= learning_rate(s, options) <= 1e-2 for s in range(steps + 5))
    assert learning_rate(0, options) == 1e-2


def test_a_rate_below_the_least_stays_what_it_is() -> None:
    options = TrainOptions(steps=10, warmup=0, lr=5e-5)
    assert {learning_rate(s, options) for s in range(10)} == {5e-5}
