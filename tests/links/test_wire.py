"""The account of what is on the links: flows by themselves, side by side, and one after another."""

from __future__ import annotations

import time
from typing import Any

import pytest

pytestmark = pytest.mark.torch


class Store:
    """One process's store."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self.values[key]


class Clock:
    """A clock that is set by hand; sleeping moves it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        monkeypatch.setattr(time, "sleep", self.sleep)

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def wire_of(text: str, world_size: int, rank: int = 0, store: Store | None = None) -> Any:
    from hocket.runtime.links import Wire
    from hocket.spec.links import Links

    return Wire(Links.parse(text), rank, world_size, store or Store())


def flow(wire: Any, group: int, operation: str, nbytes: float, ranks: tuple[int, ...]) -> Any:
    """A collective of which every rank has come; what to ask for its end."""
    slot = wire.collective(group, 1)
    traffic = wire.links.traffic(operation, nbytes, ranks, wire.world_size)
    for _ in ranks:
        wire.arrive(slot, 1, traffic, len(ranks))
    return slot


def test_a_flow_alone_takes_what_its_bytes_take(clock: Clock) -> None:
    wire = wire_of("1GB/s", 2)
    slot = flow(wire, wire.new_group(), "all-reduce", 500e6, (0, 1))
    assert wire.end(slot, 1) == (pytest.approx(100.5), False)
    wire.wait(slot, 1)
    assert clock.now == pytest.approx(100.5)
    assert wire.through(slot, 1)


def test_it_begins_with_its_last_rank(clock: Clock) -> None:
    wire = wire_of("1GB/s", 2)
    traffic = wire.links.traffic("all-reduce", 1e9, (0, 1), 2)
    slot = wire.collective(wire.new_group(), 1)
    wire.arrive(slot, 1, traffic, 2)
    clock.now += 3
    wire.arrive(slot, 1, traffic, 2)
    assert wire.end(slot, 1)[0] == pytest.approx(104.0)


def test_two_groups_share_a_link_and_then_the_rest_is_alone(clock: Clock) -> None:
    wire = wire_of("50GB/sx2+1GB/s", 4)
    a = flow(wire, wire.new_group(), "all-reduce", 1e9, (0, 2))
    clock.now += 0.5
    b = flow(wire, wire.new_group(), "all-reduce", 1e9, (1, 3))
    # a has half left and runs at half speed for 1 s; then b has half left, at full speed.
    assert wire.end(a, 1) == (pytest.approx(101.5), True)
    clock.now += 1.25
    assert wire.end(a, 1)[0] == pytest.approx(101.5)
    assert wire.end(b, 1) == (pytest.approx(102.0), False)


def test_inside_and_between_are_other_links(clock: Clock) -> None:
    wire = wire_of("1GB/sx2+1GB/s", 4)
    a = flow(wire, wire.new_group(), "all-reduce", 1e9, (0, 1))
    b = flow(wire, wire.new_group(), "all-reduce", 1e9, (0, 2))
    assert wire.end(a, 1)[0] == wire.end(b, 1)[0] == pytest.approx(101.0)


def test_waiting_follows_an_end_that_moves(clock: Clock) -> None:
    wire = wire_of("1GB/s", 2)
    a = flow(wire, wire.new_group(), "all-reduce", 1e9, (0, 1))
    flow(wire, wire.new_group(), "all-reduce", 0.25e9, (0, 1))
    wire.wait(a, 1)
    assert clock.now == pytest.approx(101.25, abs=0.003)


def test_two_ranks_see_one_account(clock: Clock) -> None:
    store = Store()
    one = wire_of("1GB/s", 2, 0, store)
    other = wire_of("1GB/s", 2, 1, store)
    traffic = one.links.traffic("send", 2e9, (0, 1), 2)
    slot = one.message(0, 1, 1)
    one.arrive(slot, 1, traffic)
    assert other.end(slot, 1)[0] == pytest.approx(102.0)
    assert (one.new_group(), other.new_group(), one.new_group()) == (0, 1, 2)


def test_what_is_long_past_is_through(clock: Clock) -> None:
    wire = wire_of("1GB/s", 2)
    group = wire.new_group()
    slot = flow(wire, group, "all-reduce", 1e9, (0, 1))
    assert not wire.through(slot, 1)
    later = wire.collective(group, 65)
    assert later == slot
    wire.arrive(later, 65, wire.links.traffic("all-reduce", 0.0, (0, 1), 2), 1)
    assert wire.through(slot, 1)
