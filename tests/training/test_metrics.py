"""metrics.jsonl: a row a step, on the disk at once, and without a lost future after a resume."""

from __future__ import annotations

import errno
import json
import os
import types
from typing import Any

import pytest

from hocket.training.metrics import TrainingMetrics


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_rows_are_readable_before_the_end(tmp_path) -> None:
    metrics = TrainingMetrics(tmp_path / "metrics.jsonl")
    metrics.write({"step": 1, "loss": 2.5})
    assert rows(tmp_path / "metrics.jsonl") == [{"step": 1, "loss": 2.5}]
    metrics.close()


def test_a_resumed_run_drops_what_came_after_its_checkpoint(tmp_path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"ste')
    metrics = TrainingMetrics(path, done=2)
    metrics.write({"step": 3, "loss": 1.0})
    metrics.close()
    assert rows(path) == [{"step": 1}, {"step": 2}, {"step": 3, "loss": 1.0}]


def test_a_damaged_row_does_not_end_the_run(tmp_path) -> None:
    path = tmp_path / "metrics.jsonl"
    whole = b'{"step": 1}\n{"step": 2}\n{"step": 3}\n'
    for at in range(11):
        for bit in range(8):
            damaged = bytearray(whole)
            damaged[at] ^= 1 << bit
            path.write_bytes(damaged)
            metrics = TrainingMetrics(path, done=3)
            metrics.write({"step": 4})
            metrics.close()
            assert [row["step"] for row in rows(path)][-3:] == [2, 3, 4]


def test_a_new_run_begins_a_new_file(tmp_path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 9}\n')
    metrics = TrainingMetrics(path)
    metrics.close()
    assert rows(path) == []


@pytest.mark.parametrize("done", [0, 2])
def test_an_owner_that_was_frozen_appends_no_row_to_its_successor_s(tmp_path, done: int) -> None:
    path = tmp_path / "metrics.jsonl"
    frozen = TrainingMetrics(path)
    for step in (1, 2, 3):
        frozen.write({"step": step})
    successor = TrainingMetrics(path, done=done)
    successor.write({"step": done + 1})
    frozen.write({"step": 4})  # it runs again
    successor.write({"step": done + 2})
    frozen.close()
    successor.close()
    assert [row["step"] for row in rows(path)] == list(range(1, done + 3))


class _FullDisk:
    """A raw file of which `left` bytes can still be written."""

    def __init__(self, file: Any, left: int) -> None:
        self.file, self.left, self.name = file, left, file.name

    def write(self, data: bytes) -> int:
        if not self.left:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        count: int = self.file.write(data[: self.left])
        self.left -= count
        return count

    def fileno(self) -> int:
        number: int = self.file.fileno()
        return number

    def close(self) -> None:
        self.file.close()


def test_rows_wait_for_a_disk_that_is_full(tmp_path) -> None:
    """One row is cut by it; with space again all are there. Without, closing says so."""
    path = tmp_path / "metrics.jsonl"
    notes: list[str] = []
    metrics = TrainingMetrics(path, note=notes.append)
    disk = metrics._file = _FullDisk(metrics._file, 17)
    for step in (1, 2, 3):
        metrics.write({"step": step})
    assert path.read_bytes() == b'{"step": 1}\n{"ste'
    (note,) = notes
    assert "metrics.jsonl: No space left on device; training continues" in note
    with pytest.raises(OSError, match="No space left") as caught:
        metrics.close()
    assert caught.value.filename == str(path)
    disk.left = 10_000
    metrics.write({"step": 4})
    metrics.close()
    assert [row["step"] for row in rows(path)] == [1, 2, 3, 4]


def test_a_resume_on_a_full_disk_keeps_the_rows(tmp_path, monkeypatch) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"ste')

    def full(*given: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("hocket.training.metrics.write_text", full)
    TrainingMetrics(path, done=2).close()
    assert rows(path) == [{"step": 1}, {"step": 2}]


@pytest.mark.torch
def test_a_record_that_cannot_be_written_is_a_note(tmp_path, monkeypatch) -> None:
    """As memory.json, timeline.json and communication.json: training continues without it."""
    from hocket.training import timeline

    def full(*given: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    said: list[dict[str, Any]] = []
    context: Any = types.SimpleNamespace(emit=said.append)
    monkeypatch.setattr("hocket.training.timeline.write_text", full)
    timeline.write_record(context, tmp_path / "memory.json", "[]")
    (event,) = said
    assert "memory.json: No space left on device; training continues" in event["text"]
    assert list(tmp_path.iterdir()) == []
