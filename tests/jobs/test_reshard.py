"""A run that goes on in other layouts, as commands: its losses are those of one process."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from hocket.cli.main import main
from hocket.reporting.record import read_run
from hocket.spec.run import RunFolder

pytestmark = [pytest.mark.ranks, pytest.mark.usefixtures("warm"), pytest.mark.timeout(240)]

LINE = "One melody is dealt note by note to several voices, one sounding while another rests.\n"
# The weights of embedding and head are tied, and the rate does not depend on the last step.
BEGIN = ["tiny-gpt2", "--dropout", "0", "--seq-len", "32", "--global-batch", "8", "--lr", "1e-3",
         "--min-lr", "1e-3", "--warmup", "0", "--eval-batches", "1"]  # fmt: skip

Rows = list[dict[str, Any]]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("resharded") / "text.txt"
    file.write_text(LINE * 200)
    return str(file)


def go(run: Path, *flags: str) -> None:
    assert main(["train", "--run", str(run), "--cluster", "none", *flags]) == 0


def rows(run: Path) -> Rows:
    return [json.loads(line) for line in RunFolder(run).metrics_file.open()]


@pytest.fixture(scope="module")
def alone(text: str, tmp_path_factory: pytest.TempPathFactory, ranks) -> Rows:  # type: ignore[no-untyped-def]
    """Eight steps of one process, never interrupted."""
    from hocket.jobs.record import JobRecorder
    from hocket.jobs.request import request
    from hocket.jobs.train import launch_ranks, prepare, prepare_run

    run = tmp_path_factory.mktemp("alone") / "run"
    values = {
        "model": "tiny-gpt2", "data": text, "run": run, "dropout": 0.0, "seq_len": 32,
        "global_batch": 8, "lr": 1e-3, "min_lr": 1e-3, "warmup": 0, "eval_batches": 1, "steps": 8,
    }  # fmt: skip
    job, record = prepare.prepare_job(request(values)), JobRecorder()
    folder = RunFolder(run)
    launch_ranks(ranks.launcher, folder, prepare_run(job, folder, record), record, cluster="none")
    return rows(run)


def test_a_run_goes_on_in_one_layout_after_another(
    alone: Rows, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    go(run, *BEGIN, "--data", text, "--layout", "dp2.tp2:zero=1", "--steps", "2",
       "--save-every", "2")  # fmt: skip
    capsys.readouterr()
    for steps, flags in (
        (4, ("--layout", "pp2", "--schedule", "gpipe", "--microbatches", "4")),
        (6, ("--layout", "dp2:zero=3,offload=params")),
        (8, ("--layout", "tp2:sequence_parallel=true,recompute=full")),
    ):
        go(run, "--resume", "--steps", str(steps), *flags)
    found = rows(run)
    assert [row["step"] for row in found] == [1, 2, 3, 4, 5, 6, 7, 8]
    losses, norms = ([row[name] for row in found] for name in ("loss", "grad_norm"))
    assert losses == pytest.approx([row["loss"] for row in alone], abs=1e-4)
    assert norms == pytest.approx([row["grad_norm"] for row in alone], rel=1e-3)
    assert found[-1]["held_out_loss"] == pytest.approx(alone[-1]["held_out_loss"], abs=1e-4)
    said = capsys.readouterr().out
    assert "from step 3 on the layout is pp2:schedule=gpipe,microbatches=4" in said

    # What is told of the run is told of the layout that it has now; what was before is kept.
    record = read_run(run)
    assert [stretch[1:] for stretch in record.stretches] == [(1, 2), (3, 4), (5, 6), (7, 8)]
    assert record.measured is not None
    assert record.measured.num_ranks == 2
    assert record.recorded_step in (7, 8)
    assert record.step_seconds == found[-1]["step_seconds"], "the first of a start warms up"
    assert record.notes[0].startswith("steps 1 to 2 in dp2.tp2:microbatches=1,zero=1, ")
    assert main(["report", str(run), "--format", "text"]) == 0
    assert "steps 7 to 8 in tp2:microbatches=1" in capsys.readouterr().out
    before = read_run(run / "earlier" / "1")
    assert (str(before.layout), before.steps_done) == ("dp2.tp2:microbatches=1,zero=1", 2)
    assert before.measured is not None
    assert before.measured.num_ranks == 4
    assert len(list((run / "earlier").iterdir())) == 3
    assert main(["export", str(run), "--to", str(tmp_path / "model")]) == 0


def test_a_refusal_by_the_ranks_forecast_gives_everything_back(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    go(run, *BEGIN, "--data", text, "--layout", "dp2", "--steps", "2", "--save-every", "1")
    before = {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}
    flags = ["--run", str(run), "--resume", "--steps", "4", "--memory-per-rank", "20MB"]
    assert main(["train", *flags, "--layout", "dp1", "--cluster", "none"]) == 2
    assert "a rank of dp1 needs" in capsys.readouterr().err
    assert {file: file.read_bytes() for file in run.rglob("*") if file.is_file()} == before
    # What was lost with the process that wrote it: steps after the last checkpoint, and a layout
    # that was written and never run.
    shutil.rmtree(run / "checkpoints" / "step-000002")
    go(run, "--resume", "--steps", "3", "--layout", "dp2", "--data-parallel", "threads")
    assert [(row["step"], row["layout"]) for row in rows(run)] == [
        (1, "dp2:microbatches=1"),
        (2, "dp2:microbatches=1,data_parallel=threads"),
        (3, "dp2:microbatches=1,data_parallel=threads"),
    ]
