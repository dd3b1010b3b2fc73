"""Tiny models to be cut: one of plain torch, two of transformers, each with its stage plan."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hocket.spec.plan import StagePlan

HIDDEN, VOCABULARY, SEQUENCE = 16, 40, 12


class Block(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.kind = "odd" if index % 2 else "even"
        self.norm = nn.LayerNorm(HIDDEN)
        self.up = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.down = nn.Linear(3 * HIDDEN, HIDDEN)

    def forward(self, hidden: Tensor, scale: Tensor) -> tuple[Tensor, None]:
        return hidden + self.down(F.gelu(self.up(self.norm(hidden)))) * scale, None


class Decoder(nn.Module):
    scaled = False

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, HIDDEN)
        self.positions = nn.Embedding(64, HIDDEN)
        self.entry = nn.LayerNorm(HIDDEN)
        self.blocks = nn.ModuleList(Block(i) for i in range(layers))
        self.final = nn.LayerNorm(HIDDEN)

    def forward(
        self, ids: Tensor | None = None, position_ids: Tensor | None = None, hidden: Any = None
    ) -> Tensor:
        if hidden is None:
            hidden = self.tokens(ids)
        hidden = self.entry(hidden + self.positions(position_ids))
        if self.scaled:
            hidden = F.normalize(hidden, dim=-1) * HIDDEN**0.5
        for block in self.blocks:
            scale = torch.tensor(0.5 if block.kind == "odd" else 1.0)
            hidden = block(hidden, scale=scale)[0]
        return self.final(hidden.tanh() if self.scaled else hidden)


class Plain(nn.Module):
    """A small causal-free language model with everything a cut must mind."""

    def __init__(self, layers: int = 4, tied: bool = False) -> None:
        super().__init__()
        self.body = Decoder(layers)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.body.tokens.weight

    def forward(
        self, ids: Tensor | None = None, position_ids: Tensor | None = None, hidden: Any = None
    ) -> Tensor:
        return self.head(self.body(ids, position_ids, hidden))


def plain(layers: int = 4, tied: bool = False) -> tuple[nn.Module, StagePlan]:
    plan = StagePlan(
        decoder="body",
        layers="body.blocks",
        num_layers=layers,
        before=("body.tokens", "body.positions", "body.entry"),
        positions=("body.positions",),
        after=("body.final",),
        head=("head",),
        returns_tuple=2,
        input_argument="ids",
        hidden_argument="hidden",
    )
    return Plain(layers, tied), plan


def llama(layers: int = 4, tied: bool = False) -> tuple[nn.Module, StagePlan]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=24, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        tie_word_embeddings=tied, attn_implementation="sdpa", use_cache=False,
    )  # fmt: skip
    plan = StagePlan(
        decoder="model",
        layers="model.layers",
        num_layers=layers,
        before=("model.embed_tokens",),
        after=("model.norm",),
        head=("lm_head",),
    )
    return LlamaForCausalLM(config), plan


def gpt2(layers: int = 4, tied: bool = True) -> tuple[nn.Module, StagePlan]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY, n_embd=HIDDEN, n_layer=layers, n_head=4, n_positions=64,
        tie_word_embeddings=tied, attn_implementation="sdpa", use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    plan = StagePlan(
        decoder="transformer",
        layers="transformer.h",
        num_layers=layers,
        before=("transformer.wte", "transformer.wpe", "transformer.drop"),
        positions=("transformer.wpe",),
        after=("transformer.ln_f",),
        head=("lm_head",),
    )
    return GPT2LMHeadModel(config), plan


def scaled(layers: int = 4, tied: bool = False) -> tuple[nn.Module, StagePlan]:
    """Computes before and after its layers what stands in no module."""
    module, plan = plain(layers, tied)
    module.body.scaled = True  # type: ignore[union-attr]
    return module, plan


MODELS = {"plain": plain, "llama": llama, "gpt2": gpt2}


def batch(rows: int, argument: str = "input_ids", seed: int = 3) -> dict[str, Tensor]:
    """`rows` sequences; some labels are ignored, unevenly over the rows."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCABULARY, (rows, SEQUENCE), generator=generator)
    labels = torch.roll(ids, -1, dims=1)
    labels[:, -1] = -100
    labels[0, : SEQUENCE // 2] = -100
    positions = torch.arange(SEQUENCE).repeat(rows, 1)
    return {argument: ids, "position_ids": positions, "labels": labels}


def loss_fn(output: Any, microbatch: Any) -> tuple[Tensor, Tensor]:
    """Summed next-token cross-entropy and the number of tokens it is over."""
    logits = output if isinstance(output, Tensor) else output.logits
    labels = microbatch["labels"]
    total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return total, (labels != -100).sum()


def slices(whole: dict[str, Tensor], parts: int) -> list[dict[str, Tensor]]:
    """The batch in equal microbatches."""
    pieces = {name: tensor.chunk(parts) for name, tensor in whole.items()}
    return [{name: chunks[i] for name, chunks in pieces.items()} for i in range(parts)]


def reference(module: nn.Module, whole: dict[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of one process over the whole batch; the module's are cleared."""
    inputs = {name: value for name, value in whole.items() if name != "labels"}
    total, tokens = loss_fn(module(**inputs), whole)
    loss = total / tokens
    loss.backward()
    gradients = {
        name: p.grad.clone()
        for name, p in module.named_parameters(remove_duplicate=False)
        if p.grad is not None
    }
    module.zero_grad(set_to_none=True)
    return float(loss.detach()), gradients
