"""Sharing: what ranks lose that compute at once: cores, caches and memory are shared.

The same work is done by rank 0 alone and by the first n ranks together, in turns. More ranks than
cores take turns on the cores; fewer still share the memory and, where two CPUs are one core's
threads, the core.
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


def sharing(room: Room, compute: Compute, counts: list[int], seconds: float) -> list[Sharing]:
    """The slowdown of each number of ranks. Called by all ranks of the run alike."""
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
            **{work: max(1.0, rounded(median[work, ranks] / median[work, 1])) for work in WORKS},
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
    """Wall seconds of one call to a rank while the first `ranks` ranks make them.

    All begin and end at the same moments, so that a rank that gets no core meanwhile counts too.
    """
    begin = room.agree(time.perf_counter()) + _NOTICE
    count = 0
    if room.rank < ranks:
        while time.perf_counter() < begin:
            pass
        while time.perf_counter() < begin + seconds:
            call()
            count += 1
    return ranks * seconds / max(1.0, room.total(count))


_NOTICE = 5e-4
"""Seconds between the agreement on a moment and that moment: a rank has to wake up."""
