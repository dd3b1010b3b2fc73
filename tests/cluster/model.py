"""Writes a tiny Qwen3 with random weights and what plain transformers answers with it.

python -m tests.cluster.model FOLDER PROMPT TOKENS     prints {"tokens": [...], "logprobs": [...]}
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from hocket.training.tokenizer import byte_tokenizer


def main() -> None:
    folder, prompt, count = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=257, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=256,
        eos_token_id=None, bos_token_id=None, initializer_range=0.3,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).eval()
    model.save_pretrained(folder)
    byte_tokenizer().save(folder)
    ids = list(prompt.encode())
    tokens, logprobs = [], []
    with torch.no_grad():
        for _ in range(count):
            logits = model(torch.tensor([ids])).logits[0, -1]
            tokens.append(int(logits.argmax()))
            logprobs.append(float(logits.log_softmax(-1).max()))
            ids.append(tokens[-1])
    print(json.dumps({"tokens": tokens, "logprobs": logprobs}))


if __name__ == "__main__":
    main()
