"""The families of the suite, and variants whose switches change how they are split or stored."""

from __future__ import annotations

from typing import Any

from tests.families import FAMILIES, LLAMA

VARIANTS: dict[str, dict[str, Any]] = {
    **FAMILIES,
    "opt_projected": {**FAMILIES["opt"], "word_embed_proj_dim": 16, "do_layer_norm_before": False},
    "phi3_tied": {**FAMILIES["phi3"], "tie_word_embeddings": True},
    "gpt2_scaled": {**FAMILIES["gpt2"], "scale_attn_by_inverse_layer_idx": True},
    "multi_query": {**LLAMA, "num_key_value_heads": 1},
    "odd_vocabulary": {**LLAMA, "vocab_size": 61, "tie_word_embeddings": True},
}
