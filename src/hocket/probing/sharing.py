"""Sharing: what ranks lose that compute at once: cores, caches and memory are shared.

The same work is done by one rank alone and by the first n ranks together, in turns, and timed by
the processor time of those who do it: what memory, caches and the threads of one core make of it,
on a busy machine too. More ranks than cores moreover take turns on the cores, which is their
number; what that costs beyond the waiting, each turn finding the caches full of another rank's, is
seen in work that goes through as much memory as a training step does.

A slowdown is the median of the turns' ratios, each of samples that lie next to each other: cores of
a virtual machine differ from one another and from second to second by more than ranks lose. For the
same reason ranks are alone by turns, and every other turn goes the other way round.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from hocket.probing.calibration import calibration_works
from hocket.probing.collective_bench import Room
from hocket.probing.compute import Compute
from hocket.probing.repeats import rounded
from hocket.spec.measured import Sharing

TURNS = {"product": 3, "stream": 3, "dispatch": 3, "step": 8}
"""Most turns for what forecasts are made from."""

HEAVY = 5
"""A sample of a step's work lasts so many times as long as one of the others: more than a
scheduler's turn of some ms."""

TOKENS, WIDTH, INNER, LAYERS = 512, 128, 384, 4
"""Of the step: 20 ms of processor, 15 MB that a forward keeps."""


def sharing_slowdowns(
    room: Room, compute: Compute, counts: list[int], cores: int, seconds: float
) -> list[Sharing]:
    """The slowdown of each number of ranks on so many cores. Called by all ranks."""
    calls = {
        **calibration_works(compute.device, compute.sizes.streams[-1]),
        "step": _step(compute.device),
    }
    weights = {name: HEAVY if name == "step" else 1 for name in TURNS}
    samples = sum(weights[name] * turns for name, turns in TURNS.items()) * (1 + len(counts))
    slower: dict[tuple[str, int], list[float]] = {}
    apart: dict[int, list[float]] = {}
    for work, turns in TURNS.items():
        for turn in range(turns):
            taken = {}
            for ranks in (1, *counts)[:: -1 if turn % 2 else 1]:
                first = turn // 2 % min(cores, room.size) if ranks == 1 else 0
                those = range(first, first + ranks)
                each = seconds * weights[work] / samples
                taken[ranks], unlike = _together(room, calls[work], those, each)
                if work == "step":
                    apart.setdefault(ranks, []).append(unlike)
            for ranks in counts:
                slower.setdefault((work, ranks), []).append(taken[ranks] / taken[1])
    median = {key: statistics.median(values) for key, values in slower.items()}
    return [
        Sharing(
            ranks=ranks,
            # Never below one: ranks that compute at the same time make no rank faster.
            **{
                work: rounded(max(1.0, ranks / cores) * max(1.0, median[work, ranks]))
                for work in TURNS
            },
            unlike=rounded(statistics.median(apart[ranks]) ** 0.5),
        )
        for ranks in counts
    ]


def _step(device: torch.device) -> Callable[[], object]:
    """Forward and backward of some layers: every operand is met again only after all others."""
    x = torch.randn(TOKENS, WIDTH, device=device)
    layers = [
        (torch.randn(INNER, WIDTH, device=device), torch.randn(WIDTH, INNER, device=device))
        for _ in range(LAYERS)
    ]
    weights = [weight.requires_grad_() for weight in itertools.chain(*layers)]
    return functools.partial(_forward_backward, x, weights)


def _forward_backward(x: Tensor, weights: list[Tensor]) -> None:
    y = x
    for up, down in zip(weights[::2], weights[1::2], strict=True):
        y = y + F.linear(F.silu(F.linear(F.rms_norm(y, (WIDTH,)), up)), down)
    torch.autograd.grad(y, weights, torch.ones_like(y))


def _together(
    room: Room, call: Callable[[], object], those: range, seconds: float
) -> tuple[float, float]:
    """Processor seconds of one call while `those` ranks make them at the same time, and the
    variance among the ranks of what one took of them, over the square of its mean."""
    end = room.agree(time.perf_counter()) + seconds
    count, used = 0, 0.0
    if room.rank in those:
        start = time.thread_time()
        while time.perf_counter() < end or count == 0:
            call()
            count += 1
        used = time.thread_time() - start
    # All figures are exchanged at once: the ranks that only listen wake once a sample.
    rows = [row for row in room.exchange(used, count) if row[1]]
    each = [used / count for used, count in rows]
    unlike = statistics.variance(each) / statistics.mean(each) ** 2 if len(each) > 1 else 0.0
    return sum(used for used, _ in rows) / sum(count for _, count in rows), unlike
