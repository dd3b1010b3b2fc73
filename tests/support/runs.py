"""Small training runs: `job` makes one, `whole` an undisturbed one for all tests that need it."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hocket.jobs.record import Summary
from hocket.jobs.request import request
from hocket.jobs.train import train_model
from tests.ranks import RankPool

STEPS = 12
Whole = Callable[..., None]


def text_in(folder: Path) -> Path:
    """What the runs of a folder are trained on, written there."""
    text = folder / "text.txt"
    text.write_text("a hocket is one melody for several voices\n" * 200)
    return text


def job(
    folder: Path,
    name: str,
    layout: str,
    faults: Any = (),
    notes: Any = None,
    heard: Callable[[dict[str, Any]], None] | None = None,
    **options: Any,
) -> Summary:
    """Train the tiny Llama into `folder / name`; texts of notes are added to `notes`, and `heard`
    is called with each event."""
    values = {
        "model": "tiny-llama", "data": str(text_in(folder)), "run": str(folder / name),
        "layout": layout, "seq_len": 16, "global_batch": 4, "steps": STEPS, "save_every": 4,
        "eval_every": 6, "cluster": "none", "device": "cpu", "warmup": 2, **options,
    }  # fmt: skip

    def hear(event: dict[str, Any]) -> None:
        if notes is not None and event["event"] == "note":
            notes.append(event["text"])
        if heard is not None:
            heard(event)

    return train_model(request(values), on_event=hear, faults=faults)


def weights(folder: Path, name: str) -> int:
    """A checksum of the model that a run ended with."""
    return zlib.crc32((folder / name / "model" / "model.safetensors").read_bytes())


def losses(folder: Path, name: str) -> list[tuple[int, float]]:
    """Step and loss of every step that a run recorded."""
    rows = (folder / name / "metrics.jsonl").read_text().splitlines()
    return [(row["step"], row["loss"]) for row in map(json.loads, rows)]


@pytest.fixture
def runs(warm: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs of this test run on the session's launcher and write no ledger."""
    monkeypatch.setenv("HOCKET_LEDGER", "")


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """`whole(tmp_path, "whole", "dp2", save_every=2)`: the run that `job` would make there, which
    was made once for all tests that ask for the same; to be read, not to be written to."""
    made: dict[str, Path] = {}

    def found(folder: Path, name: str, layout: str, **options: Any) -> None:
        key = json.dumps([layout, options], sort_keys=True)
        if key not in made:
            where = tmp_path_factory.mktemp("whole")
            job(where, "run", layout, **options)
            made[key] = where
        text_in(folder)
        (folder / name).symlink_to(made[key] / "run")

    return found
