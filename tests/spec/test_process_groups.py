"""The groups of a layout: which, in what order, and how many a rank holds."""

from hocket.spec.layout import Layout
from hocket.spec.process_groups import axis_groups, groups_of_rank


def test_a_thousand_ranks_need_one_split_for_each_distinct_axis() -> None:
    axes = axis_groups(Layout.parse("dp32.pp4.tp8"), tie=(0, 3))
    known: set[tuple[int, ...]] = set()
    own: dict[str, int] = {}
    for axis in axes:
        rows = [row for row in axis.rows if row not in known]
        known.update(rows)
        if rows:
            own[axis.name] = len(rows)
    # 704 communicators besides the world, which would be as many calls of every rank.
    assert own == {"world": 1, "dp": 32, "pp": 256, "tp": 128, "model": 32, "embedding": 256}
    ends, middle = groups_of_rank(axes, 0), groups_of_rank(axes, 256)
    assert [names for names in ends.values()] == [
        ["world"], ["dp"], ["pp"], ["tp"], ["model"], ["embedding"],
    ]  # fmt: skip
    assert len(middle) == 5


def test_axes_over_equal_ranks_share_a_group() -> None:
    def shared(text: str) -> list[list[str]]:
        return list(groups_of_rank(axis_groups(Layout.parse(text)), 0).values())

    assert shared("dp4") == [["world", "dp"]]
    assert shared("dp4:zero=3") == [["world", "dp", "shard"]]
    assert shared("tp4") == [["world", "tp", "model"]]
    assert shared("dp2.tp2") == [["world"], ["dp"], ["tp", "model"]]
    # Under ZeRO the norm is summed over the world, where each rank has a shard of its own.
    assert shared("dp2.tp2.pp2:zero=1") == [["world"], ["dp", "shard"], ["pp"], ["tp"]]
    assert shared("dp4:zero=2,shard=2") == [["world", "dp"], ["shard"], ["replicas"]]
    assert shared("dp1") == []


def test_the_groups_of_an_axis_are_disjoint_and_ascending() -> None:
    for text in ("dp2.pp2.tp4", "dp8:zero=1,shard=2", "dp2.pp4.tp2:order=pp-tp-cp-dp"):
        layout = Layout.parse(text)
        for axis in axis_groups(layout, copies={1, layout.tp // 2 or 1}, tie=(0, layout.pp - 1)):
            ranks = [rank for row in axis.rows for rank in row]
            assert len(ranks) == len(set(ranks)), (text, axis)
            assert all(row == tuple(sorted(row)) for row in axis.rows), (text, axis)


def test_key_value_heads_held_twice_need_groups_of_neighbours() -> None:
    axes = {axis.name: axis.rows for axis in axis_groups(Layout(tp=4), copies={1, 2, 4})}
    assert axes["tp_copies2"] == ((0, 1), (2, 3))
    assert "tp_copies4" not in axes
