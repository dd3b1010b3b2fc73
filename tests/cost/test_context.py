"""Context parallelism: the ring's and Ulysses' exchange, and which of them counts."""

from __future__ import annotations

import numpy as np
import pytest

from hocket.catalogue.hardware import cluster
from hocket.catalogue.shapes import shape
from hocket.cost.collectives import ALL_TO_ALL, group, point_to_point
from hocket.cost.constants import Platform, constants
from hocket.cost.context import CONTENTION, STEP_SECONDS, ContextTimes, context_times
from hocket.cost.device import ATTENTION_BACKWARD
from hocket.cost.machine import machine
from hocket.cost.terms import terms
from hocket.spec.layout import Layout
from tests.support.columns import layout_columns

MODEL = terms(shape("llama-3-8b"))  # 32 heads, 8 of keys and values
((_, BLOCK),) = MODEL.kinds


def platform(nodes: int) -> Platform:
    return Platform(machine(cluster(f"{nodes}x8xH100-SXM")), constants("H100", "megatron-core"))


def times(text: str, tokens: float, attention: float, nodes: int = 1) -> ContextTimes:
    at = layout_columns([Layout.parse(text)], 1)
    return context_times(
        BLOCK.cores, at, np.array([tokens]), np.array([attention]), platform(nodes)
    )


def test_one_rank_exchanges_nothing() -> None:
    found = times("tp2", 4096.0, 1e-3)
    assert (found.forward[0], found.backward[0], found.ulysses[0]) == (0.0, 0.0, False)


def test_a_ring_hides_behind_long_attention_but_for_what_they_cost_each_other() -> None:
    tokens, attention = 65536.0, 0.5
    found = times("cp4.tp4", tokens, attention, nodes=2)
    # 2 key/value heads of 128, keys and values, 2 bytes; over the network, whose cards the two
    # context ranks of a node's four rings share.
    size = 2 * tokens * 2 * 2 * 128
    rate = platform(2).machine.network[0] * 2 / 8 * platform(2).constants.network
    hop = size / rate + 20e-6
    assert hop < attention / 4  # hidden
    least = 3 * (CONTENTION * hop + STEP_SECONDS)
    assert not found.ulysses[0]
    assert least < found.forward[0] < 1.5 * least + 3e-3  # and the parts that are put together
    back = 2 * tokens * 2 * 2 * 128 * 3 / rate + 20e-6
    assert back < ATTENTION_BACKWARD * attention / 4
    assert found.backward[0] == pytest.approx(3 * (CONTENTION * back + STEP_SECONDS), rel=1e-6)


def test_short_attention_hides_no_ring() -> None:
    long, short = times("cp4.tp2", 65536.0, 0.5), times("cp4.tp2", 65536.0, 1e-6)
    size = np.array([2 * 65536.0 * 4 * 2 * 128])
    hop = point_to_point(size, np.array([2.0]), platform(1))[0]
    assert short.forward[0] + short.backward[0] > long.forward[0] + long.backward[0]
    assert short.ulysses[0] or short.forward[0] > 3 * hop


def test_ulysses_is_two_all_to_alls_and_sends_scarce_key_heads_to_several() -> None:
    tokens = 8192.0
    found = times("cp8", tokens, 1e-6)
    assert found.ulysses[0]
    at = platform(1)
    eight, one = np.array([8.0]), np.array([1.0])
    queries, keys = 32 * 128.0, 8 * 2 * 128.0
    expected = group(ALL_TO_ALL, np.array([2 * tokens * (queries + keys)]), eight, one, at)
    expected = expected + group(ALL_TO_ALL, np.array([2 * tokens * queries]), eight, one, at)
    assert found.forward[0] == pytest.approx((expected * at.constants.contention)[0])
    # 16 ranks, 8 key/value heads: each goes to two.
    wide = times("cp16", tokens, 1e-6, nodes=2)
    assert wide.ulysses[0]
    assert wide.forward[0] > found.forward[0]


def test_heads_that_do_not_divide_leave_the_ring() -> None:
    assert not times("cp8.tp8", 1024.0, 1e-9, nodes=8).ulysses[0]  # 64 ranks, 32 heads
