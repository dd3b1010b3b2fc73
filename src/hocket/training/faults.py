"""Faults: failures that a rank of a training job brings on itself, for tests and `hocket chaos`.

A fault is plain data: kind, rank, step, phase, and the number of attempts in which it happens. A
job has none unless its caller gives them to `jobs.train.train`.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from hocket.launch import RankContext
    from hocket.launch.heartbeat import Heart

KINDS = ("kill", "stop", "stuck", "raise", "full", "nan", "flip", "damage", "term", "wrong", "slow")
"""SIGKILL; SIGSTOP; a call in C that does not return and keeps the interpreter's lock; an
exception; ENOSPC while a checkpoint is written; a gradient that is not finite; one bit of one
rank's weights; one bit of the newest checkpoint, then SIGKILL; a request to stop; a matmul that is
wrong in one value from then on; `seconds` of sleep in each such phase from then on."""
PHASES = ("build", "step", "input", "forward", "collective", "save", "evaluate", "export")


class Faults:
    """The faults of one rank, and its heartbeat, through which it learns where it is.

    Args:
        rows: of the job: `kind`, `rank`, `step` (1 is the first), `phase`, `attempts` (1).
        context: of this rank.
        checkpoints: the folder of the run's checkpoints.
    """

    def __init__(
        self, rows: Iterable[Mapping[str, Any]], context: RankContext, checkpoints: Path
    ) -> None:
        self._heart: Heart = context.heart
        self._checkpoints = checkpoints
        self._context = context
        self._rows = [
            dict(row)
            for row in rows
            if row["rank"] == context.rank and context.attempt < row.get("attempts", 1)
        ]
        self._step = 1

    def begin_step(self, done: int) -> None:
        """The step after `done` steps begins."""
        self._step = done + 1
        self._heart.begin_step(done)
        self.at("step")

    def action(self, index: int, microbatch: int | None) -> None:
        """As `Heart.action`."""
        self._heart.action(index, microbatch)
        if self._rows and index >= 0:
            self.at("forward")

    def collective(self, name: str, axis: str) -> None:
        """As `Heart.collective`."""
        self._heart.collective(name, axis)
        if self._rows:
            self.at("collective")

    def at(self, phase: str) -> None:
        """A phase begins, or goes on: what is to happen there happens."""
        for slow in self._rows:
            if slow["kind"] == "slow" and slow["phase"] == phase and slow["step"] <= self._step:
                time.sleep(slow["seconds"])
        spoils = ("nan", "flip", "wrong", "slow")
        row = self._take(lambda row: row["phase"] == phase and row["kind"] not in spoils)
        if row is None:
            return
        kind = row["kind"]
        if kind == "damage":
            _flip_newest(self._checkpoints)
        if kind in ("kill", "damage"):
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif kind == "stuck":
            while True:  # a signal's handler ends a sleep
                ctypes.PyDLL(None).sleep(100_000)
        elif kind == "full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        elif kind == "term":
            self._context.stop_asked.set()
        else:
            raise RuntimeError(f"injected in {phase}")

    def spoils(self, kind: str) -> bool:
        """Whether a fault of the kind `nan` or `flip` happens in this step."""
        return self._take(lambda row: row["kind"] == kind) is not None

    def _take(self, matches: Any) -> dict[str, Any] | None:
        for row in self._rows:
            if row["step"] <= self._step and matches(row):
                self._rows.remove(row)
                return row
        return None


def flip(parallel: Any) -> None:
    """Flip one bit of the first parameter, as a failing memory would."""
    with parallel.recorder.in_phase("other"):
        for sharded in parallel._sharded.values():
            sharded.unshard()
    tensor = next(parallel.parameters())
    tensor.detach().view(-1).view(torch.uint8)[1] ^= 4


def miscompute(parallel: Any) -> None:
    """Let the first matmul give one value, of the last token, that is off by 1 in 16."""

    def hook(module: Any, inputs: Any, output: Tensor) -> Tensor:
        wrong = torch.ones_like(output)
        wrong.view(-1)[-1] += 1 / 16
        return output * wrong

    modules = (m for stage in parallel.stages for m in stage.module.modules())
    first = next(
        m for m in modules
        if isinstance(getattr(m, "weight", None), Tensor)
        and m.weight.dim() == 2
        and "mbedding" not in type(m).__name__
    )  # fmt: skip
    first.register_forward_hook(hook)


def spoil(parallel: Any) -> None:
    """Make the first parameter's next gradient, before ranks sum it, not a number."""

    def hook(gradient: Tensor) -> Tensor:
        handle.remove()
        return gradient * float("nan")

    handle = next(parallel.parameters()).register_hook(hook)  # type: ignore[no-untyped-call]


def _flip_newest(checkpoints: Path) -> None:
    from hocket.spec.checkpoint import candidates

    newest = next(candidates(checkpoints), None)
    if newest is None:
        return
    shard = sorted(newest.glob("rank-*.safetensors"))[-1]
    with shard.open("r+b") as file:
        file.seek(shard.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 16]))
