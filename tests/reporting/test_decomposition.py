"""Where a step goes: computed by hand once."""

from __future__ import annotations

import pytest

from hocket.reporting.decomposition import clip, decompose, groups, length, subtract, union
from hocket.schedules import build_schedule
from hocket.simulation import simulate, theoretical_bubble
from hocket.spec.layout import Layout
from hocket.spec.prices import Prices
from hocket.spec.process_groups import named_groups
from hocket.spec.timeline import Event, Timeline
from tests.reporting.run_folders import measured


def event(rank: int, kind: str, start: float, end: float, **more: object) -> Event:
    lane = "compute" if kind in ("F", "B", "I", "W", "optimizer") else "communication"
    return Event(rank=rank, lane=lane, kind=kind, name=kind, start=start, end=end, **more)  # type: ignore[arg-type]


def test_spans() -> None:
    assert union([(3, 4), (0, 1), (0.5, 2), (4, 5), (7, 7)]) == [(0, 2), (3, 5)]
    assert subtract([(0, 10)], [(-1, 1), (2, 3), (9, 12)]) == [(1, 2), (3, 9)]
    assert subtract([(0, 1), (2, 3), (4, 6)], [(0, 5)]) == [(5, 6)]
    assert clip([(0, 2), (3, 4)], (1, 3.5)) == [(1, 2), (3, 3.5)]
    assert length([(0, 2), (3, 3.5)]) == 2.5


def test_a_collective_inside_compute_is_waiting_and_then_communication() -> None:
    # Both compute from 0 to 10; rank 0 enters the all-reduce at 2, rank 1 at 4, both leave at 5.
    timeline = Timeline.of(
        "measured",
        2,
        [
            event(0, "F", 0, 10, stage=0),
            event(0, "all-reduce", 2, 5, axis="tp"),
            event(1, "F", 0, 10, stage=0),
            event(1, "all-reduce", 4, 5, axis="tp"),
        ],
    )
    found = decompose(timeline, Layout(tp=2))
    assert found.ranks[0] == pytest.approx(
        {"compute": 7, "communication": 1, "bubble": 0, "imbalance": 2, "other": 0}
    )
    assert found.ranks[1] == pytest.approx(
        {"compute": 9, "communication": 1, "bubble": 0, "imbalance": 0, "other": 0}
    )
    assert found.axes == pytest.approx({"tp": 1.0})
    # Where nobody knows who shares the collective, all of it is communication.
    alone = decompose(timeline)
    assert alone.ranks[0]["communication"] == 3


def test_what_overlaps_with_compute_costs_only_what_stands_out() -> None:
    timeline = Timeline.of(
        "measured",
        1,
        [
            event(0, "B", 0, 10, stage=0),
            event(0, "all-reduce", 4, 8, axis="dp"),
            event(0, "all-reduce", 9, 13, axis="dp"),
            event(0, "optimizer", 14, 15),
        ],
    )
    (rank,) = decompose(timeline, Layout(dp=1)).ranks
    assert rank == pytest.approx(
        {"compute": 11, "communication": 3, "bubble": 0, "imbalance": 0, "other": 1}
    )


def test_a_receive_waits_until_its_message_is_sent() -> None:
    timeline = Timeline.of(
        "measured",
        2,
        [
            event(0, "F", 0, 6, stage=0, microbatch=0),
            event(0, "SEND_F", 6, 7, stage=0, microbatch=0, axis="pp"),
            event(1, "RECV_F", 1, 7, stage=1, microbatch=0, axis="pp"),
            event(1, "F", 7, 9, stage=1, microbatch=0),
        ],
    )
    found = decompose(timeline, Layout(pp=2))
    # Rank 1: nothing recorded in the first second, five of waiting, one of the message.
    assert found.ranks[1] == pytest.approx(
        {"compute": 2, "communication": 1, "bubble": 6, "imbalance": 0, "other": 0}
    )
    assert found.ranks[0] == pytest.approx(
        {"compute": 6, "communication": 1, "bubble": 2, "imbalance": 0, "other": 0}
    )


def test_an_even_pipeline_has_a_bubble_and_no_imbalance() -> None:
    schedule = build_schedule(Layout(pp=4), 8)
    own = theoretical_bubble(schedule)
    even = decompose(simulate(schedule), Layout(pp=4), own_bubble=own)
    assert even.mean["bubble"] / even.duration == pytest.approx(own)
    assert even.mean["imbalance"] == pytest.approx(0, abs=1e-9)


def test_a_slow_stage_is_imbalance() -> None:
    schedule = build_schedule(Layout(pp=2), 4)
    prices = Prices(seconds={"F": (1.0, 2.0), "B": (2.0, 4.0)})
    own = theoretical_bubble(schedule)
    uneven = decompose(simulate(schedule, prices), Layout(pp=2), own_bubble=own)
    assert uneven.mean["imbalance"] > 0.1 * uneven.duration
    busy = uneven.mean["compute"]
    assert uneven.mean["bubble"] == pytest.approx(busy * own / (1 - own))


@pytest.mark.parametrize("text", ["dp2.pp2.tp2", "pp4", "dp4", "tp2.pp2:schedule=zero-bubble"])
def test_the_parts_of_every_rank_add_up_to_the_step(text: str) -> None:
    layout = Layout.parse(text)
    timeline = measured(layout, 4)
    found = decompose(timeline, layout, own_bubble=0.1)
    for rank in found.ranks:
        assert sum(rank.values()) == pytest.approx(timeline.duration)
        assert all(value >= 0 for value in rank.values())


def test_groups_by_name() -> None:
    layout = Layout(dp=2, tp=2)
    assert groups(layout, "tp") == ((0, 1), (2, 3))
    assert groups(layout, "model") == ((0, 1), (2, 3))
    assert groups(layout, "world") == ((0, 1, 2, 3),)
    assert groups(layout, "imagined") == ()


@pytest.mark.parametrize("axis", ["dp", "shard", "replicas"])
def test_reductions_of_data_ranks_are_hidden_by_compute(axis: str) -> None:
    """Of every axis that the runtime's mesh has for data ranks."""
    layout = Layout.parse("dp4:zero=2,shard=2")
    assert named_groups(layout, axis)
    events = [event(0, "B", 0, 10, stage=0), event(0, "reduce-scatter", 4, 8, axis=axis)]
    found = decompose(Timeline.of("measured", 1, events), Layout())
    assert found.ranks[0]["compute"] == 10
    assert found.ranks[0]["communication"] == 0


def test_an_empty_timeline() -> None:
    assert decompose(Timeline.of("measured", 0, [])).mean["compute"] == 0
