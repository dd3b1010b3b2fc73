"""Sequence parallelism in training: what it holds, what was predicted, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from hocket.spec.errors import HocketError
from tests.ranks import RankPool
from tests.training.test_recompute import GPT2, LLAMA, run

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(240)]

MODES: list[dict[str, Any]] = [
    {},
    {"sequence_parallel": True},
    {"sequence_parallel": True, "recompute": "full"},
]


@pytest.mark.parametrize(
    ("layout", "size", "config"),
    [
        ("tp2", 2, {**LLAMA, "vocab_size": 2048}),
        ("pp2.tp2:microbatches=2,schedule=zero-bubble", 4, GPT2),
    ],
)
def test_less_is_held_as_was_predicted(
    ranks: RankPool, layout: str, size: int, config: dict[str, Any]
) -> None:
    found = run(ranks, size, layout=layout, modes=MODES, config=config)
    for rank, rows in enumerate(found):
        for row in rows:
            measured, predicted = row["bytes"], row["predicted"]
            assert measured["total"] == pytest.approx(predicted["total"], rel=0.05), rank
            assert measured["activations"] == pytest.approx(predicted["activations"], rel=0.05)
        whole, slices, again = (row["bytes"]["activations"] for row in rows)
        # Few tokens and many words: a copy of the logits would be more than is saved.
        assert slices < 0.93 * whole
        assert again < slices
    whole, slices, again = (row["losses"] for row in found[0])
    assert slices == pytest.approx(whole, rel=1e-5)
    assert again == slices


def test_a_sequence_that_does_not_divide_is_refused(ranks: RankPool) -> None:
    modes = [{"sequence_parallel": True}]
    with pytest.raises(HocketError, match="sequences of 64 tokens do not divide over tp 3"):
        run(ranks, 3, layout="tp3", modes=modes, config={**GPT2, "n_embd": 48, "n_head": 3})
