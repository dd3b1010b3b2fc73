"""What copies of the most chosen experts gain, by how uneven routers choose.

    python -m benchmarks.serve.expert_copies [--pairs 7]

A mixture of 8 experts on two ranks of one thread each, dp2.ep2: a server without copies and one
with two of them answer the same requests in turns, once the copies have been placed. The biases of
the routers are normal numbers of a given deviation; the imbalance that is printed is of these
routers' choices, the rows of the rank with most over the mean, without copies.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

CONFIG = {
    "model_type": "gpt_oss", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 512,
    "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 64,
    "layer_types": ["sliding_attention", "full_attention"] * 2, "max_position_embeddings": 512,
    "tie_word_embeddings": False, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
REQUESTS, PROMPT, NEW = 16, 192, 16


def prepare(folder: Path, deviation: float) -> float:
    """Write the model; the imbalance of its routers over two ranks."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIG))
    chosen: list[torch.Tensor] = []
    with torch.no_grad():
        for number, layer in enumerate(model.model.layers):
            generator = torch.Generator().manual_seed(number)
            layer.mlp.router.bias.copy_(deviation * torch.randn(8, generator=generator))
            layer.mlp.router.register_forward_hook(lambda *args: chosen.append(args[-1][-1]))
        model(torch.tensor(prompts(0)))
    model.save_pretrained(folder)
    rows = [torch.bincount(index.reshape(-1), minlength=8).view(2, 4).sum(1) for index in chosen]
    return float(sum(r.max() for r in rows) / sum(r.sum() / 2 for r in rows))


def prompts(seed: int) -> list[list[int]]:
    """Random tokens."""
    draw = random.Random(seed)
    return [[draw.randrange(3, 512) for _ in range(PROMPT)] for _ in range(REQUESTS)]


def main() -> None:
    """Print a line for each deviation."""
    from hocket import LLM, SamplingParams

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=7)
    pairs = parser.parse_args().pairs
    sampling = SamplingParams(max_new_tokens=NEW)
    for deviation in (0.0, 0.5, 1.0):
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary) / "model"
            imbalance = prepare(folder, deviation)
            options: dict[str, Any] = {
                "layout": "dp2.ep2", "tokenizer": "bytes", "threads": 1, "no_prefix_cache": True,
            }  # fmt: skip
            with (
                LLM(str(folder), **options) as without,
                LLM(str(folder), redundant_experts=2, rebalance_steps=20, **options) as copies,
            ):
                seconds: dict[str, list[float]] = {"without": [], "copies": []}
                for turn in range(pairs + 2):
                    for name, llm in (("without", without), ("copies", copies)):
                        begin = time.perf_counter()
                        llm.generate(prompts(turn), sampling, progress=False)
                        if turn >= 2:  # by then the copies have been placed
                            seconds[name].append(time.perf_counter() - begin)
            ratios = [a / b for a, b in zip(seconds["without"], seconds["copies"], strict=True)]
            row = {"deviation": deviation, "imbalance": round(imbalance, 2),
                   "speedup": round(statistics.median(ratios), 3),
                   "of": [round(ratio, 3) for ratio in sorted(ratios)]}  # fmt: skip
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
