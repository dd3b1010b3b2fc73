"""metrics.jsonl: a row a step, on the disk at once, and without a lost future after a resume."""

from __future__ import annotations

import json

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
