"""Groups of the experts' ranks: every shard of the experts is held by as many ranks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.spec import legality
from hocket.spec.errors import LayoutError, OptionError
from hocket.spec.expert_dispatch import num_nodes, require_deepep, settle_dispatch
from hocket.spec.layout import AXES, Layout, divisors
from hocket.spec.process_groups import axis_groups, groups_of_rank, node_groups


@st.composite
def folded(draw: st.DrawFn) -> Layout:
    """Layouts with experts over ranks, in any order of axes and with any etp that is legal."""
    dp, pp, cp, tp = (draw(st.sampled_from([1, 2, 3, 4])) for _ in range(4))
    etp = draw(st.none() | st.sampled_from(divisors(dp * cp * tp)))
    ep = draw(st.sampled_from(divisors(dp * cp * tp // (etp or tp))))
    order = draw(st.permutations(AXES))
    return Layout(dp=dp, pp=pp, cp=cp, tp=tp, ep=ep, etp=etp, order=tuple(order))


@given(folded())
def test_text_reads_back_equal(layout: Layout) -> None:
    assert Layout.parse(str(layout)) == layout


@given(folded())
def test_each_axis_deals_out_every_rank_and_stays_in_its_stage(layout: Layout) -> None:
    for axis in ("expert", "expert_tp", "expert_data"):
        rows = layout.expert_groups(axis)
        assert sorted(rank for row in rows for rank in row) == list(range(layout.world_size))
        for row in rows:
            assert list(row) == sorted(row)
            assert len({layout.coordinate(rank)["pp"] for rank in row}) == 1


@given(folded())
def test_the_bytes_of_experts_are_conserved(layout: Layout) -> None:
    """Over the ranks of a stage, each of ep x etp shards is held by as many ranks."""
    held: dict[tuple[int, int, int], list[int]] = {}
    for rank in range(layout.world_size):
        place = []
        for axis in ("expert", "expert_tp"):
            row = next(row for row in layout.expert_groups(axis) if rank in row)
            place.append(row.index(rank))
        held.setdefault((layout.coordinate(rank)["pp"], *place), []).append(rank)
    assert len(held) == layout.pp * layout.ep * layout.expert_tp
    assert {len(ranks) for ranks in held.values()} == {layout.expert_copies}
    assert sorted(tuple(r) for r in held.values()) == layout.expert_groups("expert_data")


@given(folded())
def test_where_etp_is_tp_the_slices_are_those_of_tp(layout: Layout) -> None:
    if layout.etp is None:
        assert layout.expert_groups("expert_tp") == layout.groups("tp")


def test_a_layout_makes_only_the_groups_it_uses() -> None:
    def shared(text: str) -> list[list[str]]:
        return list(groups_of_rank(axis_groups(Layout.parse(text)), 0).values())

    assert shared("dp2.ep2") == [["world", "dp", "expert"]]
    assert shared("dp4.ep2") == [["world", "dp"], ["expert"], ["expert_data"]]
    assert shared("dp2.tp2.ep4.etp1") == [["world", "expert"], ["dp"], ["tp"]]
    assert shared("dp2.tp2.ep2") == [["world"], ["dp", "expert"], ["tp"]]
    assert shared("tp2.etp1") == [["world", "tp", "expert_data"]]
    assert shared("dp2.pp2.ep2") == [["world"], ["dp", "expert"], ["pp"]]


def test_an_etp_that_equals_tp_is_not_written() -> None:
    assert str(Layout.parse("dp2.tp2.ep2.etp2")) == "dp2.tp2.ep2"
    assert str(Layout.parse("dp2.ep2.etp1")) == "dp2.ep2"


@pytest.mark.parametrize(
    ("text", "rule", "hints"),
    [
        ("dp4.ep8", "ep 8 must divide dp x cp = 4", ["dp4.ep4"]),
        ("dp4.ep3", "ep 3 must divide dp x cp = 4", ["dp4.ep4", "dp4.ep2"]),
        (
            "dp4.tp2.ep3.etp1",
            "ep x etp = 3 x 1 must divide dp x cp x tp = 8",
            ["dp4.tp2.ep4.etp1", "dp4.tp2.ep2.etp1"],
        ),
        (
            "dp4.ep2.etp3",
            "ep x etp = 2 x 3 must divide dp x cp x tp = 4",
            ["dp4.ep2", "dp4.ep4"],
        ),
    ],
)
def test_what_does_not_divide_is_named_and_the_nearest_that_do(
    text: str, rule: str, hints: list[str]
) -> None:
    with pytest.raises(LayoutError) as caught:
        Layout.parse(text)
    assert caught.value.message == rule
    assert caught.value.hint == " or ".join(f"--layout {hint}" for hint in hints)
    for hint in hints:
        Layout.parse(hint)


def test_the_rule_is_one_of_legality() -> None:
    assert legality.expert_ranks(4, 1, 8, 2, 1)
    assert not legality.expert_ranks(4, 1, 8, 2, 2)


@pytest.mark.parametrize(
    ("text", "layout", "ranks", "found", "nodes"),
    [
        ("auto", "dp8.ep8", 4, "node:4", 2),
        ("auto", "dp8.ep8", 2, "node:2", 4),
        ("auto", "dp8.ep8", 8, "direct", 0),  # one node
        ("auto", "dp8.ep8", 1, "direct", 0),  # one rank a node
        ("auto", "dp8.ep8", None, "direct", 0),
        ("direct", "dp8.ep8", 4, "direct", 0),
        ("auto", "dp4.tp2.ep4", 4, "node:4", 2),
        ("auto", "dp4.tp2.ep4.etp1", 4, "direct", 0),  # whose experts' ranks share a node
        ("auto", "dp3.ep3", 2, "direct", 0),  # two ranks and one
        ("node:2", "pp2.dp4.ep4", 8, "node:2", 2),
        ("deepep", "dp8.ep8", 4, "deepep", 0),
    ],
)
def test_how_tokens_reach_their_experts(
    text: str, layout: str, ranks: int | None, found: str, nodes: int
) -> None:
    split = Layout.parse(layout)
    assert settle_dispatch(text, split, ranks) == found
    assert num_nodes(found, split) == nodes


def test_nodes_of_experts() -> None:
    inside, across = node_groups(Layout.parse("dp8.ep8"), 4)
    assert inside == ("expert_node", [(0, 1, 2, 3), (4, 5, 6, 7)])
    assert across == ("expert_rail", [(0, 4), (1, 5), (2, 6), (3, 7)])


@pytest.mark.parametrize(
    "text", ["", "nodes", "node:", "node:1", "node:x", "direct:2", "auto:4", "deepep:8"]
)
def test_no_way_of_dispatch(text: str) -> None:
    with pytest.raises(OptionError, match="expert-dispatch"):
        settle_dispatch(text, Layout.parse("dp4.ep4"), None)


def test_no_nodes_to_dispatch_to() -> None:
    with pytest.raises(LayoutError, match="nodes of 2 ranks"):
        settle_dispatch("node", Layout.parse("dp2.ep2"), 2)


def test_deepep_is_for_gpus_bf16_and_experts_on_other_ranks() -> None:
    with pytest.raises(LayoutError, match=r"\(ep 1\) every rank holds all experts"):
        settle_dispatch("deepep", Layout.parse("dp2"), 8)
    direct = "--expert-dispatch direct"
    for cuda, capability, dtype, why, hint in (
        (False, None, "bf16", "the ranks are on CPU", direct),
        (True, (8, 0), "bf16", "capability 9.0, and these have 8.0", direct),
        (True, (9, 0), "fp32", "--dtype is fp32", "--dtype bf16"),
        (True, None, "bf16", "deep_ep is not installed", direct),
    ):
        with pytest.raises(OptionError, match=why) as caught:
            require_deepep(cuda=cuda, dtype=dtype, capability=capability)
        assert caught.value.hint == hint
