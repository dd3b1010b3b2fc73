"""A model that can be served: a configuration, weights (which fakes never read), a tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

from hocket.training.tokenizer import byte_tokenizer

CONFIG = {
    "model_type": "llama", "vocab_size": 257, "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 128, "architectures": ["LlamaForCausalLM"],
    "tie_word_embeddings": False, "eos_token_id": 256,
}  # fmt: skip


def model(folder: Path) -> Path:
    """The directory, with a file of weights that holds no tensor."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    header = b"{}      "
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    byte_tokenizer().save(folder)
    return folder
