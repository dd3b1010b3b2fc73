"""HostCopy: a rank's state copied to host memory that is kept, so that training goes on meanwhile.

    compute stream   step | all-gathers of ZeRO-3 | next forward and backward | wait | optimizer
    copy stream            copy, copy, copy ......................|
    writer                                                         waits, then reads

On CUDA the memory is page-locked, and only the next optimizer step waits for the copies. On a CPU
they are memcpy.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hocket.runtime.copy_stream import Copied, CopyStream
from hocket.runtime.hugepages import in_large_pages
from hocket.runtime.rank_state import RankState
from hocket.spec.tensor_file import TensorEntry

ALIGNED = 64
"""Bytes at whose multiples a tensor begins."""
SMALL = 16_000_000
"""Bytes of a rank's state below which `auto` saves without a copy: files are written in tens of
milliseconds, most of which is the disk's time to flush."""
SHARE = 0.5
"""Share of a host's free memory that the copies of its ranks may take by default."""


@dataclasses.dataclass(frozen=True)
class HostNeed:
    """What one rank's copy takes of its host's memory: bytes, and those that are free there."""

    host: str
    bytes: int
    free: int


def background_fits(rows: list[HostNeed]) -> bool:
    """Whether copies of all ranks' states are worth it, and fit their hosts' memory."""
    free = {row.host: row.free for row in rows}
    need = {host: sum(row.bytes for row in rows if row.host == host) for host in free}
    fits = all(need[host] <= SHARE * free[host] for host in free)
    return fits and max(row.bytes for row in rows) >= SMALL


class HostCopy:
    """Host memory for one state at a time.

    Args:
        device: of the tensors that are copied.

    Attributes:
        num_bytes: allocated.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies = CopyStream(device)
        self._flat: Tensor | None = None
        self._pinned = False
        self._entries: list[TensorEntry] = []
        self._starts: list[int] = []
        self._views: list[Tensor] = []
        self._under_way: Copied | None = None
        self._last: Copied | None = None
        self.num_bytes = 0

    def reserve(self, state: RankState) -> None:
        """Allocate what `state` needs and touch every page, so that no save has to."""
        if state.entries == self._entries:
            return
        starts, at = [], 0
        for entry in state.entries:
            starts.append(at)
            at += -(-entry.num_bytes // ALIGNED) * ALIGNED
        if self._flat is None or self._flat.numel() < at:
            self.close()
            self._flat = torch.empty(at, dtype=torch.uint8)
            in_large_pages([self._flat], written=False)
            self._flat.zero_()
            self._pin(self._flat)
            self.num_bytes = at
        self._entries, self._starts = state.entries, starts
        self._views = [
            self._flat[start : start + entry.num_bytes].view(tensor.dtype).view(tensor.shape)
            for start, entry, tensor in zip(self._starts, self._entries, state.tensors, strict=True)
        ]

    def _pin(self, flat: Tensor) -> None:
        """Lock the pages: no cache of torch's keeps them when they are freed. Where the system does
        not allow it, copies are as right, and wait for each other."""
        if self._device.type == "cuda" and flat.numel():
            runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            result = runtime.cudaHostRegister(flat.data_ptr(), flat.numel(), 0)
            self._pinned = result == runtime.cudaError.success
            if not self._pinned:
                _forget_error(self._device)

    @torch.no_grad()
    def take(self, state: RankState) -> None:
        """Begin to copy; once `wait` has returned, `buffers` has the bytes. Every rank calls it."""
        self.reserve(state)
        for indices in state.readable():
            with self._copies.behind_current():
                torch._foreach_copy_(
                    [self._views[i] for i in indices],
                    [state.tensors[i].detach() for i in indices],
                    non_blocking=True,
                )
            if state.gathers:  # their memory is freed in the order of the current stream
                self._wait_on_device()
        self._under_way = self._last = self._copies.copied()

    def _wait_on_device(self) -> None:
        copied = self._copies.copied()
        if copied is not None:
            copied.wait()

    def before_update(self) -> None:
        """The current stream waits for the copies: what was copied may be written again."""
        if self._under_way is not None:
            self._under_way.wait()
            self._under_way = None

    def wait(self) -> None:
        """The host waits for the copies; from any thread."""
        if self._last is not None:
            self._last.synchronize()

    def buffers(self) -> Iterator[Any]:
        """The bytes of each tensor in turn."""
        assert self._flat is not None
        begin = self._flat.data_ptr()
        for start, entry in zip(self._starts, self._entries, strict=True):
            raw: Any = (ctypes.c_uint8 * entry.num_bytes).from_address(begin + start)
            yield np.ctypeslib.as_array(raw)

    def close(self) -> None:
        """Free the memory."""
        if self._flat is not None and self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._flat.data_ptr())  # type: ignore[no-untyped-call]
        self._flat, self._views, self._entries = None, [], []
        self._pinned = False
        self.num_bytes = 0


def _forget_error(device: torch.device) -> None:
    """CUDA keeps the error of a call whose result was looked at, and the next kernel that is
    launched would raise it: this one does."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device=device)
