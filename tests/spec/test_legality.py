"""The rules by themselves, on numbers and on arrays."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from hocket.spec import legality
from hocket.spec.errors import LayoutError, ModelError
from hocket.spec.layout import Layout
from hocket.spec.proxy_verdict import ProxyVerdict, reject, verdict_fields

GRID = list(itertools.product(range(1, 25), repeat=2))


@pytest.mark.parametrize(
    "rule", [legality.batch, legality.microbatches, legality.interleaved_rounds]
)
def test_an_array_is_explained_what_each_of_its_numbers_is(rule: object) -> None:
    assert callable(rule)
    left, right = (np.array(column, dtype=np.float64) for column in zip(*GRID, strict=True))
    single = [rule(one, other) for one, other in GRID]
    assert rule(left, right).tolist() == single
    assert True in single
    assert False in single


def test_slices_of_many_layouts_at_once() -> None:
    cp, tp = (np.array(column, dtype=np.float64) for column in zip(*GRID, strict=True))
    assert legality.slices(48, cp, tp).tolist() == [legality.slices(48, *one) for one in GRID]
    assert not legality.slices(48, 1, 1)  # one rank has no slice


def test_shares_of_many_layouts_at_once() -> None:
    dp, count = (np.array(column, dtype=np.float64) for column in zip(*GRID, strict=True))
    for zero in (1, 2, 3):
        legal = legality.shard(dp, count, np.full(len(GRID), zero)).tolist()
        assert legal == [whole % some == 0 for whole, some in GRID]
    assert not legality.shard(dp, count, 0).any()
    assert not legality.shard(4, 2, 0)
    assert legality.shard(4, 2, 1)


def test_rounds_are_equal() -> None:
    for count, pp in GRID:
        assert legality.interleaved_rounds(count, pp) == (count % max(1, count // pp) == 0)


def test_no_tensor_rank_without_a_row() -> None:
    for count, tp in GRID:
        each = -(-count // tp)
        held = [max(0, min(count - rank * each, each)) for rank in range(tp)]
        assert legality.rows(count, tp) == all(held)


def test_key_value_heads_are_held_by_as_many_ranks_each() -> None:
    assert [tp for tp in range(1, 13) if legality.copied_units(3, tp)] == [1, 3, 6, 9, 12]
    assert legality.attention(0, 0, 4)  # there is none


def test_what_is_cut_in_two_halves() -> None:
    assert [cp for cp in range(1, 9) if legality.context(12, cp)] == [1, 2, 3, 6]
    assert legality.context(7, 1)
    assert not legality.context(7, 7)
    # Chunks of 12, 6, 4, 3 and 2.
    assert [cp for cp in (1, 2, 3, 4, 6) if legality.context(24, cp, 4)] == [1, 2, 3]


def test_experts_over_ranks() -> None:
    assert [ep for ep in range(1, 9) if legality.experts(8, ep)] == [1, 2, 4, 8]
    assert legality.experts(0, 1)
    assert not legality.experts(0, 2)


def test_microbatches_left_open() -> None:
    assert [legality.usual_microbatches(batch, 2, 64) for batch in (1, 2, 3, 6, 7, 8)] == [
        1, 2, 3, 3, 1, 4,
    ]  # fmt: skip


def test_narrowed_layouts_can_be() -> None:
    """With one degree replaced alone, most of these would raise."""
    raised = 0
    degrees = itertools.product((1, 2, 4), (1, 2), (1, 2, 4), (1, 2, 4), (None, 1, 2), (None, 2))
    for dp, cp, tp, ep, etp, shard in degrees:
        try:
            layout = Layout(
                dp=dp, cp=cp, tp=tp, ep=ep, etp=etp, shard=shard, zero=1 if shard else 0
            )
        except LayoutError:
            continue
        for axis, degree in itertools.product(("dp", "cp", "tp"), (1, 2, 3)):
            found = legality.narrowed(layout, **{axis: degree})
            assert found.degree(axis) == degree
            others = {"dp", "cp", "tp"} - {axis}
            assert all(found.degree(other) == layout.degree(other) for other in others)
            assert layout.ep % found.ep == 0
            try:
                alone = dataclasses.replace(layout, **{axis: degree})
            except LayoutError:
                raised += 1
            else:
                assert found.ep == alone.ep or layout.etp is not None
    assert raised > 100


@pytest.mark.parametrize(
    ("layout", "part", "hint"),
    [
        ("tp2.ep2.etp1", "tensors", "--layout dp1"),
        ("dp2.tp2.ep4.etp1", "tensors", "--layout dp2.ep2"),
        ("cp2.ep2", "context", "--layout dp1"),
        ("dp2.cp2.ep4", "context", "--layout dp2.ep2"),
        ("dp2:recompute=norm", "layers", "--recompute none"),
        ("dp2:recompute=selective", "cores", "--recompute full"),
        ("dp2:recompute=norm+mlp", "feed_forward", "--recompute full"),
    ],
)
def test_a_rejection_of_a_layout_gives_its_reason(layout: str, part: str, hint: str) -> None:
    known = ProxyVerdict(**{part: "for a reason"})
    split = Layout.parse(layout)
    with pytest.raises(ModelError, match="for a reason") as caught:
        reject(known, verdict_fields(split), split, "m", "llama")
    assert caught.value.hint == hint
