"""How many layers each stage holds."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.spec.cut import choose_cut, stage_layers
from hocket.spec.errors import LayoutError


def test_even_is_what_the_textbook_draws() -> None:
    assert choose_cut("even", 48, 4) == (12, 12, 12, 12)


def test_even_that_does_not_divide_proposes_what_does() -> None:
    with pytest.raises(LayoutError, match="50 layers do not divide over 4 stages") as caught:
        choose_cut("even", 50, 4)
    assert caught.value.hint == "pp2 or pp5, or pipeline_split=13-13-12-12"


def test_balanced_counts_the_head() -> None:
    assert choose_cut("balanced", 8, 2) == (4, 4)
    # A head as dear as two layers: 5 + 5 instead of 4 + 6.
    assert choose_cut("balanced", 8, 2, after_cost=2.0) == (5, 3)
    # GPT-2's head is 38.6M parameters, a layer 7.1M.
    assert choose_cut("balanced", 12, 4, layer_costs=[7.1] * 12, after_cost=38.6) == (4, 4, 3, 1)
    assert choose_cut("balanced", 4, 2, layer_costs=[1, 1, 1, 5]) == (3, 1)
    assert choose_cut("balanced", 6, 3, before_cost=2.0) == (1, 3, 2)


@given(
    st.lists(st.integers(1, 9), min_size=3, max_size=8), st.integers(1, 3), st.integers(0, 9),
    st.integers(0, 9),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_no_other_cut_is_faster(costs: list[int], stages: int, before: int, after: int) -> None:
    def slowest(cut: tuple[int, ...]) -> float:
        sums = [sum(costs[i] for i in stage_layers(cut, s)) for s in range(stages)]
        sums[0] += before
        sums[-1] += after
        return max(sums)

    chosen = choose_cut(
        "balanced", len(costs), stages, layer_costs=costs, before_cost=before, after_cost=after
    )
    assert sum(chosen) == len(costs)
    every = itertools.product(range(1, len(costs) + 1), repeat=stages)
    best = min(slowest(c) for c in every if sum(c) == len(costs))
    assert slowest(chosen) == best


@pytest.mark.parametrize(
    ("cut", "layers", "stages", "says"),
    [
        ((3, 4), 8, 2, "places 7 layers, the model has 8"),
        ((3, 5), 8, 4, "names 2 stages, the layout has 4"),
        ("balanced", 2, 4, "2 layers do not fill 4 stages"),
        ("evn", 8, 2, "unknown pipeline_split 'evn'"),
    ],
)
def test_a_cut_that_cannot_be(cut: object, layers: int, stages: int, says: str) -> None:
    with pytest.raises(LayoutError, match=says) as caught:
        choose_cut(cut, layers, stages)  # type: ignore[arg-type]
    assert caught.value.hint


def test_by_hand_a_stage_may_hold_no_layer() -> None:
    assert choose_cut((0, 8), 8, 2) == (0, 8)
    assert list(stage_layers((3, 0, 5), 1)) == []
    assert list(stage_layers((3, 0, 5), 2)) == [3, 4, 5, 6, 7]


def test_equal_layers_are_cut_as_any_layers_are() -> None:
    """The short way for equal layers finds what the search over all cuts finds."""
    for layers, stages, after in itertools.product((2, 5, 12, 23), (2, 3, 5), (0.0, 1.5, 7.0)):
        if stages <= layers:
            nearly = [3.0] * (layers - 1) + [3.0 * (1 + 1e-12)]
            found = choose_cut(
                "balanced", layers, stages, layer_costs=[3.0] * layers, after_cost=after
            )
            assert found == choose_cut(
                "balanced", layers, stages, layer_costs=nearly, after_cost=after
            )
