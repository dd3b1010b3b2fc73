"""The language model inside a multimodal checkpoint is loaded as what transformers computes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hocket.models import text_part
from hocket.models.source import resolve_model
from hocket.spec.errors import ModelError

pytestmark = pytest.mark.torch

TEXT = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "intermediate_size": 64, "vocab_size": 96,
}  # fmt: skip
VISION = {
    "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64,
    "image_size": 28, "patch_size": 14,
}  # fmt: skip
QWEN_VISION = {
    "hidden_size": 32, "embed_dim": 32, "intermediate_size": 64, "depth": 1, "num_heads": 2,
    "out_hidden_size": 32, "deepstack_visual_indexes": [0], "fullatt_block_indexes": [0],
}  # fmt: skip
PARTS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}


def made(kind: str) -> Any:
    """A random multimodal model of one kind."""
    import torch
    import transformers as t

    torch.manual_seed(0)
    if kind == "gemma3":
        return t.Gemma3ForConditionalGeneration(
            t.Gemma3Config(text_config=TEXT, vision_config=VISION, mm_tokens_per_image=4)
        )
    if kind == "llama4":
        text = {**TEXT, "intermediate_size_mlp": 64, "num_local_experts": 2}
        vision = {
            **VISION, "vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32
        }  # fmt: skip
        return t.Llama4ForConditionalGeneration(
            t.Llama4Config(text_config=text, vision_config=vision)
        )
    if kind == "mistral3":
        return t.Mistral3ForConditionalGeneration(
            t.Mistral3Config(
                text_config={**TEXT, "model_type": "mistral"},
                vision_config={**VISION, "model_type": "pixtral", "head_dim": 16},
            )
        )
    if kind == "qwen2_5_vl":
        text = {**TEXT, "rope_parameters": PARTS}
        return t.Qwen2_5_VLForConditionalGeneration(
            t.Qwen2_5_VLConfig(text_config=text, vision_config=QWEN_VISION)
        )
    text = {**TEXT, "rope_parameters": {**PARTS, "mrope_interleaved": True}}
    return t.Qwen3VLForConditionalGeneration(
        t.Qwen3VLConfig(text_config=text, vision_config=QWEN_VISION)
    )


@pytest.mark.parametrize("kind", ["gemma3", "llama4", "mistral3", "qwen2_5_vl", "qwen3_vl"])
def test_logits_are_those_of_the_multimodal_model(kind: str, tmp_path: Path) -> None:
    import torch

    from hocket.models.skeleton import build_skeleton
    from hocket.models.weights import Weights
    from hocket.spec.placement import Placement

    whole = made(kind).eval()
    whole.save_pretrained(tmp_path)
    source = resolve_model(tmp_path)
    assert source.weights == tmp_path
    skeleton = build_skeleton(source.config)
    alone = build_skeleton(source.config)
    placements = {
        name: Placement.whole(name, tuple(parameter.shape))
        for name, parameter in alone.named_parameters()
    }
    Weights(alone, placements, skeleton, source).fill()
    ids = torch.arange(1, 20)[None]
    with torch.no_grad():
        ours, theirs = alone.eval()(input_ids=ids).logits, whole(input_ids=ids).logits
    assert torch.allclose(ours, theirs, atol=2e-5), (ours - theirs).abs().max()
    assert "%" in text_part.left_out(tmp_path)


def test_a_missing_tensor_of_the_language_model_is_an_error(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    from hocket.models.skeleton import build_skeleton
    from hocket.models.weight_files import WeightFiles
    from hocket.spec.errors import WeightsError

    made("gemma3").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["language_model.model.norm.weight"]
    save_file(tensors, file, {"format": "pt"})
    skeleton = build_skeleton(resolve_model(tmp_path).config)
    with pytest.raises(WeightsError, match=r"missing model\.norm\.weight"):
        WeightFiles(tmp_path, skeleton)


def test_a_type_without_a_language_model_of_its_own_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "blip", "text_config": {"model_type": "blip_text_model"}})
    )
    with pytest.raises(ModelError, match="not a text-only"):
        resolve_model(tmp_path)


INSIDE = {
    "dots3_note": "dots3_note_text", "gemma3": "gemma3_text", "gemma3n": "gemma3n_text",
    "gemma4": "gemma4_text", "gemma4_unified": "gemma4_unified_text", "got_ocr2": "qwen2",
    "llama4": "llama4_text", "moss_transcribe_diarize": "qwen3", "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text", "qwen4_exp": "qwen4_exp_text",
}  # fmt: skip
"""Multimodal types with a causal class, and the type of the language model inside."""


@pytest.mark.parametrize("kind", INSIDE)
def test_samples_hold_the_type_that_transformers_builds(kind: str, tmp_path: Path) -> None:
    """The matrices try the language model inside, in both configurations."""
    import transformers

    from hocket.models.samples import sample_config, switches

    own = transformers.CONFIG_MAPPING[kind]()
    assert own.get_text_config().model_type == INSIDE[kind]
    file = tmp_path / "config.json"
    file.write_text(json.dumps(sample_config(kind)))
    found = resolve_model(file)
    assert found.config["model_type"] == INSIDE[kind]
    assert found.dimensions.num_layers > 1
    assert switches(kind) == switches(INSIDE[kind])


def test_no_multimodal_sample_is_without_its_language_model() -> None:
    from hocket.models import registry
    from hocket.models.samples import sample_config

    missing = [
        kind
        for kind, architecture in registry.causal_classes().items()
        if architecture.endswith("ForConditionalGeneration")
        and "text_config" in registry.defaults(kind).values
        and "text_config" not in sample_config(kind)
    ]
    assert missing == []
