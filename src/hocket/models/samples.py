"""A tiny model of every causal language model type: its class defaults, shrunk.

The defaults of a configuration class are those of a model that exists, so what the sample keeps
(layer types, ties, biases, grouping of heads) is what people train. Where the defaults leave open
what only a checkpoint says, `SAID` says it, with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hocket.models import registry
from hocket.models.text_part import text_config

_DECODER = {"is_decoder": True}

SAID: Mapping[str, Mapping[str, Any]] = {
    # Sizes that must divide each other and do not by default.
    "deepseek_v2": {
        "num_experts_per_tok": 6, "n_group": 8, "topk_group": 3, "moe_intermediate_size": 1536,
    },
    "dots1": {"n_routed_experts": 128, "num_experts_per_tok": 6, "n_shared_experts": 2},
    "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 16, "moe_topk": 1},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8, "head_dim": 128},
    "hunyuan_v1_dense": {"head_dim": 128},
    "bailing_hybrid": {"n_group": 1, "topk_group": 1},
    # One kind of rotary embedding for each kind of attention.
    "cohere_compass_text": {
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0}},
    # The indexer of its sparse attention, without which it cannot be built.
    "qwen4_exp_text": {
        "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 256,
        "indexer_budget": 2048, "indexer_compress_ratio": 4,
    },
    # A list of layers that the class computes, and that says how many there are.
    "nemotron_h": {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"]},
    # Sparse attention needs longer sequences than a tiny model is shown.
    "big_bird": {"attention_type": "original_full"},
    "bigbird_pegasus": {"attention_type": "original_full"},
    # Positions whose two factors add up to a hidden size that is not the default one.
    "reformer": {"axial_pos_embds": False},
    # Kernels in bf16, whose rounding is no measure of what a layout changes.
    "xlstm": {"autocast_kernel_dtype": "float32"},
    # Attention both ways, and a language that only a call names.
    "xlm": {"causal": True},
    "xlnet": {"attn_type": "uni"},
    "xmod": {"default_language": "en_XX"},
}  # fmt: skip
"""Model type to what its configuration class leaves open."""


_INSIDE = {"got_ocr2": "qwen2", "moss_transcribe_diarize": "qwen3"}
"""Multimodal type to the type inside, as its class builds it where its name does not say."""


_NOT_SWITCHES = (
    "use_cache", "is_decoder", "is_encoder_decoder", "add_cross_attention", "output_", "return_",
    "tie_encoder_decoder", "torchscript", "gradient_checkpointing", "router_aux", "init_", "do_",
    "early_stopping", "remove_invalid", "use_mambapy", "use_kernel", "use_mem", "reset_params",
    "untie_r", "bi_data", "causal", "add_router_probs", "calc_", "use_bidirectional",
    "rescale_prenorm",  # transformers 5.23 then divides the weights of Mamba 2 as it reads a file
)  # fmt: skip
"""Beginnings of boolean names that choose outputs, training, how weights begin or another kind of
model."""


_ON: Mapping[str, Any] = {"output_router_logits": True, "z_loss_coefficient": 0.1}
"""Optional parts of the loss, to the value that includes them."""


def switches(kind: str) -> dict[str, Any]:
    """The optional switches of a type's configuration, each with the opposite of its default:
    biases, norms of queries and keys, ties, parallel residuals, losses of routers ..."""
    kind = _inside(kind) or kind
    named, known = sample_config(kind), registry.defaults(kind).values
    return {
        name: not value
        for name, value in known.items()
        if isinstance(value, bool) and name not in named and not name.startswith(_NOT_SWITCHES)
    } | {name: value for name, value in _ON.items() if name in known and known[name] != value}


def sample_config(kind: str) -> dict[str, Any]:
    """The configuration, as of a checkpoint's config.json, whose proxy model represents a type.

    A type that attends both ways by default is made a decoder, which is what makes a causal
    language model of it. A multimodal type has the sample of the language model inside.
    """
    if (inner := _inside(kind)) is not None:
        return {"model_type": kind, "text_config": sample_config(inner)}
    config: dict[str, Any] = {"model_type": kind, **SAID.get(kind, {})}
    if registry.defaults(kind).values.get("is_decoder") is False:
        config |= _DECODER
    return config


def _inside(kind: str) -> str | None:
    """The type of the language model inside a multimodal one; None where none is known."""
    if "text_config" not in registry.defaults(kind).values:
        return None
    inner = _INSIDE.get(kind, f"{kind}_text")
    outer = {"model_type": kind, "text_config": {"model_type": inner}}
    return inner if text_config(outer) is not None else None
