"""Heartbeat: the progress of each rank in memory that its parent reads.

    rank r    writes its record at r * SIZE     step, microbatch, action, collective, ticks
    parent    reads all records                 also of a rank that is stopped or stuck in C

A rank writes from its main thread with every action and every collective. Nothing is sent, and no
answer is needed: what does not change any more is a rank that does not progress.
"""

from __future__ import annotations

import dataclasses
import mmap
import os
import struct
from typing import Any

SIZE = 128
_RECORD = struct.Struct("<QqiiQd40s")
_NAME = 40


@dataclasses.dataclass(frozen=True, kw_only=True)
class Beat:
    """One rank's record.

    Attributes:
        ticks: count of all progress. step: optimizer steps done when this one began, -1 before.
        action: index in the rank's line of the schedule, -1 outside of a step.
        microbatch: of that action, -1 where it has none.
        collective, sequence: the last collective that the rank entered, and its number.
        allowed: seconds that may pass without a tick of any rank; 0: not bounded yet.
    """

    ticks: int = 0
    step: int = -1
    action: int = -1
    microbatch: int = -1
    sequence: int = 0
    allowed: float = 0.0
    collective: str = ""

    def __str__(self) -> str:
        if not self.ticks:
            return "no heartbeat yet"
        parts = ["building the model" if self.step < 0 else f"step {self.step + 1}"]
        if self.action >= 0:
            parts.append(f"action {self.action + 1} of its schedule line")
        if self.microbatch >= 0:
            parts.append(f"microbatch {self.microbatch}")
        if self.sequence:
            parts.append(f"last collective #{self.sequence} {self.collective}")
        return ", ".join(parts)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


class Heart:
    """The rank's end: writes its own record.

    Args:
        fd: of the shared memory; None: memory of this process alone, as under other launchers.
        rank: place of the record.
    """

    def __init__(self, fd: int | None = None, rank: int = 0) -> None:
        self._memory: Any = bytearray(SIZE) if fd is None else mmap.mmap(fd, 0)
        self._at = 0 if fd is None else rank * SIZE
        self._ticks = self._sequence = 0
        self._step = self._action = self._microbatch = -1
        self._allowed = 0.0
        self._name = b""

    def _write(self) -> None:
        self._ticks += 1
        _RECORD.pack_into(
            self._memory, self._at, self._ticks, self._step, self._action, self._microbatch,
            self._sequence, self._allowed, self._name,
        )  # fmt: skip

    def tick(self) -> None:
        """Progress, where the rank was."""
        self._write()

    def begin_step(self, done: int) -> None:
        self._step, self._action, self._microbatch = done, -1, -1
        self._write()

    def allow(self, seconds: float) -> float:
        """Seconds that may pass from here on without a tick of any rank; returns those before."""
        before, self._allowed = self._allowed, seconds
        self._write()
        return before

    def action(self, index: int, microbatch: int | None) -> None:
        """An action of this rank's schedule line begins; -1: the line is over."""
        self._action, self._microbatch = index, -1 if microbatch is None else microbatch
        self._write()

    def collective(self, name: str, axis: str) -> None:
        """A collective, send or receive over an axis is entered."""
        self._sequence += 1
        self._name = f"{name} {axis}".encode()[:_NAME]
        self._write()

    def read(self) -> Beat:
        """This rank's own record."""
        return _read(self._memory, self._at)


class Hearts:
    """The parent's end: reads the records of all ranks."""

    def __init__(self, world_size: int) -> None:
        self.fd = os.memfd_create("hocket-heartbeats")
        os.ftruncate(self.fd, world_size * SIZE)
        self._memory = mmap.mmap(self.fd, 0)
        self._world_size = world_size

    def read(self) -> list[Beat]:
        return [_read(self._memory, rank * SIZE) for rank in range(self._world_size)]

    def close(self) -> None:
        self._memory.close()
        os.close(self.fd)


def _read(memory: Any, at: int) -> Beat:
    ticks, step, action, microbatch, sequence, allowed, name = _RECORD.unpack_from(memory, at)
    return Beat(
        ticks=ticks,
        step=step,
        action=action,
        microbatch=microbatch,
        sequence=sequence,
        allowed=allowed,
        collective=name.rstrip(b"\0").decode(errors="replace"),
    )
