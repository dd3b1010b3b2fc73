"""Beat: small work of three kinds, timed again and again, that tells how fast a machine just is.

Every sample is warmed first, so that it is the same wherever it is taken: between products, between
copies that have emptied the caches, or in a process that has only begun.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import torch

from hocket.probing.repeats import Reads, repeat_summary
from hocket.spec.measured import Pulse

CALLS = {"product": 6, "stream": 1, "dispatch": 600}
"""In one sample: about a millisecond each; the copy is larger."""

WARM = {"product": 2, "stream": 0, "dispatch": 60}
"""Before it. A copy of what no cache holds finds nothing warm."""


def calibration_works(device: torch.device, stream: int) -> dict[str, Callable[[], object]]:
    """A product within the caches, a copy of `stream` bytes, which is beyond them, a small call."""
    x = torch.ones(4, 8, device=device)
    # Ones: zeros that nobody wrote are one page, however many there are.
    a, b = (torch.ones(stream // 4, device=device) for _ in range(2))
    left, right = torch.randn(128, 256, device=device), torch.randn(256, 256, device=device)
    return {
        "product": functools.partial(torch.mm, left, right),
        "stream": functools.partial(a.copy_, b),
        "dispatch": functools.partial(torch.add, x, x),
    }


class Calibrator:
    """Takes samples until they are asked for.

    Args:
        device: to work on. stream: bytes of a copy. settle: waits until work is done (CUDA).
        reads: the clock.
    """

    def __init__(
        self,
        device: torch.device,
        stream: int,
        settle: Callable[[], None] = lambda: None,
        reads: Reads = time.thread_time,
    ) -> None:
        self._works = calibration_works(device, stream)
        self._settle, self._reads = settle, reads
        self._samples: dict[str, list[float]] = {name: [] for name in self._works}

    def take(self) -> None:
        """One sample of each kind."""
        for name, work in self._works.items():
            for _ in range(WARM[name]):
                work()
            self._settle()
            start = self._reads()
            for _ in range(CALLS[name]):
                work()
            self._settle()
            self._samples[name].append((self._reads() - start) / CALLS[name])

    def pulses_since(self, part: str) -> list[Pulse]:
        """What the samples since the last call come to: one row a kind; none without a sample."""
        found = [
            Pulse(part=part, operation=name, seconds=taken.seconds, spread=taken.spread)
            for name, taken in ((n, repeat_summary(s)) for n, s in self._samples.items() if s)
        ]
        for samples in self._samples.values():
            samples.clear()
        return found
