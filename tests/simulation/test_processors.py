"""Processors: small cases whose times are known exactly."""

from __future__ import annotations

import pytest

from hocket.simulation.processors import (
    Await,
    Begin,
    Cores,
    End,
    Pause,
    Post,
    ProcessorWork,
    Step,
    alone,
    play,
)
from hocket.spec.errors import ScheduleError


def span(name: str, *steps: Step) -> list[Step]:
    return [Begin(name), *steps, End(name, {"lane": "compute", "kind": "F", "name": name})]


def ends(lines: list[list[Step]], cores: int = 0) -> dict[str, tuple[float, float]]:
    events = play(lines, Cores(cores) if cores else alone)
    return {e.name: (e.start, e.end) for e in events}


def test_enough_cores_share_nothing() -> None:
    lines = [span("a", ProcessorWork(2.0)), span("b", ProcessorWork(3.0))]
    assert ends(lines, cores=2) == {"a": (0, 2.0), "b": (0, 3.0)}


def test_two_on_one_core_take_turns() -> None:
    # Both at half speed until a's 2 seconds are done at 4; b has 1 left and is alone.
    lines = [span("a", ProcessorWork(2.0)), span("b", ProcessorWork(3.0))]
    assert ends(lines, cores=1) == {"a": (0, 4.0), "b": (0, 5.0)}


def test_three_on_two_cores() -> None:
    # Each at 2/3: the first ends at 3, the others have 1 left each and a core of their own.
    lines = [
        span("a", ProcessorWork(2.0)),
        span("b", ProcessorWork(3.0)),
        span("c", ProcessorWork(3.0)),
    ]
    found = ends(lines, cores=2)
    assert found["a"] == pytest.approx((0, 3.0))
    assert found["b"] == found["c"] == pytest.approx((0, 4.0))


def test_who_waits_costs_nothing() -> None:
    lines = [
        [*span("a", ProcessorWork(2.0)), Post("a")],
        [*span("wait", Await("a")), *span("b", ProcessorWork(1.0))],
    ]
    assert ends(lines, cores=1) == {"a": (0, 2.0), "wait": (0, 2.0), "b": (2.0, 3.0)}


def test_a_pause_needs_no_core() -> None:
    lines = [span("a", Pause(1.0), ProcessorWork(1.0)), span("b", ProcessorWork(2.0))]
    # b alone for 1, then both at half: a's 1 takes 2, b's last 1 takes 2.
    assert ends(lines, cores=1) == {"a": (0, 3.0), "b": (0, 3.0)}


def test_a_collective_begins_when_the_last_has_given() -> None:
    def rank(name: str, before: float) -> list[Step]:
        return [ProcessorWork(before), *span(name, Post("g"), Await("g", 2), ProcessorWork(0.5))]

    assert ends([rank("a", 1.0), rank("b", 3.0)], cores=2) == {"a": (1.0, 3.5), "b": (3.0, 3.5)}


def test_measured_sharing_slows_before_the_cores_run_out() -> None:
    cores = Cores(2, ((2, 1.25), (4, 2.5)))
    assert cores(1) == 1.0
    assert cores(2) == 1.25
    assert cores(4) == 2.5
    # Of n ranks, n / slow-down are done at once: 1, 1.6, 1.6 cores' worth.
    assert cores(3) == pytest.approx(3 / 1.6)
    assert cores(8) == pytest.approx(8 / 1.6)
    lines = [span("a", ProcessorWork(1.0)), span("b", ProcessorWork(1.0))]
    assert max(e.end for e in play(lines, cores)) == 1.25


def test_unmeasured_cores_are_counted() -> None:
    assert [Cores(2)(n) for n in (1, 2, 3, 4)] == [1.0, 1.0, 1.5, 2.0]
    # Two ranks were tried on four cores: four are taken to be as far from free as they were.
    assert Cores(4, ((2, 1.1),))(4) == pytest.approx(1.1)


def test_no_rank_is_faster_in_company() -> None:
    assert Cores(2, ((2, 0.9),))(2) == 1.0


def test_a_wait_without_end_is_an_error() -> None:
    with pytest.raises(ScheduleError, match="rank 0 waits without end"):
        play([[Await("never")]])


def test_the_work_is_conserved() -> None:
    lines = [
        [*span(f"{r}", ProcessorWork(0.1 * (r + 1)), Pause(0.05), ProcessorWork(0.3))]
        for r in range(5)
    ]
    events = play(lines, Cores(2))
    work = sum(0.1 * (r + 1) + 0.3 for r in range(5))
    assert max(e.end for e in events) >= work / 2
