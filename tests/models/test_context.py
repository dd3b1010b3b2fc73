"""Families whose attention transformers' interface does not reach are rejected before they run."""

import importlib
import inspect

import pytest

from hocket.models import registry
from hocket.models.dimensions import dimensions
from hocket.models.samples import sample_config
from hocket.spec.errors import ModelError
from tests.families import FAMILIES, HYBRIDS
from tests.rotation import part

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
    assert caught.value.hint == "--layout cp1"


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


def _hands_on_inputs() -> list[str]:
    """Types whose modules call the convolution that is split over context ranks."""
    found = []
    for kind in registry.causal_classes():
        module = registry.modeling_module(kind)
        if module and "causal_conv1d_fn" in inspect.getsource(importlib.import_module(module)):
            found.append(kind)
    return found


def test_configurations_name_what_convolutions_read() -> None:
    """The rule that chunks are long enough is asked of a configuration, before there is a model."""
    from hocket.models.context_scans import state_sizes
    from hocket.models.proxy import proxy_of
    from hocket.models.skeleton import build_skeleton, config_of

    kinds = _hands_on_inputs()
    assert {"bamba", "qwen3_next", "lfm2", "mamba2", "bailing_hybrid"} <= {*kinds}
    samples = {kind: HYBRIDS.get(kind) or sample_config(kind) for kind in kinds}
    of_text = {kind: config for kind, config in samples.items() if "text_config" not in config}
    configs = [of_text[kind] for kind in part(sorted(of_text), 6)]
    for config in configs:
        proxy = proxy_of(config_of(config, dropout=0.0)).config
        sizes = state_sizes(build_skeleton(proxy), proxy.hidden_size)
        width = max((each.width for each in sizes.values()), default=0)
        if width:  # else its convolution is not split, and cp is rejected for that
            assert dimensions(config).handed_width == width, config["model_type"]
            assert dimensions(proxy.to_dict()).handed_width == width, config["model_type"]


@pytest.mark.parametrize("kinds", [["attention"] * 4, ["full_attention", "sliding_attention"] * 2])
def test_layers_that_hold_no_convolution(kinds: list[str]) -> None:
    config = {**HYBRIDS["granitemoehybrid"], "layer_types": kinds}
    assert dimensions(config).handed_width == 0


@pytest.mark.timeout(200)
@pytest.mark.parametrize("family", HYBRIDS)
def test_packed_documents_pass_through_states(family: str) -> None:
    """Rejected before ranks start, at every layout: cp need not cut them."""
    from hocket.models.skeleton import config_of
    from hocket.ranks.proxy.packed import try_packed

    assert "logits" in try_packed(config_of(HYBRIDS[family], dropout=0.0), "sdpa")
