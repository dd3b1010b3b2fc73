"""A run whose ranks die or hang goes on by itself, and ends as the run that was never disturbed."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import pytest

import hocket.launch
from hocket.jobs.record import Summary
from hocket.jobs.request import request
from hocket.jobs.train import train
from hocket.spec.errors import (
    CheckpointError,
    OptionError,
    RankFailure,
    ReplicaError,
    RunFolderError,
    TrainingError,
)
from hocket.spec.run import RunFolder
from tests.jobs.warm import Warm
from tests.ranks import RankPool

pytestmark = [pytest.mark.train, pytest.mark.ranks, pytest.mark.timeout(240)]

STEPS = 12


def job(
    folder: Path, name: str, layout: str, faults: Any = (), notes: Any = None, **options: Any
) -> Summary:
    text = folder / "text.txt"
    text.write_text("a hocket is one melody for several voices\n" * 200)
    values = {
        "model": "tiny-llama", "data": str(text), "run": str(folder / name), "layout": layout,
        "seq_len": 16, "global_batch": 4, "steps": STEPS, "save_every": 4, "eval_every": 6,
        "cluster": "none", "device": "cpu", "warmup": 2, **options,
    }  # fmt: skip

    def hear(event: dict[str, Any]) -> None:
        if notes is not None and event["event"] == "note":
            notes.append(event["text"])

    return train(request(values), on_event=hear, faults=faults)


def weights(folder: Path, name: str) -> int:
    return zlib.crc32((folder / name / "model" / "model.safetensors").read_bytes())


def losses(folder: Path, name: str) -> list[tuple[int, float]]:
    rows = (folder / name / "metrics.jsonl").read_text().splitlines()
    return [(row["step"], row["loss"]) for row in map(json.loads, rows)]


@pytest.fixture(autouse=True)
def _warm(monkeypatch: pytest.MonkeyPatch, ranks: RankPool) -> None:
    monkeypatch.setenv("HOCKET_LEDGER", "")
    monkeypatch.setattr(Warm, "pool", ranks)
    monkeypatch.setattr(hocket.launch, "Launcher", Warm)


PHASES = [
    ("build", 1), ("step", 1), ("forward", 6), ("collective", 7), ("save", 8), ("save", 4),
    ("evaluate", 6), ("export", 12),
]  # fmt: skip


@pytest.mark.parametrize("layout", ["dp2", "pp2:microbatches=2"])
def test_a_rank_that_is_killed_anywhere_changes_no_bit(tmp_path: Path, layout: str) -> None:
    job(tmp_path, "whole", layout)
    for number, (phase, step) in enumerate(PHASES):
        fault = {"kind": "kill", "rank": 1, "phase": phase, "step": step}
        name = f"cut-{number}"
        summary = job(tmp_path, name, layout, [fault])
        assert summary.restarts == 1, (phase, step)
        assert weights(tmp_path, name) == weights(tmp_path, "whole"), (phase, step)
        assert losses(tmp_path, name) == losses(tmp_path, "whole"), (phase, step)


@pytest.mark.parametrize("layout", ["dp2:zero=3", "pp2:microbatches=2"])
def test_a_full_disk_costs_one_checkpoint(tmp_path: Path, layout: str) -> None:
    job(tmp_path, "whole", layout)
    notes: list[str] = []
    fault = {"kind": "full", "rank": 1, "phase": "save", "step": 8}
    summary = job(tmp_path, "full", layout, [fault], notes)
    assert summary.restarts == 0
    (note,) = [text for text in notes if "was not saved" in text]
    assert "step 8 was not saved" in note
    assert "No space left on device" in note
    assert weights(tmp_path, "full") == weights(tmp_path, "whole")
    kept = sorted(path.name for path in (tmp_path / "full" / "checkpoints").glob("[!.]*"))
    assert kept == ["latest", "step-000004", "step-000012"]
    with pytest.raises(TrainingError, match="step 12 was not saved"):
        job(tmp_path, "last", layout, [{**fault, "step": 12}], max_restarts=0)


def test_a_failure_that_comes_back_ends_the_run(tmp_path: Path) -> None:
    fault = {"kind": "raise", "rank": 1, "phase": "step", "step": 6, "attempts": 9}
    with pytest.raises(RankFailure, match="the same failure came back after step 5") as caught:
        job(tmp_path, "run", "dp2", [fault])
    assert "injected in step" in str(caught.value)
    assert "rank 1" in str(caught.value)


def test_restarts_in_a_row_are_bounded(tmp_path: Path) -> None:
    faults = [
        {"kind": "kill", "rank": 0, "phase": "step", "step": 2},
        {"kind": "kill", "rank": 1, "phase": "step", "step": 3, "attempts": 9},
    ]
    with pytest.raises(RankFailure, match="1 restarts in a row reached no new checkpoint"):
        job(tmp_path, "run", "dp2", faults, max_restarts=1, save_every=0)
    with pytest.raises(RankFailure, match=r"^rank 0 of 2 .* was killed by SIGKILL"):
        job(tmp_path, "none", "dp2", faults, max_restarts=0)


def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path) -> None:
    job(tmp_path, "whole", "dp2:zero=1")
    for step in (6, 10):  # the only checkpoint, and the newer of two
        fault = {"kind": "damage", "rank": 1, "phase": "step", "step": step}
        summary = job(tmp_path, f"cut-{step}", "dp2:zero=1", [fault])
        assert summary.restarts
        assert weights(tmp_path, f"cut-{step}") == weights(tmp_path, "whole")


@pytest.mark.parametrize("backend", ["shm", "gloo"])
@pytest.mark.parametrize("kind", ["stop", "stuck"])
def test_a_rank_that_hangs_is_named(tmp_path: Path, kind: str, backend: str) -> None:
    fault = {"kind": kind, "rank": 1, "phase": "forward", "step": 7}
    events: list[Any] = []
    job(tmp_path, "whole", "pp2:microbatches=2", backend=backend)
    text = tmp_path / "text.txt"
    values = {
        "model": "tiny-llama", "data": str(text), "run": str(tmp_path / "cut"),
        "layout": "pp2:microbatches=2", "seq_len": 16, "global_batch": 4, "steps": STEPS,
        "save_every": 4, "eval_every": 6, "cluster": "none", "device": "cpu", "warmup": 2,
        "backend": backend,
    }  # fmt: skip
    train(request(values), on_event=events.append, faults=[fault])
    (failure,) = [e["text"] for e in events if e["event"] == "note" and "restart 1" in e["text"]]
    assert "rank 1" in failure
    told = (tmp_path / "cut" / "failures.txt").read_text()
    assert "rank 0: step 7, " in told
    assert "rank 1: step 7, " in told
    assert "[1RECV_F0]" in told  # the cell of the schedule that rank 1 was in
    assert 'training/faults.py"' in told  # its stack
    assert weights(tmp_path, "cut") == weights(tmp_path, "whole")
    assert RunFolder(tmp_path / "cut").load().options.resume is False


def test_the_same_command_starts_continues_and_reports_the_end(tmp_path: Path) -> None:
    import shutil

    job(tmp_path, "run", "dp2")
    before, run = weights(tmp_path, "run"), tmp_path / "run"
    files = {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}
    again = job(tmp_path, "run", "dp2")
    assert again.steps == STEPS
    assert {file: file.read_bytes() for file in run.rglob("*") if file.is_file()} == files
    shutil.rmtree(run / "model")  # ended in its export
    job(tmp_path, "run", "dp2")
    assert weights(tmp_path, "run") == before
    shutil.rmtree(run / "model")  # ended before its first checkpoint
    shutil.rmtree(run / "checkpoints")
    job(tmp_path, "run", "dp2")
    assert weights(tmp_path, "run") == before
    assert [step for step, _ in losses(tmp_path, "run")] == list(range(1, STEPS + 1))
    with pytest.raises(CheckpointError, match="seed is 7"):
        job(tmp_path, "run", "dp2", seed=7)
    (tmp_path / "other.txt").write_text("x")
    with pytest.raises(RunFolderError, match="already holds a run of the data"):
        job(tmp_path, "run", "dp2", data=str(tmp_path / "other.txt"))


def test_a_stop_that_takes_longer_than_is_allowed_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="kills after 1 s"):
        job(tmp_path, "run", "dp2", grace_seconds=1.0)


@pytest.mark.parametrize("layout", ["dp2", "dp2:zero=1", "tp2", "pp2:microbatches=2"])
def test_a_gradient_that_is_not_finite_is_skipped_by_all(tmp_path: Path, layout: str) -> None:
    fault = {"kind": "nan", "rank": 1, "phase": "step", "step": 5}
    notes: list[str] = []
    job(tmp_path, "run", layout, [fault], notes)
    (text,) = [note for note in notes if "is skipped" in note]
    assert text.startswith("step 5 is skipped")
    assert "first parameter with such a gradient: model." in text
    if layout in ("tp2", "pp2:microbatches=2"):
        assert "on rank 1" in text
    assert [step for step, _ in losses(tmp_path, "run")] == [1, 2, 3, 4, *range(6, STEPS + 1)]
    with pytest.raises(TrainingError, match="step 5: the loss is"):
        job(tmp_path, "none", layout, [fault], max_skipped_steps=0)


@pytest.mark.parametrize(
    ("layout", "rank"), [("dp2", None), ("dp3", 1), ("dp2:zero=1", None), ("dp3:zero=1", 1)]
)
def test_a_flipped_bit_in_a_replica_is_found(tmp_path: Path, layout: str, rank: int | None) -> None:
    fault = {"kind": "flip", "rank": 1, "phase": "step", "step": 7}
    notes: list[str] = []
    options = {"replica_check_every": 1, "global_batch": 6}
    job(tmp_path, "whole", layout, **options)
    who = "one of ranks" if rank is None else f"rank {rank} differs in"
    with pytest.raises(ReplicaError, match=f"differ after step 7: {who}.*model.embed_tokens"):
        job(tmp_path, "stop", layout, [fault], **options)
    repaired = job(tmp_path, "run", layout, [fault], notes, on_divergence="repair", **options)
    assert weights(tmp_path, "run") == weights(tmp_path, "whole")
    assert repaired.restarts == (1 if rank is None else 0)
    assert any("differ" in note for note in notes)


@pytest.mark.parametrize("layout", ["dp2.ep2", "dp4.ep2", "dp2.ep2:zero=1"])
def test_experts_on_other_ranks_are_not_taken_for_differing_replicas(
    tmp_path: Path, layout: str
) -> None:
    job(
        tmp_path, "run", layout, model="tiny-mixtral", steps=2, timeline_step=1, save_every=0,
        replica_check_every=1,
    )  # fmt: skip
    assert len(losses(tmp_path, "run")) == 2
