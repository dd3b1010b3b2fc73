"""Metrics: one JSON object a step in metrics.jsonl, and what trackers make of it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from hocket.spec.files import named, parse_json
from hocket.spec.run import write_text
from hocket.training.trackers import Trackers


class TrainingMetrics:
    """Writes rows as they come. Only rank 0 has one.

    Args:
        path: metrics.jsonl.
        done: steps that a resumed run has done; rows after them are of a future that was lost.
        trackers: that get each row as well, and are closed with it.
    """

    def __init__(self, path: Path, *, done: int = 0, trackers: Trackers | None = None) -> None:
        self._trackers = trackers
        if done and path.exists():
            rows = path.read_bytes().splitlines(keepends=True)
            write_text(path, "".join(row.decode() for row in rows if _step(row) <= done))
        self._file = path.open("a" if done else "w", buffering=1)

    def write(self, row: dict[str, Any]) -> None:
        """Append one row; it is on its way to the disk when this returns."""
        with named(self._file.name):
            self._file.write(json.dumps(row) + "\n")
        if self._trackers is not None:
            self._trackers.write(row)

    def close(self) -> None:
        """Flush and sync."""
        os.fsync(self._file.fileno())
        self._file.close()
        if self._trackers is not None:
            self._trackers.close()


def _step(row: bytes) -> float:
    """The step of a row; a row cut off by a crash, or damaged, counts as after all."""
    try:
        return float(parse_json(row.decode())["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")
