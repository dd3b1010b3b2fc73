"""The last words of a run: no range that is none, no pipeline where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from hocket.cli.summary import next_steps, summary_lines
from hocket.jobs.record import JobRecorder, Summary
from hocket.spec.forecast import Forecast
from hocket.spec.run import RunFolder


@pytest.mark.parametrize(
    ("layout", "shown"), [("dp2:microbatches=1", False), ("pp2:microbatches=4", True)]
)
def test_a_pipelines_rest_is_reported_where_there_is_a_pipeline(layout: str, shown: bool) -> None:
    forecast = Forecast(
        layout=layout, step_seconds=1.0, tokens_per_second=1.0, bubble=0.1, memory=({"total": 9},)
    )
    summary = Summary(run=Path("run"), step_seconds=1.0, forecast=forecast, bubble=0.2)
    assert ("ranks idle 10% (measured 20%)" in "\n".join(summary_lines(summary))) == shown


@pytest.mark.parametrize(("each", "median"), [((9.0, 1.0, 2.0, 3.0), 2.0), ((9.0,), 9.0)])
def test_the_first_step_warms_up(tmp_path: Path, each: tuple[float, ...], median: float) -> None:
    record = JobRecorder()
    for number, seconds in enumerate(each, start=1):
        record(
            {"event": "step", "step": number, "loss": 1.0, "tokens_per_second": 60 / seconds,
             "step_seconds": seconds}
        )  # fmt: skip
    summary = record.summary(RunFolder(tmp_path))
    assert summary.step_seconds == median
    assert summary.tokens_per_second == 60 / median


def test_a_report_that_was_written_is_named_and_not_asked_for() -> None:
    asked = next_steps(Summary(run=Path("run")))
    assert asked[0] == "run folder run"
    assert any(line.endswith(" report run") for line in asked)
    named = next_steps(Summary(run=Path("run"), report=Path("run/report.html")))
    assert named[0] == "run folder run, report run/report.html"
    assert not any(line.endswith(" report run") for line in named)


@pytest.mark.parametrize(
    ("each", "said"),
    [
        ((35_200_001, 35_200_002), "peak tensor memory 35.2 MB a rank"),
        ((10**6, 2 * 10**6), "peak tensor memory 1 MB to 2 MB a rank"),
        ((10**6,), "peak tensor memory 1 MB"),
    ],
)
def test_equal_ranks_are_reported_once(each: tuple[int, ...], said: str) -> None:
    assert summary_lines(Summary(run=Path("run"), memory_bytes=each)) == [said]


def test_a_model_of_chats_is_tried_as_one(tmp_path: Path) -> None:
    assert any("--prompt" in line for line in next_steps(Summary(run=tmp_path)))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "chat_template.jinja").write_text("")
    assert any(
        line.endswith(f"generate {tmp_path} --chat") for line in next_steps(Summary(run=tmp_path))
    )
