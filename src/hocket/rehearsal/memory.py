"""Memory: bytes of CUDA tensors that live at once on one rank, by owner.

    parameters     gradients     optimizer       known before the step, or by where they end
    communication  buffers that a collective fills or that are allocated to be sent
    activations    everything else that operations make
    other          inputs, module buffers, constants

A storage is counted from the operation that makes it until its last owner frees it, as the caching
allocator would; what the allocator rounds up or keeps is not counted.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from hocket.spec.rehearsal import OWNERS


class LiveMemory:
    """Storages that are alive, by owner.

    Attributes:
        total: bytes alive on the device. owned: the same by owner.
        peak: the most so far. at_peak: `owned` at that moment.
        host, host_peak: bytes of host memory that was pinned, now and at most.
    """

    def __init__(self) -> None:
        self.total = self.peak = self.host = self.host_peak = 0
        self.owned = dict.fromkeys(OWNERS, 0)
        self.at_peak = dict(self.owned)
        self._alive: dict[int, tuple[Any, str, int]] = {}  # finalizer, owner, bytes
        self._gone: deque[int] = deque()

    def own(self, owner: str, tensors: Iterable[Tensor | None]) -> None:
        """Count the storages of `tensors` under `owner`, whether they are known already or not."""
        for tensor in tensors:
            if tensor is not None:
                self._count(tensor, owner, move=True)

    def made(self, tensor: Tensor) -> None:
        """An operation returned `tensor`: count its storage if it is new."""
        self._count(tensor, "activations", move=False)

    def resized(self, tensor: Tensor) -> None:
        """A storage was given memory, or gave it back (parameters gathered for use)."""
        self._count(tensor, "activations", move=False)
        storage = tensor.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes()
        finalizer, owner, before = self._alive[key]
        self._alive[key] = (finalizer, owner, nbytes)
        self._add(owner, nbytes - before)

    def communicated(self, name: str, tensors: Iterable[Tensor]) -> None:
        """A collective was called: what it fills is communication, and the flat buffer that a
        reduce-scatter reads. BackgroundLoad work in place on what has an owner, or read it."""
        given = list(tensors)
        if name == "reduce-scatter":
            filled = given if given[-1].dim() == 1 else given[:1]
        elif name in ("all-gather", "all-to-all"):
            filled = given[1:]
        elif name in ("recv", "scatter"):
            filled = given
        else:
            return
        for tensor in filled:
            self._settle()
            entry = self._alive.get(tensor.untyped_storage()._cdata)
            if entry is None or entry[1] == "activations":
                self._count(tensor, "communication", move=True)

    def restart_peak(self) -> None:
        """Let the peak be what is alive now."""
        self._settle()
        self.peak, self.at_peak = self.total, dict(self.owned)
        self.host_peak = self.host

    def now(self) -> tuple[int, int]:
        """Bytes alive, and the most so far."""
        self._settle()
        return self.total, self.peak

    def close(self) -> None:
        """Forget everything."""
        self._settle()
        for finalizer, _, _ in list(self._alive.values()):
            finalizer.detach()
        self._alive.clear()

    def _settle(self) -> None:
        while self._gone:
            _, owner, nbytes = self._alive.pop(self._gone.popleft())
            self._add(owner, -nbytes)

    def _count(self, tensor: Tensor, owner: str, *, move: bool) -> None:
        if tensor.device.type != "cuda":
            return
        self._settle()  # before a new storage is known by the address of one that is gone
        storage = tensor.untyped_storage()
        key = storage._cdata
        entry = self._alive.get(key)
        if entry is not None:
            finalizer, before, nbytes = entry
            if move and before != owner:
                self._alive[key] = (finalizer, owner, nbytes)
                self.owned[before] -= nbytes
                self.owned[owner] += nbytes
            return
        finalizer = weakref.finalize(storage, self._gone.append, key)
        finalizer.atexit = False
        nbytes = storage.nbytes()
        self._alive[key] = (finalizer, owner, nbytes)
        self._add(owner, nbytes)

    def _add(self, owner: str, nbytes: int) -> None:
        self.owned[owner] += nbytes
        self.total += nbytes
        if self.total > self.peak:
            self.peak, self.at_peak = self.total, dict(self.owned)
