"""Faults: failures that a rank of a training job brings on itself, for tests and `hocket chaos`.

A fault is plain data: kind, rank, step, phase, and the number of attempts in which it happens. A
job has none unless its caller gives them to `jobs.train.train_model`.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from hocket.launch import RankContext
    from hocket.launch.heartbeat import Heart

KINDS = (
    "kill", "stop", "stuck", "raise", "full", "fill", "nan", "flip", "damage", "torn", "cut",
    "term", "wrong", "slow",
)  # fmt: skip
"""SIGKILL; SIGSTOP; a call in C that does not return and keeps the interpreter's lock; an
exception; ENOSPC while a checkpoint is written; a file `filler` that fills its disk; a gradient
that is not finite; one bit of one rank's weights; one bit of the newest checkpoint, then SIGKILL;
the newest checkpoint cut short, then SIGKILL; every TCP connection of the rank shut down; a request
to stop; a matmul that is wrong in one value from then on; `seconds` of sleep in each such phase
from then on, with `longer` at least so many times as long as what the rank did since the last."""
PHASES = ("build", "step", "input", "forward", "collective", "save", "write", "evaluate", "export")


LONGEST = 0.1
"""Seconds of one such sleep."""


class Faults:
    """The faults of one rank, and its heartbeat, through which it learns where it is.

    Args:
        rows: of the job: `kind`, `rank`, `step` (from 1), `phase`, `first` attempt, `attempts`. One
            with `id` and `log` happens once in all attempts (with `again`, in each), and is written
            to the file `log` as it happens. `place` (0 to 1): where a file or tensor is damaged.
            `delay`: seconds until a `kill` happens.
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
            if row["rank"] == context.rank
            and ("id" in row or row.get("first", 0) <= context.attempt < row.get("attempts", 1))
            and (row.get("again") or "id" not in row or row["id"] not in happened(row["log"]))
        ]
        self._step = 1

    def begin_step(self, done: int) -> None:
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
                if "awake" not in slow:
                    slow["awake"] = time.perf_counter()
                    self._write(slow)
                seconds = slow.get("longer", 0.0) * (time.perf_counter() - slow["awake"])
                time.sleep(max(slow["seconds"], min(seconds, LONGEST)))
                slow["awake"] = time.perf_counter()
        spoils = ("nan", "flip", "wrong", "slow")
        row = self._take(lambda row: row["phase"] == phase and row["kind"] not in spoils)
        if row is None:
            return
        kind = row["kind"]
        if kind == "damage":
            flip_newest(self._checkpoints, row.get("place"))
        elif kind == "torn":
            _cut_newest(self._checkpoints, row["place"])
        if kind == "kill" and "delay" in row:
            threading.Timer(row["delay"], os.kill, (os.getpid(), signal.SIGKILL)).start()
        elif kind in ("kill", "damage", "torn"):
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif kind == "stuck":
            while True:  # a signal's handler ends a sleep
                ctypes.PyDLL(None).sleep(100_000)
        elif kind == "full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        elif kind == "fill":
            fill_disk(Path(row["filler"]))
        elif kind == "cut":
            _shut_down_connections()
        elif kind == "term":
            self._context.stop_asked.set()
        else:
            raise RuntimeError(f"injected in {phase}")

    def spoils(self, kind: str) -> dict[str, Any] | None:
        """The fault of the kind `nan`, `flip` or `wrong` that happens in this step, if any."""
        found: dict[str, Any] | None = self._take(lambda row: row["kind"] == kind)
        return found

    def _take(self, matches: Any) -> dict[str, Any] | None:
        for row in self._rows:
            due = row["step"] == self._step if row.get("again") else row["step"] <= self._step
            if due and matches(row):
                self._rows.remove(row)
                self._write(row)
                return row
        return None

    def _write(self, row: Mapping[str, Any]) -> None:
        if "id" in row:
            line = {"id": row["id"], "time": time.time(), "step": self._step}
            with open(row["log"], "a") as file:
                file.write(json.dumps(line) + "\n")


