"""Tiny models of every family that must work, of the configurations that GPU checks use too."""

from __future__ import annotations

from typing import Any

from hocket.doctor.families import FAMILIES, LLAMA, SERVED, whole_model

__all__ = ["EXPERTS", "FAMILIES", "HYBRIDS", "LLAMA", "PROMPTS", "SERVED", "whole_model"]

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

_HYBRID = {k: v for k, v in _ROUTED.items() if k != "num_experts_per_tok"}
_MAMBA2 = {
    "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 16, "mamba_n_groups": 2,
    "mamba_expand": 2, "mamba_d_conv": 4, "mamba_chunk_size": 4,
}  # fmt: skip
_DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 12, "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}  # fmt: skip
HYBRIDS: dict[str, dict[str, Any]] = {
    "mamba2": {
        "model_type": "mamba2", "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 3,
        "num_heads": 8, "head_dim": 8, "state_size": 16, "n_groups": 2, "expand": 2,
        "conv_kernel": 4, "chunk_size": 4, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2,
    },
    "bamba": {**_HYBRID, **_MAMBA2, "model_type": "bamba", "attn_layer_indices": [1, 3]},
    "granitemoehybrid": {
        **_HYBRID, **_MAMBA2, "model_type": "granitemoehybrid", "num_local_experts": 0,
        "shared_intermediate_size": 48, "layer_types": ["mamba", "attention"] * 2,
    },
    "falcon_h1": {**_HYBRID, **_MAMBA2, "model_type": "falcon_h1", "mamba_d_ssm": 64},
    "nemotron_h": {
        **_HYBRID, "model_type": "nemotron_h", "layers_block_type": ["mamba", "attention"] * 2,
        "mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 16, "n_groups": 2,
        "conv_kernel": 4, "chunk_size": 4,
    },
    "zamba2": {
        **_HYBRID, "model_type": "zamba2", "layers_block_type": ["mamba", "hybrid"] * 2,
        "n_mamba_heads": 8, "mamba_headdim": 8, "mamba_d_state": 16, "mamba_ngroups": 2,
        "mamba_d_conv": 4, "chunk_size": 4, "num_mem_blocks": 1, "num_key_value_heads": 4,
        "attention_head_dim": 16,
    },
    "qwen3_next": {
        **_ROUTED, **_DELTA, "model_type": "qwen3_next", "num_experts": 4,
        "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24,
    },
    "qwen3_5_text": {**_HYBRID, **_DELTA, "model_type": "qwen3_5_text"},
    "olmo_hybrid": {**_HYBRID, **_DELTA, "model_type": "olmo_hybrid"},
    "lfm2": {
        **_HYBRID, "model_type": "lfm2", "conv_L_cache": 3,
        "layer_types": ["conv", "full_attention"] * 2,
    },
}  # fmt: skip
"""Recurrent layers whose state is handed on: Mamba2 alone, between attention layers, in one layer
with attention, and with shared attention; Gated DeltaNet of unlike key and value heads; a short
convolution."""

PROMPTS = [[5, 9, 33, 12, 60, 7, 7, 21, 40, 3, 18, 2], [11, 4, 50], [1, 2, 3, 4, 5, 6, 7]]
