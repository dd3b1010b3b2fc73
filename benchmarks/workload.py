"""Workload: the one model, the one data stream and the one optimizer of all contenders of a table.

A Llama of 3.95M parameters from seed 0 on seeded random tokens, fp32, AdamW; on long sequences
where they are split, a Mixtral where experts are. The weights are written once as a Hugging Face
directory; each contender loads them or builds them from the seed, so that equal losses mean equal
training.

Letters: B batch, S sequence, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

IGNORED = -100


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """Sizes of the model and of one step. `microbatches` is what pipelines cut a batch into;
    `experts` of each layer, 0 for a Llama, of which a token reaches `top_k`."""

    vocab: int = 2048
    hidden: int = 256
    intermediate: int = 688
    layers: int = 4
    heads: int = 8
    kv_heads: int = 4
    seq_len: int = 128
    global_batch: int = 8
    microbatches: int = 4
    experts: int = 0
    top_k: int = 2
    lr: float = 1e-3
    seed: int = 0
    model_dir: str = ""

    @property
    def tokens(self) -> int:
        """Tokens of one step."""
        return self.global_batch * self.seq_len

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Workload:
        return cls(**json.loads(text))

    def config(self, **changes: Any) -> Any:
        """The configuration of the Llama, or of the Mixtral, whose auxiliary loss is off."""
        from transformers import LlamaConfig, MixtralConfig

        fields: dict[str, Any] = {
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "max_position_embeddings": 2 * self.seq_len,
            "tie_word_embeddings": False,
            "use_cache": False,
        }
        if not self.experts:
            return LlamaConfig(**{**fields, **changes})
        experts = {"num_local_experts": self.experts, "num_experts_per_tok": self.top_k}
        return MixtralConfig(**{**fields, **experts, **changes})

    def model(self) -> Any:
        """The whole model with its seed's weights, in fp32, ready to train."""
        import torch
        from transformers import AutoModelForCausalLM

        torch.manual_seed(self.seed)
        model = AutoModelForCausalLM.from_config(self.config(), attn_implementation="sdpa")
        return model.float().train()

    def write_model(self, path: Path) -> None:
        """Write the weights as a Hugging Face directory, for contenders that load from disk."""
        self.model().save_pretrained(path)

    def batch(self, step: int) -> torch.Tensor:
        """Token ids [B, S] of one global batch: a function of the step alone."""
        import torch

        generator = torch.Generator().manual_seed(1234 + step)
        return torch.randint(0, self.vocab, (self.global_batch, self.seq_len), generator=generator)

    def optimizer(self, parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
        """AdamW without decay, in its fused form (on CPU too): the same for every contender.

        Distributed tensors go into a group of their own: the fused form takes no mixture.
        """
        import torch
        from torch.distributed.tensor import DTensor

        every = list(parameters)
        kinds = [[p for p in every if isinstance(p, DTensor) is kind] for kind in (False, True)]
        groups = [{"params": group} for group in kinds if group]
        return torch.optim.AdamW(groups, lr=self.lr, weight_decay=0.0, fused=True)


WORKLOADS = {
    "context": Workload(seq_len=2048, global_batch=2),
    "expert": Workload(intermediate=344, experts=8),
}
"""Of the tables whose workload is not the usual one."""


def next_token_loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of predicting ids[:, 1:] from logits[:, :-1]; [B, S, V] and [B, S]."""
    import torch

    return torch.nn.functional.cross_entropy(
        logits[:, :-1].reshape(-1, logits.size(-1)), ids[:, 1:].reshape(-1)
    )


def microbatch(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """hocket's microbatch of token ids [B, S]: positions, and labels already shifted."""
    import torch

    labels = torch.full_like(ids, IGNORED)
    labels[:, :-1] = ids[:, 1:]
    positions = torch.arange(ids.size(1)).expand_as(ids).contiguous()
    return {"input_ids": ids.contiguous(), "position_ids": positions, "labels": labels}


def quiet() -> None:
    """Keep libraries from writing progress and advice."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
