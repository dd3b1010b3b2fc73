"""What each stage of ZeRO holds: counted, predicted, and by kind what it should be."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.ranks import RankPool

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(200)]

# Much weight and few tokens: the parameters outweigh the activations.
HIDDEN, INNER, LAYERS, VOCABULARY = 64, 256, 8, 64
LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": VOCABULARY, "hidden_size": HIDDEN,
    "intermediate_size": INNER, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "num_key_value_heads": 4, "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip
LAYER = 4 * HIDDEN * HIDDEN + 3 * HIDDEN * INNER + 2 * HIDDEN
ENDS = 2 * VOCABULARY * HIDDEN + HIDDEN
WHOLE = 4 * (LAYERS * LAYER + ENDS)
"""Bytes of all parameters, in fp32; gradients have as many."""


@pytest.mark.parametrize("layout", ["dp2:zero=1", "dp2:zero=1,microbatches=2"])
def test_each_stage_holds_less(ranks: RankPool, layout: str) -> None:
    modes = [{"zero": 1}, {"zero": 2}, {"zero": 3}, {"zero": 3, "recompute": "full"}]
    for one, two, three, again in ranks.run(
        "tests.training.recompute_cases:modes", 2, config=LLAMA, layout=layout, modes=modes
    ):
        # ZeRO-1 sums microbatches first, then ranks: other bits where there are several.
        for found in (three, again) if "microbatches" in layout else (one, three, again):
            assert found["losses"] == two["losses"]
            assert found["gradients"] == two["gradients"]
        for found in (one, two, three, again):
            counted, predicted = found["bytes"], found["predicted"]
            assert predicted["total"] == pytest.approx(counted["total"], rel=0.05)
            assert counted["optimizer"] == pytest.approx(WHOLE, rel=0.01)  # a half of two moments
        assert one["bytes"]["parameters"] == two["bytes"]["parameters"] == WHOLE
        assert three["bytes"]["parameters"] == WHOLE / 2
        # Nothing keeps a gathered layer alive: beside what ZeRO-2 holds too, at most two of the
        # eight are whole at a time, and what is no layer.
        assert three["bytes"]["activations"] <= two["bytes"]["activations"] + 4 * (2 * LAYER + ENDS)
        totals = [found["bytes"]["total"] for found in (one, two, three, again)]
        assert totals == sorted(totals, reverse=True)
        assert totals[1] > totals[2] > totals[3]
        assert (totals[0] > totals[1]) == ("microbatches" in layout)


def test_what_is_offloaded_is_computed_the_same(ranks: RankPool) -> None:
    """On a CPU the host's memory is the device's: the same way, to the last bit."""
    plain = [{"zero": 1}, {"zero": 3}]
    moved = [{"zero": 1, "offload": "optimizer"}, {"zero": 3, "offload": "params"}]
    for found in ranks.run(
        "tests.training.recompute_cases:modes",
        2, config=LLAMA, layout="dp2:zero=1", modes=[*plain, *moved],
    ):  # fmt: skip
        for one, other in zip(found[:2], found[2:], strict=True):
            assert other["losses"] == one["losses"]
            assert other["gradients"] == one["gradients"]
            assert other["predicted"]["total"] == pytest.approx(other["bytes"]["total"], rel=0.05)
        # Beside the moments, a master of this rank's half of all parameters.
        masters = found[2]["bytes"]["optimizer"] - found[0]["bytes"]["optimizer"]
        assert masters == WHOLE / 2
        assert found[3]["bytes"]["optimizer"] == found[1]["bytes"]["optimizer"]


def test_a_tied_weight_is_predicted_once(ranks: RankPool) -> None:
    for (found,) in ranks.run(
        "tests.training.recompute_cases:modes", 2,
        config=LLAMA | {"tie_word_embeddings": True, "vocab_size": 4096}, layout="dp2:zero=2",
        modes=[{}],
    ):  # fmt: skip
        counted, predicted = found["bytes"], found["predicted"]
        assert predicted["parameters"] == counted["parameters"]
        assert predicted["total"] == pytest.approx(counted["total"], rel=0.05)
