"""Staging: what the host tells a device in each step, in one copy from page-locked memory.

The memory is allocated once: page-locked memory costs a synchronisation when it is taken, and what
`torch.tensor(..., device="cuda")` copies comes from memory that is not, and waits. Two host buffers
take turns, each with an event, so that none is overwritten while a copy from it is under way. The
device has one: copies and what reads them follow each other on one stream. Its addresses stay what
they are, so that a CUDA graph may read from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

Column = tuple["Sequence[int] | Sequence[float] | Tensor", torch.dtype]
"""Values of one dimension, and the type that they have on the device."""

_WORD = 8


class Staging:
    """A buffer of `words` words of 8 bytes on the device, filled once a step.

    Args:
        words: at first.
        device: of the buffer.
        grows: whether a step with more words gets a larger buffer. Not where a captured graph
            reads from it: its address would change.
        buffers: on the host.

    Attributes:
        copies: made since the start.
    """

    def __init__(
        self, words: int, device: torch.device, *, grows: bool = False, buffers: int = 2
    ) -> None:
        self.device = device
        self.grows = grows
        self.copies = 0
        self._buffers = buffers
        self._turn = 0
        self._take(words)

    def _take(self, words: int) -> None:
        pinned = self.device.type == "cuda" and torch.cuda.is_available()
        self._host = [
            torch.zeros(words, dtype=torch.int64, pin_memory=pinned) for _ in range(self._buffers)
        ]
        self._there = torch.zeros(words, dtype=torch.int64, device=self.device)
        self._events: list[Any] = [None] * self._buffers

    @property
    def words(self) -> int:
        return self._there.shape[0]

    def view(self, begin: int, size: int, dtype: torch.dtype = torch.int64) -> Tensor:
        """`size` values on the device from word `begin` on."""
        return self._there[begin : begin + _words(size, dtype)].view(dtype)[:size]

    def send(self, columns: Sequence[Column]) -> list[Tensor]:
        """Copy columns to the device, one behind the other; their views, valid until the next.

        Each begins at a whole word: column i begins where the words of those before it end.
        """
        sizes = [len(values) for values, _ in columns]
        needed = words_of(columns)
        if needed > self.words:
            assert self.grows, f"{needed} words for a buffer of {self.words}"
            self._take(max(needed, 2 * self.words))
        turn, self._turn = self._turn, (self._turn + 1) % self._buffers
        if self._events[turn] is not None:
            self._events[turn].synchronize()  # of two steps ago
        host = self._host[turn]
        views: list[Tensor] = []
        at = 0
        for size, (values, dtype) in zip(sizes, columns, strict=True):
            length = _words(size, dtype)
            if size:
                given = values if isinstance(values, Tensor) else torch.tensor(values, dtype=dtype)
                host[at : at + length].view(dtype)[:size].copy_(given)
            views.append(self.view(at, size, dtype))
            at += length
        self._there[:at].copy_(host[:at], non_blocking=True)
        self.copies += 1
        if self.device.type == "cuda":
            event = self._events[turn]
            if event is None:
                event = self._events[turn] = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        return views


def words_of(columns: Sequence[Column]) -> int:
    """Words that columns take."""
    return sum(_words(len(values), dtype) for values, dtype in columns)


def _words(size: int, dtype: torch.dtype) -> int:
    return -(-size * dtype.itemsize // _WORD)


class Readback:
    """What a step made, on its way from the device to page-locked memory.

    Args:
        device: where the values are.
        depth: results that may be under way at once without another buffer.

    Attributes:
        reads: results that the host waited for.
    """

    def __init__(self, device: torch.device, depth: int = 4) -> None:
        self.device = device
        self.reads = 0
        self._free = list(range(depth))
        self._host: list[Tensor] = [torch.empty(0, dtype=torch.float64)] * depth

    def start(self, values: Tensor) -> Returning:
        """Begin to copy `values` [n] fp64."""
        if self.device.type != "cuda":
            return Returning(self, -1, values, None)
        if not self._free:  # more plans in flight than buffers
            self._free.append(len(self._host))
            self._host.append(torch.empty(0, dtype=torch.float64))
        turn = self._free.pop()
        size = values.shape[0]
        if self._host[turn].shape[0] < size:
            pinned = torch.cuda.is_available()
            room = max(256, 2 * size)
            self._host[turn] = torch.empty(room, dtype=torch.float64, pin_memory=pinned)
        host = self._host[turn][:size]
        host.copy_(values, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return Returning(self, turn, host, event)

    def done(self, turn: int) -> None:
        """A result was read."""
        self.reads += 1
        if turn >= 0:
            self._free.append(turn)


class Returning:
    """One result under way; `read` once."""

    def __init__(self, owner: Readback, turn: int, values: Tensor, event: Any) -> None:
        self._owner, self._turn, self._values, self._event = owner, turn, values, event

    def read(self) -> list[float]:
        """The values; waits until they are there."""
        if self._event is not None:
            self._event.synchronize()
        found: list[float] = self._values.tolist()
        self._owner.done(self._turn)
        return found
