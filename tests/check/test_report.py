"""What counts as equal, by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from hocket.spec.check import (
    CheckReport,
    ParameterRow,
    StepRow,
    covers,
    gradient_limit,
    merged_report,
)
from hocket.spec.placement import TensorBlock

ROW = ParameterRow(
    step=1, name="w", shape=(4, 2), gradient=1e-6, largest_gradient=0.02, gradient_limit=2e-6,
    value=1e-5, value_limit=2e-4, ranks=2,
)  # fmt: skip
GOOD = CheckReport(
    model="tiny",
    layout="tp2",
    world_size=2,
    learning_rate=1e-3,
    steps=(StepRow(step=1, reference_loss=5.0, loss=5.000009),),
    rows=(ROW, dataclasses.replace(ROW, step=2, gradient=2e-6)),
)


def test_a_good_report_is_ok_and_reads_back() -> None:
    assert GOOD.ok
    assert GOOD.failures == []
    assert CheckReport.from_json(GOOD.to_json()) == GOOD
    assert [row.step for row in GOOD.worst()] == [2]


@pytest.mark.parametrize(
    "change",
    [
        {"gradient": 2.1e-6},
        {"gradient": float("nan")},
        {"value": 3e-4},
        {"value": float("nan")},
        {"start": 1e-9},
        {"covered": False},
    ],
)
def test_a_bad_row_fails(change: dict[str, object]) -> None:
    bad = dataclasses.replace(GOOD, rows=(*GOOD.rows, dataclasses.replace(ROW, **change)))
    assert not bad.ok
    assert len(bad.failures) == 1
    assert "w" in bad.failures[0]
    assert bad.worst() == [bad.rows[-1]]


@pytest.mark.parametrize("loss", [5.00002, float("nan")])
def test_a_bad_loss_fails(loss: float) -> None:
    step = StepRow(step=3, reference_loss=5.0, loss=loss)
    bad = dataclasses.replace(GOOD, steps=(*GOOD.steps, step))
    assert not bad.ok
    assert "step 3" in bad.failures[0]


def test_nothing_compared_is_not_ok() -> None:
    assert not dataclasses.replace(GOOD, rows=()).ok
    assert not dataclasses.replace(GOOD, steps=()).ok


def test_a_true_zero_is_measured_by_the_model() -> None:
    assert gradient_limit(0.02, 10.0) == pytest.approx(2e-6)
    assert gradient_limit(0.0, 10.0) == pytest.approx(1e-6)


def box(start: tuple[int, ...], size: tuple[int, ...]) -> TensorBlock:
    return TensorBlock(start=start, local=(0,) * len(start), size=size)


def test_boxes_cover() -> None:
    top, bottom = box((0, 0), (2, 3)), box((2, 0), (2, 3))
    assert covers((4, 3), [top, bottom])
    assert covers((4, 3), [top, bottom, bottom])
    assert covers((4, 3), [top, box((1, 0), (3, 3))])
    assert not covers((4, 3), [top, top])
    assert not covers((4, 3), [top, box((2, 0), (2, 2))])
    assert not covers((4, 3), [box((1, 0), (3, 3))])
    assert covers((), [box((), ())])
    assert not covers((), [])
    assert covers((0, 3), [])


def test_a_part_that_nobody_holds_is_found() -> None:
    def rank(start: int) -> dict[str, Any]:
        return {
            "losses": [1.0],
            "norms": [1.0],
            "gradient": [{"w": 0.0}],
            "value": [{"w": [0.0, 2e-4]}],
            "start": {"w": 0.0},
            "owners": {"w": "w"},
            "blocks": {"w": [{"start": [start, 0], "local": [0, 0], "size": [2, 3]}]},
        }

    known = {
        "shapes": {"w": [4, 3], "v": [2]},
        "losses": [1.0],
        "norms": [1.0],
        "largest": [{"w": 1.0, "v": 1.0}],
    }

    def failures_of(*ranks: dict[str, Any]) -> list[str]:
        return merged_report(known, ranks, model="m", layout="tp2", lr=1e-3).failures

    failures = failures_of(rank(0), rank(2))
    assert failures == ["v: the ranks do not hold all of it"]
    failures = failures_of(rank(0), rank(0))
    assert "w: the ranks do not hold all of it" in failures
