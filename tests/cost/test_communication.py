"""The theory of communication, against sums done by hand."""

from __future__ import annotations

import pytest

from hocket.cost.communication import communication, differences
from hocket.cost.communication_table import Step, bucket_bytes
from hocket.cost.stage_communication import StageShare
from hocket.spec.layout import Layout
from tests.support.shares import layers_share

S, B, H, M = 128, 2, 256, 4
STEP = Step(seq_len=S, microbatch_size=B, num_microbatches=M, hidden_size=H)
HIDDEN = B * S * H * 4


def rows(found: list[dict[str, object]]) -> dict[tuple[object, ...], tuple[object, object]]:
    return {(r["name"], r["axis"], r["phase"]): (r["count"], r["bytes"]) for r in found}


def test_one_process_does_not_communicate() -> None:
    share = layers_share(4, embedding=True, head=True, gradient_bytes=(100,))
    assert communication(Layout(), 0, STEP, [share]) == []


def test_tensor_parallel_costs_two_and_two_a_layer() -> None:
    share = layers_share(4, embedding=True, head=True, gradient_bytes=(100,))
    found = rows(communication(Layout(tp=2), 1, STEP, [share]))
    assert found == {
        # 2 forward + 2 backward for each of 4 layers, the embedding's, the head's.
        ("all-reduce", "tp", "microbatch"): (M * 18, M * 18 * HIDDEN),
        ("all-gather", "tp", "microbatch"): (M, M * 2 * 2 * B * S * 4),
        ("all-reduce", "world", "step"): (1, 4),
        ("all-reduce", "model", "step"): (1, 4),
    }


def test_a_middle_stage_talks_to_both_neighbours() -> None:
    layout = Layout(pp=3)
    for rank, neighbours in ((0, 1), (1, 2), (2, 1)):
        share = layers_share(2, stage=rank)
        found = rows(communication(layout, rank, STEP, [share]))
        count = neighbours * M
        assert found["send", "pp", "microbatch"] == (count, count * HIDDEN)
        assert found["receive", "pp", "microbatch"] == (count, count * HIDDEN)


def test_stages_of_one_rank_hand_over_directly() -> None:
    # A V: stages 0 and 3 on rank 0, 1 and 2 on rank 1.
    shares = {0: (0, 3), 1: (1, 2)}
    for rank, stages in shares.items():
        held = [layers_share(1, stage=s, tied_bytes=(64,)) for s in stages]
        layout = Layout(pp=2, virtual_stages=2)
        found = rows(communication(layout, rank, STEP, held, (0, 1, 1, 0)))
        assert found["send", "pp", "microbatch"] == (2 * M, 2 * M * HIDDEN)
        # First and last stage lie on one rank: no message for what they tie.
        assert ("all-reduce", "embedding", "step") not in found


def test_ties_are_summed_between_the_ends_only() -> None:
    layout = Layout(pp=3)
    for rank in range(3):
        tied = (640,) if rank != 1 else ()
        share = layers_share(1, stage=rank, tied_bytes=tied)
        found = rows(communication(layout, rank, STEP, [share]))
        assert found.get(("all-reduce", "embedding", "step")) == ((1, 640) if tied else None)


def test_gradients_travel_once_a_step_whatever_the_microbatches() -> None:
    share = layers_share(1, gradient_bytes=(600_000, 300_000, 500_000, 24_700_000))
    found = rows(communication(Layout(dp=4), 2, STEP, [share]))
    # Besides the gradients, in 2 buckets: the 8 bytes that count the valid tokens.
    assert found == {
        ("all-reduce", "dp", "step"): (3, 26_100_000 + 8),
        ("all-reduce", "world", "step"): (1, 4),
    }


@pytest.mark.parametrize(
    ("gradients", "capacity", "filled"),
    [
        ((), 10e6, []),
        ((1, 2, 3), 10e6, [6]),
        # The first bucket takes 1 MB at most, the others their capacity.
        ((4_000_000, 6_000_000, 400_000, 600_000), 10e6, [1_000_000, 10_000_000]),
        ((4_000_000, 6_000_001, 400_000, 600_000), 10e6, [1_000_000, 6_000_001, 4_000_000]),
        # A parameter larger than a bucket has one of its own.
        ((1, 50_000_000, 2), 10e6, [2, 50_000_000, 1]),
        ((30, 30, 30), 50, [30, 30, 30]),
    ],
)
def test_buckets_fill_from_the_last(
    gradients: tuple[int, ...], capacity: float, filled: list[int]
) -> None:
    assert bucket_bytes(gradients, capacity) == filled
    assert sum(filled) == sum(gradients)


def test_routing_weights_ride_along() -> None:
    share = StageShare(forward_sums=2, backward_sums=2, expert_weights=2)
    found = rows(communication(Layout(tp=2), 0, STEP, [share]))
    count, nbytes = found["all-reduce", "tp", "microbatch"]
    assert count == 4 * M
    assert nbytes == M * (4 * HIDDEN + 2 * B * S * 4)


def test_differences_name_what_is_missing_and_what_is_too_much() -> None:
    def row(name: str, phase: str, count: int) -> dict[str, object]:
        return {"name": name, "axis": "tp", "phase": phase, "count": count, "bytes": 8}

    recorded = [row("all-reduce", "microbatch", 2), row("send", "step", 1), row("send", "other", 9)]
    expected = [row("all-reduce", "microbatch", 2), row("broadcast", "step", 1)]
    found = {
        r["name"]: (r["count"], r["expected_count"], r["equal"])
        for r in differences(recorded, expected)
    }
    assert found == {
        "all-reduce": (2, 2, True),
        "broadcast": (0, 1, False),
        "send": (1, 0, False),
    }
