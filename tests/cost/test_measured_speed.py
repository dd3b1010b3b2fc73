"""The speed of a machine: parts of a probe on one footing, and what a pulse changes."""

from __future__ import annotations

import dataclasses

import pytest

from hocket.cost.measured_speed import at_speed, believed, factors
from hocket.spec.errors import OptionError
from hocket.spec.measured import PULSES, Measured, Pulse
from tests.planning.test_machine_forecast import measured


def pulses(part: str, seconds: float, ranks: int = 1, spread: float = 0.0) -> list[Pulse]:
    return [
        Pulse(part=part, operation=name, seconds=seconds, ranks=ranks, spread=spread)
        for name in PULSES
    ]


def probed(*rows: Pulse) -> Measured:
    return dataclasses.replace(measured(), pulses=rows)


def test_without_pulses_nothing_changes() -> None:
    assert at_speed(measured()) == measured()
    assert factors(measured(), pulses("", 1.0)) == {}


def test_a_part_that_was_measured_in_a_slow_moment_is_brought_to_the_mean() -> None:
    found = probed(*pulses("products", 4e-4), *pulses("streams", 1e-4))
    at = at_speed(found)  # the mean is 2e-4
    assert at.products[0].seconds == pytest.approx(found.products[0].seconds / 2)
    assert at.streams[0].seconds == pytest.approx(found.streams[0].seconds * 2)
    assert at.curves == found.curves


def test_a_pulse_of_several_ranks_is_held_against_as_many() -> None:
    rows = [*pulses("products", 1e-4), *pulses("sharing", 1e-4), *pulses("sharing", 1.5e-4, 2)]
    found = probed(*rows)
    same = factors(found, pulses("", 1.5e-4, 2))
    assert same == pytest.approx(dict.fromkeys(PULSES, 1.0))
    assert factors(found, pulses("", 1.2e-4)) == pytest.approx(dict.fromkeys(PULSES, 1.2))
    assert factors(found, pulses("", 1e-4, 4)) == {}, "four at once were never measured"


def test_half_of_a_large_difference_is_believed_and_little_of_a_small_one() -> None:
    found = probed(*pulses("products", 1e-4, spread=0.2))
    (small, *_) = believed(found, {"product": 1.05}).values()
    (large, *_) = believed(found, {"product": 3.0}).values()
    assert 1.0 < small < 1.01
    assert 1.68 < large < 3.0**0.5
    assert believed(found, {"product": 1.0}) == {"product": 1.0}


def test_a_slower_machine_takes_longer_for_all_of_it() -> None:
    found = probed(*pulses("products", 1e-4), *pulses("dispatch", 1e-4))
    slow = at_speed(found, dict.fromkeys(PULSES, 2.0))
    assert slow.products[0].seconds == pytest.approx(2 * found.products[0].seconds)
    assert slow.dispatch[0].recorded == pytest.approx(2 * found.dispatch[0].recorded)
    assert slow.curves[0].seconds == pytest.approx([2 * s for s in found.curves[0].seconds])
    # What had no pulse beside it cannot be told.
    assert slow.kernels == found.kernels


def test_pulses_are_read_back_and_checked() -> None:
    found = probed(*pulses("products", 1e-4))
    assert Measured.from_dict(found.to_dict()) == found
    table = found.to_dict()
    table["pulses"][0][1] = "prodct"
    with pytest.raises(OptionError, match="prodct"):
        Measured.from_dict(table)
