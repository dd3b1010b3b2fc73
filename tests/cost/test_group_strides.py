"""Strides in closed form are those of the ranks that `spec.process_groups` lists."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

from hocket.cost.group_strides import stride
from hocket.cost.layout_batch import columns
from hocket.cost.state import sharing
from hocket.planning.links import members
from hocket.spec.errors import LayoutError
from hocket.spec.layout import Layout
from hocket.spec.process_groups import named_groups

AXES = ("tp", "cp", "dp", "pp", "embedding", "expert", "expert_data")


def layouts() -> Iterator[Layout]:
    """Legal layouts with every axis, without ZeRO."""
    draw = random.Random(0)
    for _ in range(1500):
        try:
            yield Layout(
                dp=draw.choice((1, 2, 3, 4)),
                cp=draw.choice((1, 2)),
                tp=draw.choice((1, 2, 4)),
                pp=draw.choice((1, 2, 4)),
                ep=draw.choice((1, 2, 4)),
            )
        except LayoutError:
            continue


def test_strides_are_those_of_the_groups() -> None:
    seen = dict.fromkeys(AXES, 0)
    for layout in layouts():
        at = columns([layout], 4 * layout.dp)
        for axis in AXES:
            tie = (0, layout.pp - 1) if axis == "embedding" and layout.pp > 1 else None
            if axis.startswith("expert") and not layout.splits_experts:
                continue
            if axis == "embedding" and tie is None:
                continue
            for row in named_groups(layout, axis, tie=tie):
                apart = {after - before for before, after in itertools.pairwise(row)}
                assert apart == {stride(axis, at)[0]}, (str(layout), axis, row)
                seen[axis] += 1
    assert all(seen.values()), seen


def test_state_is_shared_by_as_many_ranks_as_the_groups_have() -> None:
    for layout in layouts():
        dense, expert = sharing(columns([layout], 4 * layout.dp))
        data = named_groups(layout, "dp")
        if data:
            assert dense.ranks[0] == len(data[0]) * layout.cp
        if layout.splits_experts and (rows := named_groups(layout, "expert_data")):
            assert expert.ranks[0] == len(rows[0])
            assert expert.copies[0] == 1


def test_each_rank_is_in_one_expert_group() -> None:
    """Also with cp, where groups used to be listed once for each of its ranks, and with etp=1."""
    for text in ("dp2.cp2.tp2.ep4", "cp2.tp4.ep2", "dp2.tp2.ep2.etp1", "dp4.pp2.ep2"):
        layout = Layout.parse(text)
        ranks = [rank for row in members(layout, "ep") for rank in row]
        assert sorted(ranks) == list(range(layout.world_size)), text
