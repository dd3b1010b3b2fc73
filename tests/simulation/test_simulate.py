"""The simulator against closed forms, and against one timeline worked out by hand."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.schedules import build_schedule
from hocket.simulation import measured_prices, simulate, theoretical_bubble
from hocket.spec.errors import OptionError, ScheduleError
from hocket.spec.layout import Layout
from hocket.spec.prices import Prices
from hocket.spec.schedule import Action, Schedule


@pytest.mark.parametrize("ratio", [1.0, 2.0])
@pytest.mark.parametrize("p", [1, 2, 4, 5])
@pytest.mark.parametrize("m", [1, 2, 4, 8, 11])
def test_the_bubbles_of_the_papers(p: int, m: int, ratio: float) -> None:
    prices = Prices.uniform(p, forward=1.0, backward=ratio)
    closed = (p - 1) / (m + p - 1)
    for name in ("gpipe", "1f1b"):
        timeline = simulate(build_schedule(Layout(pp=p, schedule=name), m), prices)
        assert timeline.bubble == pytest.approx(closed), name
        assert timeline.duration == pytest.approx((m + p - 1) * (1 + ratio)), name
    one_by_one = simulate(build_schedule(Layout(pp=p, schedule="sequential"), m), prices)
    assert one_by_one.bubble == pytest.approx(1 - 1 / p)


@pytest.mark.parametrize(("p", "v", "m"), [(2, 2, 4), (4, 2, 8), (4, 3, 4), (2, 4, 2)])
def test_interleaving_divides_the_bubble(p: int, v: int, m: int) -> None:
    schedule = build_schedule(Layout(pp=p, virtual_stages=v), m)
    assert theoretical_bubble(schedule) == pytest.approx((p - 1) / (v * m + p - 1))


def test_a_timeline_worked_out_by_hand() -> None:
    """Unequal stages, messages of 1 and 2 seconds, gradients of 3.

    compute 0  F0[0,2] F1[2,4]          B0[11,15]          B1[17,21]
    sends   0  F0[2,3] F1[4,5]                                     reduce[21,24]
    compute 1          F0[3,4] B0[4,9]  F1[9,10] B1[10,15]
    sends   1                  B0[9,11]          B1[15,17] reduce[17,20]
    """
    prices = Prices(
        seconds={
            "F": (2.0, 1.0),
            "B": (4.0, 5.0),
            "SEND_F": (1.0, 0.0),
            "SEND_B": (0.0, 2.0),
            "REDUCE_GRAD": (3.0, 3.0),
        },
        activation_bytes=(10, 7),
        resident_bytes=(100, 200),
    )
    timeline = simulate(build_schedule(Layout(pp=2), 2), prices)
    spans = {(e.rank, e.name): (e.start, e.end) for e in timeline.events}
    assert spans == {
        (0, "0F0"): (0, 2),
        (0, "0F1"): (2, 4),
        (0, "0SEND_F0"): (2, 3),
        (0, "0SEND_F1"): (4, 5),
        (1, "1RECV_F0"): (2, 3),
        (1, "1RECV_F1"): (4, 5),
        (1, "1F0"): (3, 4),
        (1, "1B0"): (4, 9),
        (1, "1SEND_B0"): (9, 11),
        (0, "0RECV_B0"): (9, 11),
        (0, "0B0"): (11, 15),
        (1, "1F1"): (9, 10),
        (1, "1B1"): (10, 15),
        (1, "1SEND_B1"): (15, 17),
        (0, "0RECV_B1"): (15, 17),
        (0, "0B1"): (17, 21),
        (0, "0REDUCE_GRAD"): (21, 24),
        (1, "1REDUCE_GRAD"): (17, 20),
    }
    assert timeline.pipeline_span == 21
    assert timeline.bubble == pytest.approx(1 - (12 + 12) / (2 * 21))
    assert timeline.peak_bytes == (100 + 2 * 10, 200 + 7)


@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 2), (2, 8), (4, 4), (4, 12), (8, 8)])
def test_the_weights_gradients_fill_the_rests(p: int, m: int) -> None:
    """ZB-H1: with F = I = W the bubble of 1F1B is divided by three."""
    halved = simulate(build_schedule(Layout(pp=p, schedule="zero-bubble"), m))
    assert halved.duration == 3 * m + p - 1
    assert halved.bubble == pytest.approx((p - 1) / (3 * m + p - 1))
    whole = simulate(build_schedule(Layout(pp=p), m))
    assert whole.duration == 3 * (m + p - 1)
    assert halved.busy(0) == whole.busy(0)


@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("more", [-1, 0, 1, 6])
def test_a_v_leaves_nothing_but_the_way_down(p: int, more: int) -> None:
    """ZB-V: from 2p - 1 microbatches on, with F = I = W of a half-stage, 6 m + p - 1 of them."""
    m = max(2 * p + more, 1)
    ones = Prices(seconds={kind: (1.0,) * (2 * p) for kind in ("F", "I", "W")})
    layout = Layout(pp=p, virtual_stages=2, schedule="zb-v")
    found = simulate(build_schedule(layout, m), ones)
    assert found.duration == 6 * m + p - 1
    assert found.bubble == pytest.approx((p - 1) / (6 * m + p - 1))


@pytest.mark.parametrize("ratio", [1.0, 1.5, 2.0])
@pytest.mark.parametrize(("p", "v", "m"), [(2, 2, 4), (4, 2, 8), (4, 3, 12), (3, 4, 9)])
def test_interleaving_takes_what_the_closed_form_says(p: int, v: int, m: int, ratio: float) -> None:
    """Narayanan et al. 2021, 2.2: m (F + B) and a bubble of (p - 1)(F + B) / v."""
    prices = Prices.uniform(p * v, forward=1.0 / v, backward=ratio / v)
    found = simulate(
        build_schedule(Layout(pp=p, virtual_stages=v, schedule="interleaved"), m), prices
    )
    assert found.duration == pytest.approx((m + (p - 1) / v) * (1 + ratio))


def test_measured_prices_give_the_timeline_back() -> None:
    schedule = build_schedule(Layout(pp=3), 4)
    prices = Prices(seconds={"F": (1.0, 2.0, 1.5), "B": (2.0, 3.0, 4.0)})
    timeline = simulate(schedule, prices)
    again = measured_prices(timeline, 3)
    assert {k: pytest.approx(v) for k, v in prices.seconds.items()} == dict(again.seconds)
    # What another schedule would have given with the same stages.
    other = simulate(build_schedule(Layout(pp=3, schedule="sequential"), 4), again)
    assert other.duration == pytest.approx(4 * 13.5)


def test_what_never_ends_is_said() -> None:
    stuck = Schedule(
        name="stuck",
        num_microbatches=1,
        stage_ranks=(0, 1),
        ranks=((Action(0, "F", 0),), (Action(1, "RECV_F", 0),)),
    )
    with pytest.raises(ScheduleError, match="never ends: 1RECV_F0 waits"):
        simulate(stuck)


seconds = st.dictionaries(
    st.sampled_from(["F", "B", "I", "W", "SEND_F", "SEND_B", "REDUCE_GRAD"]),
    st.lists(st.floats(0, 100), min_size=2, max_size=2).map(tuple),
)


@given(seconds, st.lists(st.integers(0, 2**40), max_size=2).map(tuple))
@settings(max_examples=50, deadline=None)
def test_prices_read_back_equal(found: dict[str, tuple[float, ...]], held: tuple[int, ...]) -> None:
    prices = Prices(seconds=found, activation_bytes=held)
    assert Prices.from_json(prices.to_json()) == prices


def test_absent_letters() -> None:
    halves = Prices(seconds={"I": (1.0,), "W": (2.0,)})
    assert halves.of("B", 0) == 3.0
    whole = Prices(seconds={"B": (3.0,)})
    assert whole.of("I", 0) == whole.of("W", 0) == 1.5
    assert whole.of("SEND_F", 0) == 0.0
    with pytest.raises(OptionError, match="unknown action 'X'"):
        Prices(seconds={"X": (1.0,)})
    with pytest.raises(OptionError, match="negative"):
        Prices(seconds={"F": (-1.0,)})