def happened(log: str) -> dict[int, dict[str, Any]]:
    """The faults that have happened, by id: `time` (seconds since the epoch) and `step`, of the
    first time."""
    try:
        lines = Path(log).read_text().splitlines()
    except OSError:
        return {}
    found: dict[int, dict[str, Any]] = {}
    for row in map(json.loads, lines):
        found.setdefault(row["id"], row)
    return found


def flip(parallel: Any, place: float | None = None) -> None:
    """Flip one bit of a replicated parameter, as a failing memory would: of the first one, or at
    `place` (0 to 1) of all their bytes."""
    with parallel.recorder.in_phase("other"):
        for sharded in parallel._sharded.values():
            sharded.unshard()
    tensors = [
        parameter.detach().view(-1).view(torch.uint8)
        for name, parameter in parallel.named_parameters()
        if not parallel.placements[name].is_expert
    ]
    at = 1 if place is None else int(place * sum(t.numel() for t in tensors))
    for tensor in tensors:
        if at < tensor.numel():
            tensor[at] ^= 4
            return
        at -= tensor.numel()


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


def flip_newest(checkpoints: Path, place: float | None = None) -> None:
    """Flip one bit of the newest checkpoint: in the middle of a rank's file, or at `place` (0 to 1)
    of the bytes of all its files."""
    path, at = _within_newest(checkpoints, place)
    if path is None:
        return
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 16]))


def _cut_newest(checkpoints: Path, place: float) -> None:
    """Cut the file of the newest checkpoint that holds the byte at `place` of all before it."""
    path, at = _within_newest(checkpoints, place)
    if path is not None:
        os.truncate(path, at)


def _within_newest(checkpoints: Path, place: float | None) -> tuple[Path | None, int]:
    from hocket.spec.checkpoint import resumable_checkpoints

    newest = next(resumable_checkpoints(checkpoints), None)
    if newest is None:
        return None, 0
    files = sorted(newest.glob("rank-*.safetensors"))
    if place is None:
        return files[-1], files[-1].stat().st_size // 2
    files = sorted(path for path in newest.rglob("*") if path.is_file())
    at = int(place * sum(path.stat().st_size for path in files))
    for path in files:
        if at < (size := path.stat().st_size):
            return path, at
        at -= size
    return None, 0


def fill_disk(filler: Path) -> None:
    """Fill the file system of `filler` to its last byte. It stays full until `filler` is deleted:
    every file of its folder is held open, so that deleting one, as another rank deletes an old
    checkpoint, frees nothing. A file that begins later gets no byte."""
    file = filler.open("wb", buffering=0)
    held: dict[int, IO[bytes]] = {}
    new = True
    while new:  # what began while the disk filled is held too, and what it freed is filled
        new = _hold(filler.parent, held)
        chunk = 1 << 16
        while chunk:
            try:
                file.write(bytes(chunk))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                chunk //= 2

    def release() -> None:
        while filler.exists():
            time.sleep(0.001)
        for each in (file, *held.values()):
            each.close()

    threading.Thread(target=release, daemon=True).start()


def _hold(folder: Path, held: dict[int, IO[bytes]]) -> bool:
    """Open every file below a folder that is not held; whether there was one."""
    before = len(held)
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError, IsADirectoryError):  # deleted meanwhile
            inode = path.stat().st_ino
            if inode not in held:
                held[inode] = path.open("rb")
    return len(held) > before


def _shut_down_connections() -> None:
    """Shut down every TCP connection of this process, as a link that is cut."""
    for name in os.listdir("/proc/self/fd"):
        try:
            connection = socket.socket(fileno=os.dup(int(name)))
        except OSError:  # it is not a socket, or is closed by now
            continue
        with connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6):
                with contextlib.suppress(OSError):
                    connection.getpeername()  # raises for one that listens
                    connection.shutdown(socket.SHUT_RDWR)
