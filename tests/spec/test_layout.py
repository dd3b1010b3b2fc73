"""Layout: text and back, ranks and coordinates, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.spec.errors import LayoutError
from hocket.spec.layout import AXES, Layout, divisors

recomputed = st.sampled_from(
    [
        ("none", None),
        ("selective", None),
        ("full", None),
        ("full", 1),
        ("selective", 12),
        ("norm+mla_up+mlp", 1),
    ]
)

layouts = st.builds(
    lambda recompute, **fields: Layout(
        recompute=recompute[0], recompute_layers=recompute[1], **fields
    ),
    dp=st.integers(1, 4),
    pp=st.integers(1, 4),
    cp=st.integers(1, 2),
    tp=st.integers(1, 4),
    schedule=st.sampled_from(["1f1b", "gpipe", "schedules/mine.txt"]),
    microbatches=st.none() | st.integers(1, 64),
    zero=st.integers(0, 3),
    recompute=recomputed,
    sequence_parallel=st.booleans(),
    order=st.permutations(AXES).map(tuple),
)


@given(layouts)
def test_text_reads_back_equal(layout: Layout) -> None:
    assert Layout.parse(str(layout)) == layout


@given(layouts)
def test_rank_and_coordinate_are_inverse(layout: Layout) -> None:
    ranks = [layout.rank(layout.coordinate(r)) for r in range(layout.world_size)]
    assert ranks == list(range(layout.world_size))


@given(layouts, st.sampled_from(AXES))
def test_groups_of_an_axis_partition_the_ranks(layout: Layout, axis: str) -> None:
    groups = layout.groups(axis)
    assert sorted(r for g in groups for r in g) == list(range(layout.world_size))
    for group in groups:
        for rank in group:
            assert layout.group(rank, axis) == group


def test_axes_may_stand_in_any_order() -> None:
    assert Layout.parse("dp2.pp2.tp2") == Layout.parse("tp2.pp2.dp2") == Layout(dp=2, pp=2, tp=2)


def test_default_order_puts_tensor_ranks_side_by_side() -> None:
    layout = Layout(dp=2, pp=2, tp=2)
    assert layout.groups("tp") == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert layout.groups("dp") == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert layout.groups("pp") == [(0, 4), (1, 5), (2, 6), (3, 7)]


def test_order_can_be_chosen() -> None:
    layout = Layout.parse("dp2.tp2:order=dp-cp-tp-pp")
    assert layout.groups("dp") == [(0, 1), (2, 3)]
    assert layout.groups("tp") == [(0, 2), (1, 3)]


def test_zb_v_has_two_stages_on_a_rank_unless_it_is_given() -> None:
    assert Layout.parse("pp4:schedule=zb-v") == Layout(pp=4, schedule="zb-v", virtual_stages=2)
    assert Layout.parse("pp4", schedule="zb-v").virtual_stages == 2
    assert Layout.parse("pp4:virtual_stages=1", schedule="zb-v").virtual_stages == 1


def test_flags_fill_what_the_text_leaves_out() -> None:
    layout = Layout.parse("pp2", schedule="gpipe", microbatches=4, pipeline_split="3-5", zero=None)
    assert layout == Layout(pp=2, schedule="gpipe", microbatches=4, pipeline_split=(3, 5))


def test_a_flag_that_contradicts_the_text_is_refused() -> None:
    with pytest.raises(LayoutError, match=r"has microbatches=4, the flag has 8"):
        Layout.parse("pp2:microbatches=4", microbatches=8)


def test_threads_run_in_one_process() -> None:
    assert Layout.parse("dp4:data_parallel=threads").world_size == 1


@pytest.mark.parametrize(
    ("text", "says", "hint"),
    [
        ("ddp2", "unknown axis 'ddp'", "--layout dp2"),
        ("dp2.zero1", "unknown axis 'zero'", "--layout dp2:zero=1"),
        ("dp2,tp2", "is not an axis and a degree", "--layout dp2.tp2"),
        ("dp=2:zero=1", "is not an axis and a degree", "--layout dp2:zero=1"),
        ("2", "is not an axis and a degree", "--layout dp2"),
        ("dp2:zro=1", "unknown layout field 'zro'", "--layout dp2:zero=1"),
        ("dp2:zero", "has no value", "--layout dp2:zero=1"),
        ("autoo", "is not an axis and a degree", "auto"),
        ("tp2.zero=3:microbatches=2", "is not an axis and a degree", "tp2:zero=3,microbatches=2"),
        ("", "is empty", "dp2.pp2.tp2"),
        ("dp2.dp2", "names the axis dp twice", "dp2"),
        ("dp0", "at least 1", "dp1"),
        ("dp0.tp2.pp0:zero=1", "at least 1", "tp2:zero=1"),
        ("dp2.cp0:schedule=gpipe", "at least 1", "dp2:schedule=gpipe"),
        ("tp2..pp2", "'' in layout", "--layout tp2.pp2"),
        ("2dp", "not an axis and a degree", "dp2.pp2.tp2"),
        ("pp2:schedul=gpipe", "unknown layout field 'schedul'", "schedule"),
        ("pp2:microbatches=many", "not a whole number", "microbatches=1"),
        ("pp2:microbatches=0", "at least 1", "pp2:microbatches=1"),
        ("pp2:microbatches=2,microbatches=4", "gives microbatches twice", "microbatches=4"),
        (
            "dp2:pipeline_split=1-1",
            "names 2 stages, the layout has 1",
            "dp2.pp2:pipeline_split=1-1",
        ),
        (
            "pp2:pipeline_split=1-2-3",
            "names 3 stages, the layout has 2",
            "pp3:pipeline_split=1-2-3",
        ),
        ("pp2:virtual_stages=2,pipeline_split=1-2-3", "names 3 stages", "pp2:virtual_stages=2"),
        ("pp2:pipeline_split=evn", "unknown pipeline_split 'evn'", "even"),
        ("dp2:zero=4", "zero is 4", "zero=3"),
        ("dp2:offload=params", "zero is 0", "dp2:zero=3,offload=params"),
        ("dp2:offload=disk", "unknown offload 'disk'", None),
        (
            "dp2:data_parallel=threads,offload=optimizer",
            "offloads nothing",
            "dp2:offload=optimizer",
        ),
        ("dp2:zero=1,shard=3", "must divide dp = 2", "dp2:zero=1,shard=2"),
        ("dp2:shard=2", "shard is 2, and zero is 0", "--layout dp2:zero=1,shard=2"),
        ("dp2:zero=1,shard=0", "must divide dp = 2", "dp2:zero=1,shard=1"),
        ("dp2:order=tp-dp-pp", "must name each of", "order=tp-cp-dp-pp"),
        ("ep4.dp2", "must divide dp x cp = 2", "dp2"),
        ("ep2", "must divide dp x cp = 1", "dp1"),
        ("tp2:sequence_parallel=yes", "neither true nor false", "sequence_parallel=true"),
        ("dp2.tp2:data_parallel=threads", "takes no other axis", "dp2:data_parallel=threads"),
        ("dp2:recompute=some", "unknown recompute 'some'", None),
        ("dp2:recompute=full,recompute_layers=0", "at least 1", "recompute_layers=1"),
        ("dp2:recompute_layers=2", "recompute is none", "recompute=full,recompute_layers=2"),
        ("dp2:data_parallel=threads,recompute=full", "one generator", "dp2:recompute=full"),
    ],
)
def test_what_cannot_be_is_refused(text: str, says: str, hint: str | None) -> None:
    with pytest.raises(LayoutError) as caught:
        Layout.parse(text)
    assert says in caught.value.message
    if hint is not None:
        assert hint in (caught.value.hint or "")


def test_a_rank_outside_the_world_is_refused() -> None:
    with pytest.raises(LayoutError, match="outside the 4 ranks"):
        Layout(dp=4).coordinate(4)


def test_divisors() -> None:
    assert divisors(12) == [1, 2, 3, 4, 6, 12]
    assert divisors(1) == [1]
