"""Families whose attention transformers' interface does not reach are rejected before they run."""

import pytest

from hocket.spec.errors import ModelError
from tests.families import FAMILIES

pytestmark = pytest.mark.torch

SMALL = {"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}
OWN = {
    "bloom": FAMILIES["bloom"],
    "falcon": {**SMALL, "model_type": "falcon"},
    "gptj": {
        "model_type": "gptj", "vocab_size": 64, "n_embd": 32, "n_head": 4, "n_layer": 2,
        "rotary_dim": 8,
    },
}  # fmt: skip


@pytest.mark.parametrize("family", OWN)
def test_attention_in_code_of_its_own(family: str) -> None:
    from hocket.models.plans import plan_for
    from hocket.models.skeleton import build_skeleton
    from hocket.training.build import over_context_ranks

    model = build_skeleton(OWN[family])
    with pytest.raises(ModelError, match="attention in code of its own") as caught:
        over_context_ranks(model, plan_for(model))
    assert caught.value.hint == "cp1"


def test_positions_that_cannot_be_given() -> None:
    from hocket.models.skeleton import build_skeleton
    from hocket.training.build import over_context_ranks

    config = {
        "model_type": "bart", "vocab_size": 64, "d_model": 32, "decoder_layers": 2,
        "decoder_attention_heads": 4, "is_decoder": True, "is_encoder_decoder": False,
    }  # fmt: skip
    with pytest.raises(ModelError, match="takes no position_ids"):
        over_context_ranks(build_skeleton(config))


def test_attention_by_the_interface() -> None:
    from hocket.models.plans import plan_for
    from hocket.models.skeleton import build_skeleton
    from hocket.training.build import over_context_ranks

    model = build_skeleton(FAMILIES["llama"])
    over_context_ranks(model, plan_for(model))
