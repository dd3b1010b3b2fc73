"""What is computed again or kept elsewhere is the same to the last bit; and holds as much less as
was said."""

from __future__ import annotations

from typing import Any

import pytest

from hocket.spec.errors import HocketError
from tests.ranks import RankPool

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(240)]

MODES: list[dict[str, Any]] = [
    {},
    {"recompute": "selective"},
    {"recompute": "full", "recompute_layers": 1},
    {"recompute": "full"},
    {"recompute": "norm+activation"},
]
LLAMA = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 64,
    "n_embd": 64,
    "n_layer": 4,
    "n_head": 4,
    "n_positions": 64,
}
BLOOM = {"model_type": "bloom", "vocab_size": 64, "hidden_size": 64, "n_layer": 2, "n_head": 4}


def run(ranks: RankPool, world_size: int, **options: Any) -> list[list[dict[str, Any]]]:
    return ranks.run("tests.training.recompute_cases:modes", world_size, timeout=120.0, **options)


@pytest.mark.parametrize(
    ("layout", "size", "options"),
    [
        ("tp2", 2, {"config": GPT2, "dropout": 0.2}),
        ("tp2", 2, {"config": GPT2, "dropout": 0.2, "attention": "eager"}),
        ("tp2:microbatches=2", 2, {"config": LLAMA, "dtype": "bf16"}),
        ("tp2:sequence_parallel=true", 2, {"config": GPT2, "dropout": 0.2}),
        ("dp2.pp2:microbatches=2,zero=2,schedule=zero-bubble", 4, {"config": GPT2, "dropout": 0.2}),
    ],
)
def test_no_bit_is_changed(
    ranks: RankPool, layout: str, size: int, options: dict[str, Any]
) -> None:
    """Dropout draws the same numbers again, also where tensor ranks draw their own."""
    modes = [
        *MODES,
        {"moved": True},
        {"moved": True, "recompute": "selective"},
        {"moved": True, "recompute": "core_attn+norm+activation"},
    ]
    for plain, *others in run(ranks, size, layout=layout, modes=modes, **options):
        assert len(others) == 7
        *_, moved, fewer, least = (other["moved"] for other in others)
        assert moved > fewer > least > 0
        for other in others:
            assert other["losses"] == plain["losses"]
            assert other["gradients"] == plain["gradients"]


@pytest.mark.parametrize(
    ("layout", "size", "attention"),
    [
        ("dp1", 1, "sdpa"),
        ("dp1", 1, "eager"),
        ("pp2:microbatches=4", 2, "sdpa"),
    ],
)
def test_less_is_held_and_predicted(
    ranks: RankPool, layout: str, size: int, attention: str
) -> None:
    found = run(ranks, size, layout=layout, modes=MODES, config=LLAMA, attention=attention)
    for rank, rows in enumerate(found):
        for row in rows:
            measured, predicted = row["bytes"], row["predicted"]
            assert measured["total"] == pytest.approx(predicted["total"], rel=0.05), rank
            assert measured["activations"] == pytest.approx(predicted["activations"], rel=0.05)
    none, selective, one, full, modules = (row["bytes"]["activations"] for row in found[0])
    assert full < one < none
    assert full < selective < none
    assert full < modules < 0.75 * none


def test_a_core_that_cannot_be_distinguished_is_refused(ranks: RankPool) -> None:
    with pytest.raises(HocketError, match="attention") as caught:
        run(ranks, 1, layout="dp1", modes=[{"recompute": "selective"}], config=BLOOM)
    assert caught.value.hint == "recompute=full"
