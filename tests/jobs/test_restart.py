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
from hocket.spec.errors import RankFailure
from hocket.spec.run import RunFolder
from tests.jobs.warm import Warm
from tests.ranks import RankPool

pytestmark = [pytest.mark.train, pytest.mark.ranks, pytest.mark.timeout(240)]

STEPS = 12


def job(folder: Path, name: str, layout: str, faults: Any = (), **options: Any) -> Summary:
    text = folder / "text.txt"
    text.write_text("a hocket is one melody for several voices\n" * 200)
    values = {
        "model": "tiny-llama", "data": str(text), "run": str(folder / name), "layout": layout,
        "seq_len": 16, "global_batch": 4, "steps": STEPS, "save_every": 4, "eval_every": 6,
        "cluster": "none", "device": "cpu", "warmup": 2, **options,
    }  # fmt: skip
    return train(request(values), faults=faults)


def weights(folder: Path, name: str) -> int:
    return zlib.crc32((folder / name / "model" / "model.safetensors").read_bytes())


def losses(folder: Path, name: str) -> list[tuple[int, float]]:
    rows = (folder / name / "metrics.jsonl").read_text().splitlines()
    return [(row["step"], row["loss"]) for row in map(json.loads, rows)]


@pytest.fixture(autouse=True)
def _warm(monkeypatch: pytest.MonkeyPatch, ranks: RankPool) -> None:
    monkeypatch.setenv("HOCKET_LEDGER", "0")
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
