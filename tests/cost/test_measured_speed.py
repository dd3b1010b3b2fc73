"""The speed of a machine: parts of a probe on one footing."""

from __future__ import annotations

import dataclasses

import pytest

from hocket.cost.measured_speed import at_speed
from hocket.spec.errors import OptionError
from hocket.spec.measured import PULSES, MachineMeasurements, Pulse
from tests.planning.test_machine_forecast import measured


def pulses(part: str, seconds: float) -> list[Pulse]:
    return [Pulse(part=part, operation=name, seconds=seconds) for name in PULSES]


def probed(*rows: Pulse) -> MachineMeasurements:
    return dataclasses.replace(measured(), pulses=rows)


def test_without_pulses_nothing_changes() -> None:
    assert at_speed(measured()) == measured()


def test_a_part_that_was_measured_in_a_slow_moment_is_brought_to_the_mean() -> None:
    found = probed(*pulses("products", 4e-4), *pulses("streams", 1e-4))
    at = at_speed(found)  # the mean is 2e-4
    assert at.products[0].seconds == pytest.approx(found.products[0].seconds / 2)
    assert at.streams[0].seconds == pytest.approx(found.streams[0].seconds * 2)
    assert at.curves == found.curves


def test_pulses_are_read_back_and_checked() -> None:
    found = probed(*pulses("products", 1e-4))
    assert MachineMeasurements.from_dict(found.to_dict()) == found
    table = found.to_dict()
    table["pulses"][0][1] = "prodct"
    with pytest.raises(OptionError, match="prodct"):
        MachineMeasurements.from_dict(table)
