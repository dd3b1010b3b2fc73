"""Copies of experts: where they are placed, which tokens they get, and that the sum is the same."""

from __future__ import annotations

import random

import pytest

torch = pytest.importorskip("torch")

from hocket.runtime.expert_parallel.copies import ExpertCopies  # noqa: E402
from hocket.spec.expert_copies import (  # noqa: E402
    copied_imbalance,
    first_copies,
    most_rows,
    place_copies,
)


def most(experts: list[int], load: list[float], ranks: int) -> float:
    """Rows of the rank with most over the mean."""
    return most_rows(experts, load, ranks) / (sum(load) / ranks)


@pytest.mark.parametrize("seed", range(40))
def test_every_expert_has_a_slot_and_none_two_on_a_rank(seed: int) -> None:
    draw = random.Random(seed)
    ranks = draw.choice([2, 4, 8])
    experts = ranks * draw.randint(1, 6)
    extra = ranks * draw.randint(0, min(3, experts - experts // ranks))
    slots = (experts + extra) // ranks
    previous = [(r * experts // ranks + i) % experts for r in range(ranks) for i in range(slots)]
    for _ in range(3):
        load = [draw.expovariate(1) ** 3 for _ in range(experts)]
        placed = place_copies(load, ranks, previous)
        assert len(placed) == len(previous)
        assert set(placed) == set(range(experts))
        for r in range(ranks):
            mine, before = (every[r * slots : (r + 1) * slots] for every in (placed, previous))
            assert len(set(mine)) == slots
            stays = set(mine) & set(before)
            assert all(mine[i] == e for i, e in enumerate(before) if e in stays)
        previous = placed


def test_the_experts_with_most_tokens_get_the_copies() -> None:
    load = [60.0, 1, 1, 1, 20, 1, 1, 1]
    assert most_rows([0, 1, 1, 2], [8.0, 6, 2], 2) == 11  # half of 6 is each copy's
    without = place_copies(load, 4, list(range(8)))
    placed = place_copies(load, 4, [0, 1, 2, 2, 3, 4, 4, 5, 6, 6, 7, 0])
    assert placed.count(0) == 4
    assert most(without, load, 4) > 2.7  # the fullest rank has at least the largest expert
    assert most(placed, load, 4) < 1.7
    even = place_copies([5.0] * 8, 4, list(range(8)))
    assert even == list(range(8))  # nothing moves


@pytest.mark.parametrize(("ranks", "experts", "redundant"), [(2, 8, 2), (8, 64, 8), (16, 64, 16)])
@pytest.mark.parametrize("deviation", [0.0, 0.3, 0.6])
def test_a_plan_assumes_what_copies_do_to_the_rows_of_a_router(
    ranks: int, experts: int, redundant: int, deviation: float
) -> None:
    """Top-2 routers with biases of that deviation, whose rows are placed as a server does."""
    draws = torch.Generator().manual_seed(1)
    plain = placed = mean = 0.0
    for _ in range(8):
        logits = torch.randn(4000, experts, generator=draws)
        logits += deviation * torch.randn(experts, generator=draws)
        chosen = logits.topk(2).indices.flatten()
        load = torch.bincount(chosen, minlength=experts).tolist()
        plain += most_rows(first_copies(experts, 0, ranks), load, ranks)
        before = first_copies(experts, redundant, ranks)
        placed += most_rows(place_copies(load, ranks, before), load, ranks)
        mean += sum(load) / ranks
    assumed = copied_imbalance(experts, ranks, redundant, plain / mean)
    assert assumed == pytest.approx(placed / mean, abs=0.05)
    assert assumed <= plain / mean
    assert copied_imbalance(experts, ranks, 0, plain / mean) == plain / mean


def test_tokens_of_an_expert_take_its_copies_in_turn() -> None:
    copies = ExpertCopies.of([0, 1, 1, 2, 3, 1], 4, 3)
    index = torch.tensor([[1, 0], [1, 2], [3, 1], [1, 0], [1, 2], [2, 1]])
    chosen = copies.chosen(index, 0)
    owner = torch.tensor([0, 1, 1, 2, 3, 1])
    assert torch.equal(owner[chosen], index)
    assert torch.bincount(chosen[index == 1]).tolist() == [0, 2, 2, 0, 0, 2]
    place = copies.slots.data_ptr()
    copies.place([2, 1, 0, 3, 1, 2])
    assert copies.slots.data_ptr() == place  # a CUDA graph reads it there
    owner = torch.tensor([2, 1, 0, 3, 1, 2])
    assert torch.equal(owner[copies.chosen(index, 1)], index)


@pytest.mark.ranks
@pytest.mark.parametrize("way", ["dispatched", "gathered"])
@pytest.mark.parametrize(
    ("layout", "family"),
    [
        ("dp2.ep2", "mixtral"),
        ("dp2.ep2", "gpt_oss"),
        ("dp4.ep4", "deepseek_v3"),
        ("tp2.ep2.etp1", "mixtral"),
        ("dp2.tp2.ep4.etp1", "granitemoe"),
    ],
)
def test_what_experts_make_is_the_same_wherever_their_copies_are(
    ranks, layout: str, family: str, way: str
) -> None:
    size = 4 if "4" in layout else 2
    found = ranks.run(
        "tests.runtime.expert_cases:copied", size, layout=layout, family=family, way=way
    )
    for row in found:
        assert max(row["gaps"]) < 2e-6
        assert row["held"]
        assert row["experts"] == found[0]["experts"]
        assert row["imbalance"] == found[0]["imbalance"]
    before, after = found[0]["imbalance"][0]
    assert before == (2.0 if family == "granitemoe" else size)  # one rank, or two, had all of them
    assert after == 1.0
    assert found[0]["imbalance"][1][0] < 1.4  # its copies take turns, which do not divide evenly
