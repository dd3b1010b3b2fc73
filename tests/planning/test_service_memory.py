"""The memory minimum: the arithmetic by hand, and what a legal split makes of it."""

from __future__ import annotations

import pytest

from hocket.catalogue.hardware import cluster
from hocket.catalogue.shapes import shape
from hocket.planning.service.memory import (
    gpus_for,
    held_levels,
    memory_map,
    memory_minimum,
    pool_gpus,
    pool_requests,
)
from hocket.planning.service.problem import ServiceProblem
from hocket.spec.service import Service

WEIGHTS = 175e9 * 2
"""Bytes of 175 billion parameters in 16 bits."""

CACHE = 96 * 2 * 12288 * 2 * 2048
"""Bytes of a request of 2,048 tokens: 96 layers, keys and values of 12,288, 16 bits: 9.66 GB."""


def problem(model: str, gpu: str, tokens: int = 2048) -> ServiceProblem:
    service = Service(prompt_len=tokens - 512, output_len=512)
    return ServiceProblem(shape=shape(model), cluster=cluster(gpu), service=service)


@pytest.mark.parametrize(
    ("gpus", "memory", "requests"),
    [(10, 40e9, 1), (5, 80e9, 1), (12, 40e9, 8), (16, 40e9, 23), (8, 80e9, 23), (12, 80e9, 53)],
)
def test_175b_by_hand(gpus: int, memory: float, requests: int) -> None:
    """(n x memory x 0.9 - 350 GB) / 9.66 GB: 12 x 40 x 0.9 = 432 leave 82, for 8 requests."""
    assert pytest.approx(9.66e9, rel=1e-3) == CACHE
    assert pool_requests(gpus, memory=memory, weights=WEIGHTS, cache=CACHE) == requests
    # The count of GPUs is the inverse: so many hold them, one fewer does not.
    least = pool_gpus(requests, memory=memory, weights=WEIGHTS, cache=CACHE)
    assert least <= gpus
    assert pool_requests(least, memory=memory, weights=WEIGHTS, cache=CACHE) >= requests
    assert pool_requests(least - 1, memory=memory, weights=WEIGHTS, cache=CACHE) < requests


def test_what_does_not_hold_the_weights_holds_nothing() -> None:
    for gpus, memory in ((9, 40e9), (4, 80e9)):
        assert pool_requests(gpus, memory=memory, weights=WEIGHTS, cache=CACHE) == -1
    assert pool_gpus(1, memory=40e9, weights=WEIGHTS, cache=CACHE) == 10
    assert pool_gpus(1, memory=80e9, weights=WEIGHTS, cache=CACHE) == 5
    # The ranges that are commonly quoted, 12 to 16 of 40 GB and 8 to 12 of 80 GB, in requests.
    levels = [
        pool_requests(n, memory=m, weights=WEIGHTS, cache=CACHE)
        for n, m in ((12, 40e9), (16, 40e9), (8, 80e9), (12, 80e9))
    ]
    assert levels == [8, 23, 23, 53]


@pytest.mark.parametrize(("gpu", "pool"), [("8xA100-40", 10), ("8xA100-80-SXM", 5)])
def test_the_real_shape_says_the_same(gpu: str, pool: int) -> None:
    """GPT-3 traced has 174.6 billion parameters; the counts are those of the arithmetic."""
    asked = problem("gpt3-175b", gpu)
    assert asked.weights == pytest.approx(WEIGHTS, rel=0.005)
    assert asked.cache_per_token * 2048 == CACHE
    found = memory_minimum(asked)
    assert found.pool == pool
    # A legal split may need more: 96 layers over stages, the embedding, the engine's own bytes.
    assert found.gpus >= pool
    assert found.gpus == found.tp * found.pp
    assert found.requests >= 1
    held = (
        found.split_weight_bytes
        + found.split_overhead_bytes
        + found.requests * found.split_cache_bytes
    )
    assert held <= asked.memory
    assert held + found.split_cache_bytes > asked.memory


def test_a_split_counts_its_peak_gpu() -> None:
    asked = problem("llama-3-70b", "8xH100-SXM")
    whole, halves = asked.prices(1, 1), asked.prices(2, 1)
    assert halves.cache_bytes == whole.cache_bytes / 2
    # Eight key/value heads on sixteen ranks: each is held twice.
    assert asked.prices(16, 1).cache_bytes == asked.prices(8, 1).cache_bytes
    # 80 layers over three stages: 27 on the largest.
    assert asked.prices(1, 3).cache_bytes == pytest.approx(whole.cache_bytes * 27 / 80)


def test_more_requests_and_longer_ones_need_no_fewer() -> None:
    asked = problem("gpt3-175b", "8xA100-40")
    table = memory_map(asked, (1, 8, 32, 128), (512, 1024, 2048))
    for row in table:
        assert list(row) == sorted(row)  # type: ignore[type-var]
    for column in zip(*table, strict=True):
        assert list(column) == sorted(column)  # type: ignore[type-var]
    assert table[0][2] == memory_minimum(asked).gpus
    levels = held_levels(asked)
    assert [(held.requests, held.pool) for held in levels] == [(1, 10), (8, 12), (32, 19)]
    assert all(held.split is not None and held.split >= held.pool for held in levels)


def test_what_no_replica_holds_is_none() -> None:
    asked = problem("gpt3-175b", "1x1xA100-40")
    one = ServiceProblem(
        shape=asked.shape, cluster=asked.cluster, service=asked.service, bounded=True
    )
    assert memory_minimum(one).gpus == 0
    assert gpus_for(one, 1, 2048) is None
