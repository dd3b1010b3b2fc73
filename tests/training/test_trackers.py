"""Trackers, offline, read back by their own libraries; a resumed run continues its curves."""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hocket.spec.errors import OptionError
from hocket.spec.install import install_line
from hocket.spec.run import RunSpec
from hocket.training import trackers
from hocket.training.metrics import TrainingMetrics
from hocket.training.trackers import Trackers

pytestmark = [pytest.mark.torch, pytest.mark.timeout(90)]

CURVE = {1: 2.5, 2: 1.5, 3: 1.25}


def tracked(name: str, folder: Path) -> None:
    """Two steps, then a third one by a start that resumes."""
    for done in (0, 2):
        found = Trackers(name, folder, {"lr": 1e-3, "layout": "dp2"}, done=done)
        metrics = TrainingMetrics(folder / "metrics.jsonl", done=done, trackers=found)
        for step in (1, 2) if done == 0 else (3,):
            metrics.write({"step": step, "loss": CURVE[step], "mfu": None, "memory_bytes": [1]})
        metrics.close()


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracked("tensorboard", tmp_path)
    events: Any = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert {e.step: e.value for e in events.Scalars("loss")} == CURVE
    assert "mfu" not in events.Tags()["scalars"]


def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    tracked("mlflow", tmp_path)
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    number = json.loads((tmp_path / trackers.IDS).read_text())["mlflow"]
    history = client.get_metric_history(number, "loss")
    assert {m.step: m.value for m in history} == CURVE
    run = client.get_run(number)
    assert run.data.params["layout"] == "dp2"
    assert run.info.status == "FINISHED"


def records(data: bytes) -> Iterator[bytes]:
    """The records of a file in the log format of LevelDB, which an offline run of wandb has: after
    a header of 7 bytes, blocks of 32 KiB of chunks (checksum, length, type)."""
    at, whole = 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        size, kind = struct.unpack_from("<HB", data, at + 4)
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a whole record, or the last chunk of one
            yield whole
            whole = b""


def test_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    monkeypatch.setenv("WANDB_MODE", "offline")
    tracked("wandb", tmp_path)
    wandb.teardown()  # as at the end of a process: its writer may still have a row until then
    files = sorted((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    assert len({file.name for file in files}) == 1  # both starts are one run
    found: dict[int, float] = {}
    for file in files:
        for data in records(file.read_bytes()):
            record: Any = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            row = {
                (item.key or ".".join(item.nested_key)): json.loads(item.value_json)
                for item in record.history.item
            }
            if "loss" in row:
                found[row["_step"]] = row["loss"]
    assert found == CURVE


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: Any) -> Any:
        def log(values: dict[str, float], step: int) -> None:
            raise OSError("the disk is full")

        return log, lambda: None, "x"

    monkeypatch.setattr(trackers, "_tensorboard", start)
    monkeypatch.setitem(trackers.LIBRARIES, "tensorboard", "json")


@pytest.mark.usefixtures("broken")
def test_a_tracker_that_fails_does_not_end_the_run(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="tracker tensorboard is left out from here on: OSError"):
        tracked("tensorboard", tmp_path)
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3


def test_what_is_not_there_is_rejected_before_ranks_start(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OptionError, match="unknown tracker 'wandbb'"):
        trackers.tracker_names("wandbb")
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setitem(trackers.LIBRARIES, "wandb", "no_such_module")
    with pytest.raises(OptionError, match="needs the package no_such_module") as error:
        trackers.tracker_names("tensorboard,wandb" if "tensorboard" in sys.modules else "wandb")
    assert error.value.hint == install_line("trackers")


def test_a_run_of_the_version_before_keeps_its_tensorboard() -> None:
    spec = RunSpec.from_json(
        '{"model": "m", "config": {}, "layout": "dp1", "options": {"tensorboard": true}}'
    )
    assert spec.options.tracker == "tensorboard"
