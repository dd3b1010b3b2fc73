"""Goodput against a simulation of failures, closed forms and a published run."""

import math
import random

import pytest

from hocket.planning.goodput import best_interval, blocked, efficiency, goodput
from hocket.spec.errors import OptionError


def simulated(interval, mean, save, restart, segments=40_000, seed=1):
    """The part of the time that advanced a run, by simulating failures one by one."""
    draw = random.Random(seed)
    clock, done = 0.0, 0
    left = draw.expovariate(1 / mean)
    while done < segments:
        need = interval + save
        if left >= need:
            clock, left, done = clock + need, left - need, done + 1
            continue
        clock += left
        while True:  # a failure while restarting begins the restart again
            left = draw.expovariate(1 / mean)
            if left >= restart:
                clock, left = clock + restart, left - restart
                break
            clock += left
    return segments * interval / clock


@pytest.mark.parametrize(
    ("interval", "mean", "save", "restart"),
    [(600, 10_800, 30, 300), (1_800, 3_600, 120, 600), (100, 400, 20, 50)],
)
def test_the_expression_is_the_mean_of_simulated_runs(interval, mean, save, restart):
    found = efficiency(interval, mean, save, restart)
    assert found == pytest.approx(simulated(interval, mean, save, restart), rel=0.01)


@pytest.mark.parametrize(("mean", "save"), [(10_800, 30), (3_600, 600), (400, 390), (1e7, 1)])
def test_no_other_interval_is_better(mean, save):
    best = best_interval(mean, save)
    most = efficiency(best, mean, save, 100)
    for factor in (0.5, 0.9, 0.99, 1.01, 1.1, 2):
        assert efficiency(best * factor, mean, save, 100) <= most * (1 + 1e-12)


def test_young_and_daly_where_saves_are_short():
    mean, save = 1e6, 10.0
    assert best_interval(mean, save) == pytest.approx(math.sqrt(2 * save * mean), rel=0.01)


def test_saves_that_take_longer_than_a_failure_lasts():
    assert 0 < best_interval(100.0, 1e6) <= 100.0
    assert efficiency(50.0, 1.0, 1e6, 10.0) == 0.0


def test_erlang_b():
    assert blocked(1.0, 1) == pytest.approx(0.5)
    assert blocked(2.0, 2) == pytest.approx((4 / 2) / (1 + 2 + 2))
    assert blocked(0.01, 3) == pytest.approx(0.01**3 / 6, rel=0.02)


def test_llama_3_on_16384_gpus():
    found = goodput(num_gpus=16_384, num_nodes=2_048, save_seconds=30, restart_seconds=600)
    assert found.mean_hours == pytest.approx(54 * 24 / 419, rel=0.02)  # every three hours
    assert found.goodput > 0.85  # "higher than 90% effective training time" with spares at hand
    assert found.spares[0] < 0.2  # without any, it waits for a repair most of the time
    assert list(found.spares) == sorted(found.spares)
    assert found.to_json()["interval_seconds"] == found.interval_seconds


def test_more_gpus_fail_more_often():
    values = [
        goodput(num_gpus=8 * n, num_nodes=n, save_seconds=60).goodput for n in (1, 8, 64, 512)
    ]
    assert values == sorted(values, reverse=True)


@pytest.mark.parametrize("name", ["failures", "save_seconds", "restart_seconds", "repair_hours"])
def test_numbers_above_zero(name):
    with pytest.raises(OptionError, match=name.replace("_", "-")):
        goodput(**{"num_gpus": 8, "num_nodes": 1, "save_seconds": 1.0, name: 0.0})
