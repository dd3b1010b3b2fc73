"""What ranks run for the tests of this folder."""

from __future__ import annotations

import copy
from typing import Any


def public(context: Any, layouts: list[str]) -> list[dict[str, float]]:
    """`hocket.parallelize` on a Hugging Face model with values, beside the model by itself."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import hocket

    config = LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32,
        attn_implementation="sdpa", use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    whole = LlamaForCausalLM(config)
    ids = torch.randint(0, 96, (8, 17))
    positions = torch.arange(16).expand(8, 16)
    logits = whole(input_ids=ids[:, :-1], position_ids=positions).logits
    loss = torch.nn.functional.cross_entropy(logits.reshape(-1, 96), ids[:, 1:].reshape(-1))
    loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in whole.parameters()])
    rows = []
    for text in layouts:
        layout = hocket.Layout.parse(text)
        parallel = hocket.parallelize(copy.deepcopy(whole), text, schedule="gpipe", microbatches=2)
        rank, size = layout.coordinate(context.rank)["dp"], 8 // layout.dp
        mine = slice(rank * size, (rank + 1) * size)
        parts = zip(ids[mine].chunk(2), positions[mine].chunk(2), strict=True)
        found = parallel.forward_backward(
            [{"input_ids": i[:, :-1], "position_ids": p, "labels": i[:, 1:]} for i, p in parts]
        )
        rows.append(
            {
                "loss": abs(float(found) - float(loss)),
                "norm": abs(float(parallel.clip_grad_norm(0)) - float(norm)) / float(norm),
            }
        )
    return rows
