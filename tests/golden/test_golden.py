"""Predictions equal the golden ones: restructuring the predictor changes no figure.

A change that is meant to move figures writes the files again (`python -m tests.golden.predictions`)
and its commit names which of the two was wrong.
"""

from __future__ import annotations

import json

import pytest

from tests.golden.predictions import GRIDS, rounded, stored


@pytest.mark.timeout(300)  # the largest grid takes a minute of a core, which may be shared
@pytest.mark.parametrize("grid", list(GRIDS))
def test_predictions_equal_the_golden_ones(grid: str) -> None:
    golden = stored(grid)
    found = json.loads(json.dumps(GRIDS[grid]()))
    assert list(found) == list(golden)
    changed = [case for case, answer in found.items() if answer != golden[case]]
    assert not changed, f"{len(changed)} of {len(golden)} changed, {changed[0]}: " + str(
        {"golden": golden[changed[0]], "now": found[changed[0]]}
    )


@pytest.mark.parametrize("grid", list(GRIDS))
def test_most_cases_are_predictions(grid: str) -> None:
    """A grid of rejections would hold nothing equal."""
    golden = stored(grid)
    assert sum("rejected" in answer for answer in golden.values()) < len(golden) / 2


def test_figures_are_kept_to_twelve_digits() -> None:
    assert rounded({"b": 1 / 3, "a": [2.0, "text", None]}) == {"a": [2, None], "b": 0.333333333333}
