"""Strides in closed form are those of the ranks that `spec.process_groups` lists."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

from hocket.cost.group_strides import group_size, stride
from hocket.cost.state import state_groups
from hocket.planning.links import members
from hocket.spec.errors import LayoutError
from hocket.spec.layout import Layout
from hocket.spec.process_groups import named_groups
from tests.support.columns import layout_columns

AXES = (
    "tp", "cp", "dp", "pp", "embedding", "expert", "expert_data", "data", "shard", "replicas",
)  # fmt: skip


def layouts() -> Iterator[Layout]:
    """Legal layouts with every axis, and with states that some or all data ranks share."""
    draw = random.Random(0)
    for _ in range(2000):
        zero = draw.choice((0, 1, 3))
        try:
            yield Layout(
                dp=draw.choice((1, 2, 3, 4, 8, 12)),
                cp=draw.choice((1, 2)),
                tp=draw.choice((1, 2, 4)),
                pp=draw.choice((1, 2, 4)),
                ep=draw.choice((1, 2, 4, 8)),
                etp=draw.choice((None, None, 1, 2)),
                zero=zero,
                shard=draw.choice((None, 1, 2, 3, 4)) if zero else None,
            )
        except LayoutError:
            continue


def test_strides_and_sizes_are_those_of_the_groups() -> None:
    seen = dict.fromkeys(AXES, 0)
    for layout in layouts():
        at = layout_columns([layout], 4 * layout.dp)
        for axis in AXES:
            tie = (0, layout.pp - 1) if axis == "embedding" and layout.pp > 1 else None
            if axis.startswith("expert") and not layout.splits_experts:
                continue
            if axis == "embedding" and tie is None:
                continue
            for row in named_groups(layout, axis, tie=tie):
                apart = {after - before for before, after in itertools.pairwise(row)}
                assert apart == {stride(axis, at)[0]}, (str(layout), axis, row)
                assert len(row) == group_size(axis, at)[0], (str(layout), axis, row)
                seen[axis] += 1
    assert all(seen.values()), seen


def test_state_is_shared_by_the_ranks_of_the_groups() -> None:
    """Of dense parameters by a group `shard`; of experts by those of it that are also in one group
    `expert_data`."""
    seen = {"all": 0, "some": 0, "experts": 0, "experts of some": 0, "uneven": 0}
    for layout in layouts():
        dense, expert = state_groups(layout_columns([layout], 4 * layout.dp))
        rank = tuple(range(layout.world_size))
        alone = {r: frozenset((r,)) for r in rank}
        data, shards, copies = (
            alone | {r: frozenset(row) for row in rows for r in row}
            for rows in (layout.data_groups(), layout.shard_groups(),
                         layout.expert_groups("expert_data"))
        )  # fmt: skip
        assert {len(data[r]) for r in rank} == {dense.holders[0]}
        if layout.zero:
            assert {len(shards[r]) for r in rank} == {dense.ranks[0]}, str(layout)
            apart = {b - a for row in layout.shard_groups()
                     for a, b in itertools.pairwise(row)}  # fmt: skip
            assert apart <= {dense.stride[0]}, str(layout)
            seen["all" if layout.shard in (None, layout.dp) else "some"] += 1
        if not layout.splits_experts:
            continue
        seen["experts"] += 1
        assert {len(copies[r]) for r in rank} == {expert.holders[0]}, str(layout)
        apart = {b - a for r in rank for a, b in itertools.pairwise(sorted(copies[r]))}
        assert apart <= {expert.stride[0]}, str(layout)
        if not layout.zero:
            continue
        near = layout.shard or layout.dp
        neighbours = {  # ranks of the same data ranks as `shard` has, whatever their tensor rank
            r: {s for s in copies[r]
                if layout.coordinate(s)["dp"] // near == layout.coordinate(r)["dp"] // near}
            for r in rank
        }  # fmt: skip
        sizes = {len(found) for found in neighbours.values()}
        if len(sizes) == 1:
            assert sizes == {expert.ranks[0]}, str(layout)
            seen["experts of some"] += near < layout.dp
        else:  # copies of experts that lie across shards: fewer share, never more
            assert expert.ranks[0] <= max(sizes), str(layout)
            seen["uneven"] += 1
    assert min(seen.values()) > 5, seen


def test_each_rank_is_in_one_expert_group() -> None:
    """Also with cp, where groups used to be listed once for each of its ranks, and with etp=1."""
    for text in ("dp2.cp2.tp2.ep4", "cp2.tp4.ep2", "dp2.tp2.ep2.etp1", "dp4.pp2.ep2"):
        layout = Layout.parse(text)
        ranks = [rank for row in members(layout, "expert") for rank in row]
        assert sorted(ranks) == list(range(layout.world_size)), text
