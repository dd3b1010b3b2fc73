"""PinnedPool: page-locked buffers in host memory that are kept for reuse, up to a limit.

Locking pages takes milliseconds and waits for the device, so that buffers are allocated once, in
few sizes, and given out again. The order in which a device reads a buffer and writes the next
values into it is that of the stream of the copies, which must be one and the same for all of a
pool's buffers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hocket.runtime.device import ranks_here
from hocket.runtime.host_memory import host_memory
from hocket.spec.capabilities import PINNED_SHARE

STEPS = 8
"""Sizes between a power of two and the next: at most an eighth of a buffer is unused."""


class PinnedPool:
    """Buffers of bytes.

    Args:
        limit: bytes that are allocated at most. None: `PINNED_SHARE` of the memory that processes
            of this machine may use, divided by its ranks.
        pin: lock the pages; False for CPU ranks.

    Attributes:
        bytes: allocated so far, in use or free.
    """

    def __init__(self, limit: int | None = None, *, pin: bool = True) -> None:
        self.limit = int(host_memory() * PINNED_SHARE / ranks_here()) if limit is None else limit
        self.pin = pin
        self.bytes = 0
        self._free: dict[int, list[Tensor]] = {}

    def take(self, nbytes: int) -> Tensor | None:
        """A buffer [at least `nbytes`] of uint8; None where the limit leaves none."""
        size = _rounded_bytes(nbytes)
        free = self._free.get(size)
        if free:
            return free.pop()
        if self.bytes + size > self.limit:
            return None
        self.bytes += size
        return torch.empty(size, dtype=torch.uint8, pin_memory=self.pin)

    def give(self, buffer: Tensor) -> None:
        """Take a buffer back."""
        self._free.setdefault(buffer.numel(), []).append(buffer)

    def release(self, buffer: Tensor) -> None:
        """Count a buffer no longer: its memory is freed with the last tensor that uses it."""
        self.bytes -= buffer.numel()


def _rounded_bytes(nbytes: int) -> int:
    """The size of the buffer for some bytes."""
    step = max(512, 1 << max(0, nbytes.bit_length() - STEPS.bit_length()))
    return -(-nbytes // step) * step
