"""Metrics: one JSON object a step in metrics.jsonl, and TensorBoard events where asked for."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from hocket.spec.errors import OptionError
from hocket.spec.files import named, parse_json
from hocket.spec.run import write_text

_SCALARS = ("loss", "held_out_loss", "lr", "grad_norm", "tokens_per_second", "step_seconds", "mfu")


class Metrics:
    """Writes rows as they come. Only rank 0 has one.

    Args:
        path: metrics.jsonl.
        done: steps that a resumed run has done; rows after them are of a future that was lost.
        tensorboard: folder for TensorBoard events, None for none.

    Raises:
        OptionError: TensorBoard is asked for and not installed.
    """

    def __init__(self, path: Path, *, done: int = 0, tensorboard: Path | None = None) -> None:
        self._writer: Any = None
        if tensorboard is not None:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                raise OptionError(
                    "--tensorboard needs the package tensorboard",
                    hint='pip install "hocket[tensorboard]"',
                ) from None
            self._writer = SummaryWriter(str(tensorboard), purge_step=done + 1)  # type: ignore[no-untyped-call]
        if done and path.exists():
            rows = path.read_text().splitlines(keepends=True)
            write_text(path, "".join(row for row in rows if _step(row) <= done))
        self._file = path.open("a" if done else "w", buffering=1)

    def write(self, row: dict[str, Any]) -> None:
        """Append one row; it is on its way to the disk when this returns."""
        with named(self._file.name):
            self._file.write(json.dumps(row) + "\n")
        if self._writer is not None:
            for name in _SCALARS:
                if row.get(name) is not None:
                    self._writer.add_scalar(name, row[name], row["step"])

    def close(self) -> None:
        """Flush and sync."""
        os.fsync(self._file.fileno())
        self._file.close()
        if self._writer is not None:
            self._writer.close()


def _step(row: str) -> float:
    """The step of a row; a row cut off by a crash counts as after all."""
    try:
        return float(parse_json(row)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")
