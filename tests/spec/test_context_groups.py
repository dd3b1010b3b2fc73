"""Who sums gradients and who shares a state where sequences are split over cp."""

from __future__ import annotations

import itertools

import pytest

from hocket.spec.layout import Layout
from hocket.spec.process_groups import axis_groups, data_axis, named_groups


def rows(text: str, axis: str) -> tuple[tuple[int, ...], ...]:
    return {one.name: one.rows for one in axis_groups(Layout.parse(text))}[axis]


@pytest.mark.parametrize(
    ("text", "axis", "expected"),
    [
        ("cp2", "data", ((0, 1),)),
        ("dp2.cp2.tp2", "data", ((0, 2, 4, 6), (1, 3, 5, 7))),
        ("dp2.cp2.tp2", "cp", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("dp2.cp2:zero=1", "shard", ((0, 1, 2, 3),)),
        ("cp2:zero=3", "shard", ((0, 1),)),
        ("dp2.cp2:zero=1,shard=1", "shard", ((0, 1), (2, 3))),
        ("dp2.cp2:zero=1,shard=1", "replicas", ((0, 2), (1, 3))),
        ("cp2.pp2", "data", ((0, 1), (2, 3))),
        ("dp4", "data", ()),
        ("dp4:zero=1,shard=2", "shard", ((0, 1), (2, 3))),
    ],
)
def test_groups(text: str, axis: str, expected: tuple[tuple[int, ...], ...]) -> None:
    assert rows(text, axis) == expected


def test_gradients_go_over_dp_alone_where_no_sequence_is_split() -> None:
    assert data_axis(Layout.parse("dp2.tp2")) == "dp"
    assert data_axis(Layout.parse("dp2.cp2")) == "data"


DEGREES = list(
    itertools.product((1, 2, 4), (1, 2), (1, 2, 3), (1, 2), ("tp-cp-dp-pp", "pp-dp-cp-tp"))
)


@pytest.mark.parametrize(("dp", "pp", "cp", "tp", "order"), DEGREES)
def test_a_state_is_held_as_often_as_it_has_copies(
    dp: int, pp: int, cp: int, tp: int, order: str
) -> None:
    """Each rank is in one group of a state; shards of a group, and copies, make up all ranks."""
    for shard in (n for n in (1, 2, 4) if dp % n == 0):
        layout = Layout(
            dp=dp, pp=pp, cp=cp, tp=tp, zero=1, shard=shard, order=tuple(order.split("-"))
        )
        held = named_groups(layout, "shard") or tuple((r,) for r in range(layout.world_size))
        assert sorted(r for row in held for r in row) == list(range(layout.world_size))
        assert {len(row) for row in held} == {shard * cp}
        assert len(held) == pp * tp * dp // shard
        for row in held:
            places = [layout.coordinate(rank) for rank in row]
            assert len({(place["pp"], place["tp"]) for place in places}) == 1
        shares = named_groups(layout, "replicas")
        assert {len(row) for row in shares} <= {dp // shard}
        for row in shares:  # the same share of each copy
            index = {next(group.index(rank) for group in held if rank in group) for rank in row}
            assert len(index) == 1
