"""BackgroundSaver: a save whose files are written while training goes on.

    main thread   step | copy to host memory | step | step | step | step
    writer        ......................... write, flush, read back | vote
    rank 0's      make the folder ......... write, flush, read back | all votes | rename

The order of files and names is that of a save that waits (`runtime.checkpoint`), so that a crash at
any moment leaves a whole checkpoint, or a folder that no reader takes for one. Ranks' writers vote
in the store, through connections of their own: no step waits for a vote, and none needs a
collective.

A thread writes: what takes time (write, fsync, crc32, reads) releases the interpreter's lock. A
process would need the state in shared memory or a fork, after which every page that a step writes
to is copied.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch

from hocket.runtime.host_copy import HostCopy
from hocket.runtime.rank_state import RankState
from hocket.spec.errors import CheckpointError

POLL = 0.005
"""Seconds until a writer first looks again; up to a quarter of a second later on."""


class BackgroundJob(Protocol):
    """What is written: a checkpoint (`runtime.save_job`), or copies in memory
    (`runtime.state_copies`). What it raises that is an OSError or a CheckpointError costs this save
    alone."""

    @property
    def kind(self) -> str: ...

    @property
    def step(self) -> int: ...

    @property
    def final(self) -> Path: ...

    def make(self) -> None:
        """Rank 0, before any rank writes."""

    def phases(
        self, rank: int, state: RankState, buffers: Iterator[Any]
    ) -> list[Callable[[], None]]:
        """What each rank does in turn, each once all ranks have done the one before."""

    def complete(self, size: int) -> None:
        """Rank 0, once all ranks have done all of it."""

    def discard(self) -> None:
        """Rank 0, where one of them failed."""

    def reason(self, error: OSError | CheckpointError) -> str:
        """Why it could not be written, in words."""


@dataclasses.dataclass(frozen=True)
class SaveResult:
    """How one save ended.

    Attributes:
        kind: of its job, `saved` or `copied`.
        reason: why it could not be written; None: it is there.
    """

    kind: str
    step: int
    path: Path
    reason: str | None


class BackgroundSaver:
    """One rank's writer.

    Args:
        rank, size: of the ranks that save together.
        store: a key-value store that they share (`torch.distributed.Store`), whose connection no
            other thread uses.
        device: of the state.
        progress: called by the writer before each tensor.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        store: Any,
        device: torch.device,
        progress: Callable[[], None] = lambda: None,
    ) -> None:
        self.rank, self.size = rank, size
        self.copy = HostCopy(device)
        self._store = store
        self._progress = progress
        self._thread: threading.Thread | None = None
        self._count = 0
        self._results: deque[SaveResult] = deque()
        self._error: BaseException | None = None
        self._ended = threading.Event()

    def save(self, job: BackgroundJob, state: RankState, begin: Callable[[], None]) -> None:
        """Copy the state, and have it written. Every rank calls it; the one that is still writing
        the save before waits for its own file first.

        Args:
            begin: called first; an OSError of it counts as one of writing.
        """
        self.wait()
        reason = ""
        try:
            begin()
        except OSError as error:
            reason = job.reason(error)
        self.copy.take(state)
        self._count += 1
        self._thread = threading.Thread(
            target=self._run, args=(self._count, job, state, reason), name="save", daemon=True
        )
        self._thread.start()

    def finished(self) -> Iterator[SaveResult]:
        """Saves that ended since the last call, on rank 0; none on the others.

        Raises:
            BaseException: what a writer raised that is not a disk's refusal.
        """
        while self._results:
            yield self._results.popleft()
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def wait(self, seconds: float | None = None) -> None:
        """Wait until this rank's writer is done, on rank 0 until the save is complete."""
        if self._thread is not None:
            self._thread.join(seconds)

    def close(self) -> None:
        """A writer that waits for other ranks stops waiting; host memory is freed."""
        self._ended.set()
        self.wait()
        self.copy.close()

    # --- the writer ------------------------------------------------------------------------

    def _run(self, count: int, job: BackgroundJob, state: RankState, reason: str) -> None:
        try:
            self._write(f"save/{count}", job, state, reason)
        except BaseException as error:
            self._error = error

    def _write(self, key: str, job: BackgroundJob, state: RankState, reason: str) -> None:
        made, failed = f"{key}/made", f"{key}/failed"
        if self.rank == 0:
            if not reason:
                reason = _tried(job, job.make)
            if reason:
                self._fail(failed, reason)
            self._store.set(made, "1")
        elif not self._until(lambda: bool(self._store.check([made]))):
            return
        if reason and self.rank:
            self._fail(failed, reason)
        phases = job.phases(self.rank, state, self._buffers())
        keys = [f"{key}/votes/{number}" for number in range(len(phases))]
        for votes, act in zip(keys, phases, strict=True):
            if not reason and not self._store.check([failed]):
                reason = _tried(job, act)
                if reason:
                    self._fail(failed, reason)
            self._store.add(votes, 1)
            if self.rank and votes == keys[-1]:
                return
            if not self._until(lambda votes=votes: self._store.add(votes, 0) == self.size):  # type: ignore[misc]
                return
        if self._store.check([failed]):
            reason = str(json.loads(self._store.get(failed))["reason"])
        else:
            reason = _tried(job, lambda: job.complete(self.size))
        if reason:
            job.discard()
        self._results.append(SaveResult(job.kind, job.step, job.final, reason or None))
        for name in (made, failed, *keys):
            with contextlib.suppress(RuntimeError):  # a store that cannot delete
                self._store.delete_key(name)

    def _fail(self, key: str, reason: str) -> None:
        """Say why, unless another rank was first."""
        self._store.compare_set(key, "", json.dumps({"rank": self.rank, "reason": reason}))

    def _buffers(self) -> Iterator[Any]:
        self.copy.wait()
        for buffer in self.copy.buffers():
            self._progress()
            yield buffer

    def _until(self, there: Callable[[], bool]) -> bool:
        """Look again and again; False: the saver was closed."""
        pause = POLL
        while not there():
            if self._ended.wait(pause):
                return False
            pause = min(2 * pause, 0.25)
        return True


def _tried(job: BackgroundJob, act: Callable[[], None]) -> str:
    """Do a part of a save; why it failed, or nothing."""
    try:
        act()
    except (CheckpointError, OSError) as error:
        return job.reason(error)
    return ""
