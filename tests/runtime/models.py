"""Small models and hand-written plans for the runtime's tests."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from hocket.spec.plan import ParallelPlan, Patch, Split, StagePlan, TensorPlan, WeightSegment

VOCABULARY, HIDDEN, HEADS, KV_HEADS, INNER, LAYERS = 101, 32, 8, 2, 48, 2
HEAD_DIM = HIDDEN // HEADS


def linear_column(*segments: WeightSegment, **options: bool) -> Split:
    return Split(style="column", segments=segments, dims={"weight": 0, "bias": 0}, **options)


def linear_row(*segments: WeightSegment, **options: bool) -> Split:
    return Split(style="row", segments=segments, dims={"weight": 1}, **options)


def llama_plan(
    *, prefix: str = "model.", heads: int = HEADS, kv_heads: int = KV_HEADS, size: int = HEAD_DIM,
    inner: int = INNER, vocabulary: int = VOCABULARY, qk_norm: bool = False,
) -> TensorPlan:  # fmt: skip
    """The splits of any Llama-like model of these sizes."""
    layer = f"{prefix}layers.*."
    query = WeightSegment(units=heads, size=size, what="attention heads")
    key = WeightSegment(units=kv_heads, size=size, what="key/value heads", copies=True)
    wide = WeightSegment(units=inner, what="MLP rows")
    words = WeightSegment(units=vocabulary, what="vocabulary rows", uneven=True)
    splits = {
        f"{prefix}embed_tokens": Split(
            style="vocab_embedding", segments=(words,), dims={"weight": 0}
        ),
        f"{layer}self_attn.q_proj": linear_column(query),
        f"{layer}self_attn.k_proj": linear_column(key),
        f"{layer}self_attn.v_proj": linear_column(key),
        f"{layer}self_attn.o_proj": linear_row(query),
        f"{layer}mlp.gate_proj": linear_column(wide),
        f"{layer}mlp.up_proj": linear_column(wide),
        f"{layer}mlp.down_proj": linear_row(wide),
        "lm_head": Split(style="vocab_head", segments=(words,), dims={"weight": 0}),
    }
    if qk_norm:
        splits[f"{layer}self_attn.q_norm"] = Split(style="sum_grad")
        splits[f"{layer}self_attn.k_norm"] = Split(style="sum_grad")
    groups = Patch(
        attribute="num_key_value_groups", whole=heads // kv_heads, ratio=(heads, kv_heads)
    )
    return TensorPlan(splits=splits, patches={f"{layer}self_attn": (groups,)})


class Attention(nn.Module):
    """Causal grouped-query attention; `fused` keeps query, key and value in one weight."""

    def __init__(self, *, fused: bool, dropout: float, bias: bool, qk_norm: bool) -> None:
        super().__init__()
        self.num_key_value_groups = HEADS // KV_HEADS
        self.num_heads, self.num_kv_heads = HEADS, KV_HEADS
        self.fused, self.dropout = fused, dropout
        kv = KV_HEADS * HEAD_DIM
        if fused:
            self.qkv_proj = nn.Linear(HIDDEN, HIDDEN + 2 * kv, bias=bias)
        else:
            self.q_proj = nn.Linear(HIDDEN, HIDDEN, bias=bias)
            self.k_proj = nn.Linear(HIDDEN, kv, bias=bias)
            self.v_proj = nn.Linear(HIDDEN, kv, bias=bias)
        self.o_proj = nn.Linear(HIDDEN, HIDDEN, bias=bias)
        self.q_norm = nn.LayerNorm(HEAD_DIM) if qk_norm else nn.Identity()
        self.k_norm = nn.LayerNorm(HEAD_DIM) if qk_norm else nn.Identity()
        self.resid_dropout = nn.Dropout(dropout)
        self.seen: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.fused:
            kv = self.num_kv_heads * HEAD_DIM
            q, k, v = self.qkv_proj(x).split([self.num_heads * HEAD_DIM, kv, kv], -1)
        else:
            q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        q, k, v = (t.unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for t in (q, k, v))
        q, k = self.q_norm(q), self.k_norm(k)
        k, v = (t.repeat_interleave(self.num_key_value_groups, 1) for t in (k, v))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = nn.functional.dropout(y, self.dropout, self.training)
        self.seen = y.detach()
        return self.resid_dropout(self.o_proj(y.transpose(1, 2).flatten(2)))


class MLP(nn.Module):
    def __init__(self, *, bias: bool) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(HIDDEN, INNER, bias=bias)
        self.up_proj = nn.Linear(HIDDEN, INNER, bias=bias)
        self.down_proj = nn.Linear(INNER, HIDDEN, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, *, fused: bool, dropout: float, bias: bool, qk_norm: bool) -> None:
        super().__init__()
        self.input_layernorm = nn.LayerNorm(HIDDEN)
        self.self_attn = Attention(fused=fused, dropout=dropout, bias=bias, qk_norm=qk_norm)
        self.post_attention_layernorm = nn.LayerNorm(HIDDEN)
        self.mlp = MLP(bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    def __init__(self, num_layers: int, **options: object) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, HIDDEN, padding_idx=VOCABULARY - 1)
        self.layers = nn.ModuleList(Layer(**options) for _ in range(num_layers))  # type: ignore[arg-type]
        self.norm = nn.LayerNorm(HIDDEN)

    def forward(
        self, input_ids: Tensor | None = None, inputs_embeds: Tensor | None = None
    ) -> Tensor:
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class Small(nn.Module):
    """A Llama-like model in plain torch. Input [B, S], output logits [B, S, V]."""

    def __init__(
        self, *, num_layers: int = LAYERS, fused: bool = False, dropout: float = 0.0,
        bias: bool = False, qk_norm: bool = False, tied: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.model = Decoder(num_layers, fused=fused, dropout=dropout, bias=bias, qk_norm=qk_norm)
        self.lm_head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        if tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(
        self, input_ids: Tensor | None = None, inputs_embeds: Tensor | None = None
    ) -> Tensor:
        return self.lm_head(self.model(input_ids, inputs_embeds))


def small(seed: int = 0, **options: object) -> Small:
    """A seeded model whose biases and norms are not at their trivial values."""
    torch.manual_seed(seed)
    model = Small(**options)  # type: ignore[arg-type]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            elif "embed" not in name and "lm_head" not in name:
                parameter.mul_(2)
    return model


def small_plan(
    *, num_layers: int = LAYERS, fused: bool = False, tied: bool = False, qk_norm: bool = False
) -> ParallelPlan:
    """The plan of `Small`."""
    tensor = llama_plan(qk_norm=qk_norm)
    if fused:
        layer = "model.layers.*.self_attn"
        splits = {k: v for k, v in tensor.splits.items() if not k.endswith(("k_proj", "v_proj"))}
        query = splits.pop(f"{layer}.q_proj").segments[0]
        key = tensor.splits[f"{layer}.k_proj"].segments[0]
        splits[f"{layer}.qkv_proj"] = linear_column(query, key, key)
        heads = (
            Patch(attribute="num_heads", whole=HEADS),
            Patch(attribute="num_kv_heads", whole=KV_HEADS),
            *tensor.patches[layer],
        )
        tensor = TensorPlan(splits=splits, patches={layer: heads})
    stages = StagePlan(
        decoder="model", layers="model.layers", num_layers=num_layers,
        before=("model.embed_tokens",), after=("model.norm",), head=("lm_head",),
    )  # fmt: skip
    ties = {"lm_head.weight": "model.embed_tokens.weight"} if tied else {}
    return ParallelPlan(tensor=tensor, stages=stages, hidden_size=HIDDEN, ties=ties)


def tokens(batch: int = 4, length: int = 8, seed: int = 1) -> dict[str, Tensor]:
    """A microbatch: some labels are ignored, some tokens are the padding token."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCABULARY, (batch, length), generator=generator)
    labels = torch.randint(0, VOCABULARY, (batch, length), generator=generator)
    labels[torch.rand(batch, length, generator=generator) < 0.2] = -100
    return {"input_ids": ids, "labels": labels}


def copy_of(module: nn.Module) -> nn.Module:
    return copy.deepcopy(module)
