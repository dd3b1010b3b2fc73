"""Tiny configurations of every family that must work, with what makes each of them difficult.

Weights are spread wider than training would start from, so that logits differ clearly, norms are
not at one and biases not at zero: a norm left out or a bias added twice shows.
"""

from __future__ import annotations

from typing import Any

LLAMA = {
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

PROMPTS = [[5, 9, 33, 12, 60, 7, 7, 21, 40, 3, 18, 2], [11, 4, 50], [1, 2, 3, 4, 5, 6, 7]]


def whole_model(family: str) -> Any:
    """The whole model with random weights, in evaluation mode."""
    import torch

    from hocket.models.skeleton import build

    model: Any = build(FAMILIES[family], device="cpu", dropout=0.0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model.initialize_weights()
        model.tie_weights()
        with torch.no_grad():
            # Layers that outweigh the embedding: a tied head would only repeat the last token.
            for name, parameter in model.named_parameters():
                spread = 0.6 if ".layers." in name or ".h." in name else 0.05
                parameter.add_(torch.randn_like(parameter), alpha=spread)
    return model.eval()
