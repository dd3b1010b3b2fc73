"""Sharing: what ranks lose that compute at once: cores, caches and memory are shared.

The same work is done by rank 0 alone and by the first n ranks together, in turns, and timed by the
processor time of those who do it: what memory, caches and the threads of one core make of it, on a
busy machine too. More ranks than cores moreover take turns on the cores, which is their number.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from hocket.probing.compute import Compute
from hocket.probing.repeats import rounded
from hocket.probing.talking import Room
from hocket.spec.measured import Sharing

WORKS = ("product", "stream", "dispatch")


def sharing(
    room: Room, compute: Compute, counts: list[int], cores: int, seconds: float
) -> list[Sharing]:
    """The slowdown of each number of ranks on so many cores. Called by all ranks alike."""
    calls = _works(compute)
    turns = 3
    each = seconds / (turns * len(WORKS) * (1 + len(counts)))
    taken: dict[tuple[str, int], list[float]] = {}
    for _ in range(turns):
        for work in WORKS:
            for ranks in (1, *counts):
                took = _together(room, calls[work], ranks, each)
                taken.setdefault((work, ranks), []).append(took)
    median = {key: statistics.median(values) for key, values in taken.items()}
    return [
        Sharing(
            ranks=ranks,
            # Never below one: ranks that compute beside it make no rank faster.
            **{
                work: rounded(max(1.0, ranks / cores) * max(1.0, median[work, ranks] / alone))
                for work, alone in ((work, median[work, 1]) for work in WORKS)
            },
        )
        for ranks in counts
    ]


def _works(compute: Compute) -> dict[str, Callable[[], object]]:
    x = torch.ones(4, 8, device=compute.device)
    size = compute.sizes.streams[-1] // 4
    a, b = (torch.zeros(size, device=compute.device) for _ in range(2))
    return {
        "product": compute.product("fp32", "nt", 128, 256, 256),
        "stream": lambda: a.copy_(b),
        "dispatch": lambda: x + x,
    }


def _together(room: Room, call: Callable[[], object], ranks: int, seconds: float) -> float:
    """Processor seconds of one call while the first `ranks` ranks make them at the same time."""
    end = room.agree(time.perf_counter()) + seconds
    count, used = 0, 0.0
    if room.rank < ranks:
        start = time.thread_time()
        while time.perf_counter() < end or count == 0:
            call()
            count += 1
        used = time.thread_time() - start
    return room.total(used) / room.total(count)
