"""A backend on CPU ranks that behaves as NCCL's: `--backend nccl_like` of the launcher's tests.

A collective is enqueued and returns at once, with no work if it is synchronous. Its result is there
once every member has enqueued it, which `synchronize` waits for as a host waits for its device: in
a frame that names neither the collective nor torch.distributed. A watchdog thread ends the process
with SIGABRT, and NCCL's text, when a collective takes longer than the group's time limit.
"""

from __future__ import annotations

import datetime
import os
import signal
import sys
import threading
import time
from typing import Any

import torch.distributed as dist

NAME = "nccl_like"
_groups: list[NcclLike] = []


class NcclLike(dist.ProcessGroup):
    """Members count each other's enqueued collectives in the store; no data is moved."""

    def __init__(self, store: Any, rank: int, size: int, timeout: datetime.timedelta) -> None:
        super().__init__(rank, size)
        self._rank, self._size = rank, size
        self._store, self._timeout = store, timeout.total_seconds()
        self._enqueued = self._completed = 0
        self.ended: list[str] = []
        _groups.append(self)
        threading.Thread(target=self._watchdog, daemon=True).start()

    def getBackendName(self) -> str:
        return NAME

    def _enqueue(self) -> None:
        self._enqueued += 1
        self._store.add(f"call {self._enqueued}", 1)

    def allreduce(self, tensors: Any, options: Any = None) -> None:
        assert not options.asyncOp
        self._enqueue()

    def _watchdog(self) -> None:
        began = time.monotonic()
        while not self.ended:
            if self._completed == self._enqueued:
                began = time.monotonic()
            elif self._store.add(f"call {self._completed + 1}", 0) == self._size:
                self._completed += 1
                began = time.monotonic()
                continue
            elif time.monotonic() - began > self._timeout:
                print(
                    f"[rank{self._rank}]: Watchdog caught collective operation timeout: "
                    f"WorkNCCL(SeqNum={self._completed + 1}, OpType=ALLREDUCE)",
                    file=sys.stderr,
                    flush=True,
                )
                os.kill(os.getpid(), signal.SIGABRT)
            time.sleep(0.01)

    def shutdown(self) -> None:
        self.ended.append("shutdown")

    def abort(self) -> None:
        self.ended.append("abort")


def synchronize() -> None:
    """Wait until everything that was enqueued has completed."""
    while any(group._completed < group._enqueued for group in _groups):
        time.sleep(0.01)


def register() -> None:
    dist.Backend.register_backend(NAME, NcclLike, devices=["cpu"])
