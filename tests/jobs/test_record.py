"""Medians of a job's steps leave out those that warm up or compile."""

from __future__ import annotations

from pathlib import Path

import pytest

from hocket.jobs.record import JobRecorder
from hocket.reporting.record import read_run
from hocket.spec.layout import Layout
from hocket.spec.run import RunFolder, RunSpec, TrainOptions


@pytest.mark.parametrize(("compiled", "median"), [(False, 20.0), (True, 1.0)])
def test_steps_that_compile_are_no_steps(tmp_path: Path, compiled: bool, median: float) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.create(
        RunSpec(model="m", config={}, layout=Layout(), options=TrainOptions(compile=compiled))
    )
    record = JobRecorder()
    rows = []
    for step, seconds in enumerate((30.0, 39.0, 1.0), start=1):
        row = {"step": step, "loss": 1.0, "step_seconds": seconds, "tokens_per_second": 1 / seconds}
        record({"event": "step", **row})
        rows.append(f'{{"step": {step}, "step_seconds": {seconds}, "layout": "dp1"}}\n')
    folder.metrics_file.write_text("".join(rows))
    assert record.summary(folder).step_seconds == median
    assert read_run(folder.path).step_seconds == median
