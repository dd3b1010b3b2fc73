"""The ranks' side of the probe: everything is measured, and what it says can be believed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from hocket.probing.repeats import enough, interleaved_seconds, repeat_summary, rounded
from hocket.spec.measured import PULSES, MachineMeasurements
from tests.ranks import RankPool

ALONE = ("products", "streams", "dispatch", "kernels", "updates", "serving")


def test_the_median_and_the_quartiles() -> None:
    taken = repeat_summary([1.0, 2.0, 3.0, 4.0, 100.0])
    assert taken.seconds == 3.0
    assert taken.spread == pytest.approx(2 / 3, abs=1e-3)
    assert repeat_summary([5.0]).spread == 0.0
    assert rounded(0.000123456) == 0.0001235


def test_rounds_are_interleaved_and_short_calls_repeated() -> None:
    order: list[str] = []
    clock = [0.0]

    def case(name: str, seconds: float) -> None:
        order.append(name)
        clock[0] += seconds

    taken = interleaved_seconds(
        {"long": lambda: case("long", 1.0), "short": lambda: case("short", 1e-5)},
        seconds=0.0,
        least=3,
        reads=lambda: clock[0],
    )
    assert taken["long"].seconds == pytest.approx(1.0)
    assert taken["short"].seconds == pytest.approx(1e-5)
    runs = [name for i, name in enumerate(order) if i == 0 or order[i - 1] != name]
    assert runs[-6:] == ["long", "short"] * 3
    assert order.count("short") > 10 * order.count("long")


def test_a_busy_machine_is_measured_in_fewer_rounds() -> None:
    assert not enough(5, 5, 0.9, 1.0)
    assert enough(5, 5, 1.0, 1.0)
    assert not enough(2, 5, 2.9, 1.0)
    assert enough(2, 5, 3.0, 1.0)
    assert not enough(1, 5, 100.0, 1.0)


def test_a_case_that_takes_too_long_is_left_out() -> None:
    clock = [0.0]

    def case(seconds: float) -> None:
        clock[0] += seconds

    taken = interleaved_seconds(
        {"slow": lambda: case(2.0), "fast": lambda: case(0.1)},
        seconds=0.0,
        least=2,
        longest=1.0,
        reads=lambda: clock[0],
    )
    assert list(taken) == ["fast"]
    assert clock[0] == pytest.approx(2.0 + 4 * 0.1)


def test_what_a_case_needs_before_it_is_not_timed() -> None:
    clock, order = [0.0], list[str]()

    def passes(name: str, seconds: float) -> Callable[[], None]:
        def call() -> None:
            clock[0] += seconds
            order.append(name)

        return call

    taken = interleaved_seconds(
        {"case": passes("case", 1.0)},
        seconds=0.0,
        least=2,
        reads=lambda: clock[0],
        prepare={"case": passes("before", 5.0)},
    )
    assert taken["case"].seconds == 1.0
    assert order[-4:] == ["before", "case"] * 2


def test_a_thread_of_another_does_not_count_as_its_own() -> None:
    """The clock of the thread stands still while it waits."""
    with_wait = interleaved_seconds(
        {"wait": lambda: time.sleep(2e-3)}, seconds=0.0, least=3, reads=time.thread_time, most=3
    )
    assert with_wait["wait"].seconds < 1e-3
    assert threading.active_count() >= 1


@pytest.mark.ranks
@pytest.mark.timeout(100)
def test_four_ranks_measure_everything(ranks: RankPool) -> None:
    events, *others = ranks.run(
        "tests.probing.cases:probe", 4, backend=None, quick=True, cores=2, worlds=[2, 4], pairs=2
    )
    assert not any(event["event"] == "measured" for other in others for event in other)
    parts: dict[str, list[object]] = {}
    for event in events:
        if event["event"] == "measured":
            parts.setdefault(event["key"], []).extend(event["rows"])
    host = {"name": "here", "cpu": "x", "cores": 2}
    head = {"device": "cpu", "date": "d", "torch": "t", "hocket": "h", "host": host}
    found = MachineMeasurements.from_dict({**head, **parts})

    assert {p.form for p in found.products} == {"nt", "nn", "tn"}
    assert {(p.m, p.n, p.k) for p in found.products} == {(16, 32, 16), (16, 16, 32), (32, 16, 16)}
    assert {s.operation for s in found.streams} == {
        "copy", "add", "scale", "forward", "backward",
    }  # fmt: skip
    assert {d.operation for d in found.dispatch} == {"add", "linear", "view", "module"}
    assert {k.name for k in found.kernels} >= {"attention", "cross-entropy", "embedding"}
    serving = {k.name: k for k in found.kernels if k.name in ("rows", "decode", "chunk", "call")}
    assert len(serving) == 4
    assert {k.shape for k in found.kernels if k.name == "rows"} == {(1, 32, 16, 2), (4, 32, 16, 2)}
    halves = [k for k in found.kernels if k.name == "half"]
    assert {(k.dtype, k.shape) for k in halves} == {
        ("bf16", (1, 32, 16, 2)),
        ("bf16", (4, 32, 16, 2)),
    }
    assert serving["decode"].shape == (2, 2, 1, 20, 8, 2)
    assert serving["decode"].backward == 0
    assert found.updates[0].elements == 2**10
    assert [s.ranks for s in found.sharing] == [2, 4]
    assert all(min(s.product, s.stream, s.dispatch, s.step) >= s.ranks / 2 for s in found.sharing)
    assert {(p.part, p.operation) for p in found.pulses} == {
        (part, name) for part in (*ALONE, "sharing", "pairs", "collectives") for name in PULSES
    }
    (pair,) = found.pairs
    assert (pair.first, pair.second, pair.measured) == (0, 1, True)
    assert pair.rate > 0 < pair.latency
    kinds = {(c.backend, c.operation, c.ranks, c.world) for c in found.curves}
    for backend in ("shm", "gloo"):
        for operation in ("all-reduce", "all-gather", "reduce-scatter", "all-to-all"):
            assert {(backend, operation, 2, 2), (backend, operation, 2, 4)} <= kinds
            assert (backend, operation, 4, 4) in kinds
        assert (backend, "send", 2, 2) in kinds
    assert {key[2:] for key in kinds if key[1] == "sum"} == {(2, 2), (2, 4), (4, 4)}
    assert all(len(c.lines) >= 2 for c in found.curves)
    assert all(len(c.busy) == len(c.sizes) for c in found.curves)
    assert any(event["event"] == "load" for event in events)
