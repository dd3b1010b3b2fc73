"""Flags that take several values, wherever they stand."""

from __future__ import annotations

import pytest

from hocket.cli.compare import Compare
from hocket.cli.flags import _lists, parse
from hocket.cli.plan import PlanFlags
from hocket.cli.train import Train


@pytest.mark.parametrize(
    "arguments",
    [
        ["m", "--pin", "tp=2", "pp=2"],
        ["m", "--pin", "tp=2", "--pin", "pp=2"],
        ["m", "--pin=tp=2", "--pin=pp=2"],
        ["m", "--pin", "tp=2", "--seq-len", "64", "--pin", "pp=2"],
        ["m", "--pin", "tp=2", "--seq-len=64", "--pin=pp=2", "--top", "3"],
    ],
)
def test_a_list_given_twice_is_taken_together(arguments: list[str]) -> None:
    found = parse(PlanFlags, "plan", arguments, PlanFlags())
    assert found.pin == ("tp=2", "pp=2")
    assert found.model == "m"


def test_groups_in_a_group_are_looked_through() -> None:
    assert "--data" in _lists(Train)
    assert "--layout" not in _lists(Train)
    assert _lists(Compare)
    found = parse(Train, "train", ["m", "--data", "a", "--layout", "dp2", "--data", "b"], Train())
    assert "('a', 'b')" in repr(found)


def test_of_one_value_the_last_counts() -> None:
    assert parse(PlanFlags, "plan", ["m", "--top", "3", "--top", "4"], PlanFlags()).top == 4
