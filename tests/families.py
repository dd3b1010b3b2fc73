"""Tiny models of every family that must work, of the configurations that GPU checks use too."""

from __future__ import annotations

from typing import Any

from hocket.doctor.families import FAMILIES, LLAMA, SERVED, whole_model

__all__ = ["EXPERTS", "FAMILIES", "LLAMA", "PROMPTS", "SERVED", "whole_model"]

_ROUTED = {k: v for k, v in LLAMA.items() if k != "tie_word_embeddings"} | {
    "head_dim": 8, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2,
    "num_experts_per_tok": 2,
}  # fmt: skip
EXPERTS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        **_ROUTED, "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 3,
        "moe_intermediate_size": 24, "norm_topk_prob": True, "mlp_only_layers": [1],
    },
    "olmoe": {**_ROUTED, "model_type": "olmoe", "num_experts": 4},
    "granitemoe": {**_ROUTED, "model_type": "granitemoe", "num_local_experts": 4},
    "gpt_oss": {
        **_ROUTED, "model_type": "gpt_oss", "num_local_experts": 4, "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "deepseek_v3": {
        **{k: v for k, v in _ROUTED.items() if k != "head_dim"}, "model_type": "deepseek_v3",
        "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8, "v_head_dim": 8, "first_k_dense_replace": 1,
        "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3,
        "n_shared_experts": 1, "moe_intermediate_size": 24, "norm_topk_prob": True,
    },
}  # fmt: skip
"""Mixtures: softmax before and after the choice, dense layers between, biases in experts, sigmoid
routers that choose among groups by a corrected score, shared experts."""

PROMPTS = [[5, 9, 33, 12, 60, 7, 7, 21, 40, 3, 18, 2], [11, 4, 50], [1, 2, 3, 4, 5, 6, 7]]
