"""Families: tiny configurations of a dozen model families, with what makes each one difficult.

GPU checks and tests share them.
"""

from __future__ import annotations

from typing import Any

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64,
    "max_position_embeddings": 128, "tie_word_embeddings": False,
}  # fmt: skip

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "llama_tied": {**LLAMA, "tie_word_embeddings": True, "attention_bias": True},
    "qwen3": {**LLAMA, "model_type": "qwen3", "head_dim": 16},
    "mistral": {**LLAMA, "model_type": "mistral", "sliding_window": 8},
    "gpt2": {
        "model_type": "gpt2", "n_embd": 32, "n_layer": 4, "n_head": 4, "vocab_size": 64,
        "n_positions": 128,
    },
    "gpt_neox": {
        "model_type": "gpt_neox", "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 64,
        "max_position_embeddings": 128,
    },
    "opt": {
        "model_type": "opt", "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 4,
        "num_attention_heads": 4, "vocab_size": 64, "max_position_embeddings": 128,
        "word_embed_proj_dim": 32,
    },
    "bloom": {
        "model_type": "bloom", "hidden_size": 32, "n_layer": 4, "n_head": 4, "vocab_size": 64,
    },
    "gemma3": {
        **LLAMA, "model_type": "gemma3_text", "head_dim": 8, "sliding_window": 8,
        "tie_word_embeddings": True,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "phi3": {**LLAMA, "model_type": "phi3", "pad_token_id": 0},
    "mixtral": {**LLAMA, "model_type": "mixtral", "num_local_experts": 4},
}  # fmt: skip
"""Name to Hugging Face configuration."""

SERVED: dict[str, dict[str, Any]] = {
    **FAMILIES,
    # A norm over all heads: split over ranks, queries and keys are gathered along the last
    # dimension, and reach attention with other strides than any other family's.
    "olmo2": {**LLAMA, "model_type": "olmo2", "pad_token_id": 0},
    "olmoe": {
        **LLAMA, "model_type": "olmoe", "num_experts": 4, "num_experts_per_tok": 2,
        "pad_token_id": 0,
    },
}  # fmt: skip
"""The families that serving must compute, from pages and split over ranks."""

_SMALL: dict[str, Any] = {
    **LLAMA, "head_dim": 16, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2,
}  # fmt: skip
del _SMALL["tie_word_embeddings"]
_MIXED = ["sliding_attention", "full_attention"] * 2
FLEXIBLE: dict[str, dict[str, Any]] = {
    "gemma2": {
        **_SMALL, "model_type": "gemma2", "sliding_window": 5, "layer_types": _MIXED,
        "attn_logit_softcapping": 1.5, "query_pre_attn_scalar": 16,
    },
    "gpt_oss": {
        **_SMALL, "model_type": "gpt_oss", "sliding_window": 5, "layer_types": _MIXED,
        "num_local_experts": 4, "num_experts_per_tok": 2,
    },
    "deepseek_v3": {  # keys of 24, values of 16
        **{k: v for k, v in _SMALL.items() if k != "head_dim"}, "model_type": "deepseek_v3",
        "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8, "v_head_dim": 16, "first_k_dense_replace": 4,
    },
}  # fmt: skip
"""Families with soft caps, sinks and unequal head sizes, whose training takes flex attention."""

BASE: dict[str, Any] = {**LLAMA, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
"""The Llama of checks that are not about a family."""


def whole_model(family: str, spread: float = 0.6) -> Any:
    """The whole model with random weights on the CPU, in evaluation mode.

    Weights are spread wider than training would start from, so that logits differ clearly, norms
    are not at one and biases not at zero: a norm left out or a bias added twice shows. `spread` is
    the standard deviation of what is added in layers.
    """
    return spread_model(SERVED[family], spread)


def spread_model(config: dict[str, Any], spread: float) -> Any:
    """As `whole_model`, of a configuration."""
    import torch

    from hocket.models.skeleton import build_skeleton

    model: Any = build_skeleton(config, device="cpu", dropout=0.0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model.initialize_weights()
        model.tie_weights()
        with torch.no_grad():
            # Layers that outweigh the embedding: a tied head would only repeat the last token.
            for name, parameter in model.named_parameters():
                own = spread if ".layers." in name or ".h." in name else 0.05
                parameter.add_(torch.randn_like(parameter), alpha=own)
    return model.eval()
