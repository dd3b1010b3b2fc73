"""CopyStream: copies between host and device on a CUDA stream of their own, overlapping compute.

    compute   work so far | more work, during the copies | wait | work that reads what was copied
    copies    ............| copy, copy, copy .............|

No tensor changes its owner: memory that a copy touches is allocated and freed in the compute
stream's order. A copy starts behind the work that was queued when it was asked for, which is also
behind the last reader of memory that the allocator gives out again; and the caller holds the memory
until the compute stream waits for the copy. So `Tensor.record_stream`, which delays the reuse of
memory by an unknown time, is not needed. On a CPU copies are made where they are asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Copied:
    """Copies under way."""

    def __init__(self, event: Any) -> None:
        self._event = event

    def wait(self) -> None:
        """Let the current stream wait for them; the host does not."""
        torch.cuda.current_stream().wait_event(self._event)

    def synchronize(self) -> None:
        """Let the host wait for them."""
        self._event.synchronize()


class CopyStream:
    """A stream for copies. Without CUDA there is none, and every method does nothing."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = None

    @contextmanager
    def behind_current(self) -> Iterator[None]:
        """Within, copies are queued behind what the current stream has been given so far."""
        if self._device.type != "cuda":
            yield
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def copied(self) -> Copied | None:
        """The copies so far."""
        if self._stream is None:
            return None
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return Copied(event)
