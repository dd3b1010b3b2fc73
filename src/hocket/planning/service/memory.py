"""The memory minimum of a service: GPUs that hold weights and cache, however slowly they answer.

Two counts, which need not agree:

    pool    one pool of memory: n GPUs hold floor((n x memory x usable - weights) / cache of one
            request) requests. memory is the marketed one in decimal bytes (40 GB = 40e9); what is
            not usable stands for context, workspaces and buffers. This is the arithmetic by hand
    split   a legal tp x pp, on its peak GPU: layers rounded up, key/value heads repeated where
            tp exceeds them, embedding on one stage, the engine's overhead counted apart; of the
            memory that the driver gives (40 GB cards give 40 GiB). It may need more, or fewer
"""

from __future__ import annotations

import dataclasses
import math

from hocket.planning.service.problem import ServiceProblem

SHARE = 0.9
"""Of a GPU's memory, what the pool counts on."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryMinimum:
    """Fewest GPUs that hold a model and one request.

    Attributes:
        pool: by one pool of memory.
        gpus, tp, pp: of the smallest legal split; 0 where none was found.
        requests: that this split holds at once.
        weight_bytes: of the model. cache_bytes: of one request.
        split_weight_bytes, split_overhead_bytes: on the peak GPU of the split.
        split_cache_bytes: for one request, there.
    """

    pool: int
    gpus: int
    tp: int
    pp: int
    requests: int
    weight_bytes: float
    cache_bytes: float
    split_weight_bytes: float = 0.0
    split_overhead_bytes: float = 0.0
    split_cache_bytes: float = 0.0


def pool_requests(
    gpus: int, *, memory: float, weights: float, cache: float, usable: float = SHARE
) -> int:
    """Requests that a pool of GPUs holds; -1 where it does not even hold the weights.

    Args:
        memory: bytes of a GPU. weights: bytes of the model. cache: bytes of one request.
    """
    rest = gpus * memory * usable - weights
    return math.floor(rest / cache) if rest >= 0 else -1


def pool_gpus(
    requests: int, *, memory: float, weights: float, cache: float, usable: float = SHARE
) -> int:
    """Fewest GPUs whose pool holds so many requests."""
    found = max(1, math.ceil((weights + requests * cache) / (memory * usable)))
    # Division rounds; the count that the pool itself gives decides.
    while pool_requests(found, memory=memory, weights=weights, cache=cache, usable=usable) < (
        requests
    ):
        found += 1
    return found


def memory_minimum(problem: ServiceProblem) -> MemoryMinimum:
    """Fewest GPUs for the weights and one request of the service."""
    cache = problem.cache_per_token * problem.service.tokens
    pool = pool_gpus(
        1,
        memory=problem.gpu.memory,
        weights=problem.weights,
        cache=cache,
        usable=problem.usable,
    )
    for tp, pp in problem.splits():
        held = problem.sequences(tp, pp)
        if held < 1:
            continue
        prices = problem.prices(tp, pp)
        return MemoryMinimum(
            pool=pool,
            gpus=tp * pp,
            tp=tp,
            pp=pp,
            requests=held,
            weight_bytes=problem.weights,
            cache_bytes=cache,
            split_weight_bytes=prices.weight_bytes,
            split_overhead_bytes=prices.overhead_bytes,
            split_cache_bytes=prices.cache_bytes * problem.service.tokens,
        )
    return MemoryMinimum(
        pool=pool,
        gpus=0,
        tp=0,
        pp=0,
        requests=0,
        weight_bytes=problem.weights,
        cache_bytes=cache,
    )


@dataclasses.dataclass(frozen=True)
class MemoryLevels:
    """GPUs that hold so many requests of the service at once: by one pool, and by legal replicas
    (None: no replica holds one)."""

    requests: int
    pool: int
    split: int | None


LEVELS = (1, 8, 32)
"""Requests at once for which GPUs are counted."""


def held_levels(problem: ServiceProblem) -> tuple[MemoryLevels, ...]:
    """GPUs for each of `LEVELS`."""
    context = problem.service.tokens
    cache = problem.cache_per_token * context
    return tuple(
        MemoryLevels(
            requests=count,
            pool=pool_gpus(
                count,
                memory=problem.gpu.memory,
                weights=problem.weights,
                cache=cache,
                usable=problem.usable,
            ),
            split=gpus_for(problem, count, context),
        )
        for count in LEVELS
    )


def gpus_for(problem: ServiceProblem, requests: int, context: int) -> int | None:
    """Fewest GPUs of legal replicas that hold so many requests of so many tokens at once.

    None: no replica holds a single one.
    """
    best: int | None = None
    for tp, pp in problem.splits():
        held = int(problem.cached_tokens(tp, pp) // context)
        if held < 1:
            continue
        gpus = tp * pp * math.ceil(requests / held)
        best = gpus if best is None else min(best, gpus)
    return best


def memory_map(
    problem: ServiceProblem, requests: tuple[int, ...], contexts: tuple[int, ...]
) -> tuple[tuple[int | None, ...], ...]:
    """GPUs that hold so many requests (rows) of so many tokens (columns) at once."""
    return tuple(tuple(gpus_for(problem, n, c) for c in contexts) for n in requests)
