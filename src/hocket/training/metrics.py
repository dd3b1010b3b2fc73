"""Metrics: one JSON object a step in metrics.jsonl, and what trackers make of it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hocket.spec.files import named, parse_json, write_text
from hocket.training.trackers import Trackers


class TrainingMetrics:
    """Writes rows as they come. Only rank 0 has one.

    Args:
        path: metrics.jsonl.
        done: steps that a resumed run has done; rows after them are of a future that was lost.
        trackers: that get each row as well, and are closed with it.
        note: called with a text where a row cannot be written.
    """

    def __init__(
        self,
        path: Path,
        *,
        done: int = 0,
        trackers: Trackers | None = None,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._trackers, self._note = trackers, note
        self._waiting, self._noted = b"", False
        if not done:
            path.unlink(missing_ok=True)
        elif path.exists():
            _drop_after(path, done)
        self._file = path.open("ab" if done else "wb", buffering=0)

    def write(self, row: dict[str, Any]) -> None:
        """Append one row; it is on its way to the disk when this returns. Where the disk is full,
        it waits for the next row that can be written."""
        self._waiting += json.dumps(row).encode() + b"\n"
        try:
            self._append()
            self._noted = False
        except OSError as error:
            if not self._noted:
                self._noted = True
                self._note(
                    f"{self._file.name}: {error.strerror or error}; training continues, and rows "
                    "are kept until they can be written"
                )
        if self._trackers is not None:
            self._trackers.write(row)

    def _append(self) -> None:
        with named(self._file.name):
            while self._waiting:
                self._waiting = self._waiting[self._file.write(self._waiting) or 0 :]

    def close(self) -> None:
        """Flush and sync. Raises OSError where rows still cannot be written."""
        self._append()
        os.fsync(self._file.fileno())
        self._file.close()
        if self._trackers is not None:
            self._trackers.close()


def _drop_after(path: Path, done: int) -> None:
    """Drop rows of later steps and damaged ones. The rows that are kept are a file of their own: an
    owner that was frozen appends to the one that it has open. A full disk allows no other file;
    there the rows at the end are cut off in place."""
    rows = path.read_bytes().splitlines(keepends=True)
    kept = [row for row in rows if _step(row) <= done]
    try:
        write_text(path, b"".join(kept).decode())
    except OSError:
        if rows[: len(kept)] != kept:
            raise
        os.truncate(path, sum(map(len, kept)))


def _step(row: bytes) -> float:
    """The step of a row; a row cut off by a crash, or damaged, counts as after all."""
    try:
        return float(parse_json(row.decode())["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")
