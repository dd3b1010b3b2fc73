"""A mixture of experts from its dimensions, as a trace of its modules in transformers has it.

The feed-forward part of a layer is a router, experts of which each token reaches some, and shared
experts that all tokens reach; attention is that of `decoder`, or multi-head latent attention with
the widths that DeepSeek-V2 and the models after it have (Liu et al. 2024, DeepSeek-V2, table 1).

Legend: h hidden, f width of an expert, k experts of a token, s width of the shared ones.
"""

from __future__ import annotations

import dataclasses

from hocket.planning.decoder import attention_weights, decoder
from hocket.spec.model_shape import (
    Attention,
    BlockShape,
    MatrixProduct,
    MemoryBound,
    ModelShape,
    Saved,
    Weight,
)

NOPE, ROPE, VALUE, LATENT, QUERY_LATENT = 128, 64, 128, 512, 1536
"""Widths of latent attention: of a head's key without and with rotation, of its value, and of the
latent vectors of keys and values and (in models of `QUERY_FROM` and wider) of queries."""
QUERY_FROM = 5120


def expert_decoder(
    *,
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    experts: int,
    chosen: int,
    expert_ffn: int,
    shared_ffn: int = 0,
    dense_ffn: int = 0,
    dense_layers: int = 1,
    vocab: int,
    head_dim: int | None = None,
    latent: bool = False,
    name: str = "mixture",
) -> ModelShape:
    """A mixture of experts with gated feed-forward parts and an untied head.

    Args:
        chosen: experts of a token. expert_ffn: width of one. shared_ffn: of all shared ones.
        dense_ffn: width of the first `dense_layers` layers, which have no experts; 0: all have.
        head_dim: None: hidden / heads. latent: attention is latent (MLA).

    Raises:
        OptionError: sizes that no model has.
    """
    plain = decoder(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        ffn=dense_ffn or expert_ffn,
        vocab=vocab,
        gated=True,
        name=name,
    )
    dense = plain.blocks["decoder"]
    if latent:
        dense = _latent(dense, hidden, heads)
    elif head_dim is not None and head_dim * heads != hidden:
        dense = _wide(dense, hidden, heads, kv_heads, head_dim)
    own = {
        "decoder": dense,
        "experts": _experts(
            dense, hidden, experts=experts, chosen=chosen, ffn=expert_ffn, shared=shared_ffn
        ),
        **{kind: plain.blocks[kind] for kind in ("embedding", "head")},
    }
    first = min(dense_layers, layers) if dense_ffn else 0
    if not first:
        own.pop("decoder")
    return dataclasses.replace(
        plain,
        layers=("decoder",) * first + ("experts",) * (layers - first),
        blocks=own,
        experts=experts,
        experts_per_token=chosen,
    )


def _column(name: str, n: int, k: int, source: str, split: str = "column") -> MatrixProduct:
    return MatrixProduct(name=name, n=n, k=k, split=split, input=source)


def _wide(block: BlockShape, h: int, heads: int, kv_heads: int, width: int) -> BlockShape:
    """Attention whose heads are not hidden / heads wide."""
    q, kv = heads * width, kv_heads * width
    core = dataclasses.replace(block.attention[0], head_dim=width, value_dim=width)
    return _with_attention(
        block,
        core,
        (
            _column("attention.query_key_value", q + 2 * kv, h, "attention:norm"),
            MatrixProduct(name="attention.output", n=h, k=q, split="row", input="core:attention"),
        ),
        (Saved(name="query, key, value", bytes=2.0 * (q + 2 * kv), split="inside", view="fused"),),
        q,
        weights=attention_weights(q * h, 2 * kv * h, h * q, heads, kv_heads),
    )


def _latent(block: BlockShape, h: int, heads: int) -> BlockShape:
    """Latent attention in place of a block's own."""
    core = Attention(
        name="self_attn",
        heads=heads,
        kv_heads=heads,
        head_dim=NOPE + ROPE,
        value_dim=VALUE,
    )
    q = heads * (NOPE + ROPE)
    products = [
        _column("self_attn.kv_a_proj_with_mqa", LATENT + ROPE, h, "norm:mul", "outside"),
        _column(
            "self_attn.kv_b_proj", heads * (NOPE + VALUE), LATENT, "self_attn.kv_a_layernorm:mul"
        ),
    ]
    if h >= QUERY_FROM:
        products += [
            _column("self_attn.q_a_proj", QUERY_LATENT, h, "norm:mul", "outside"),
            _column("self_attn.q_b_proj", q, QUERY_LATENT, "self_attn.q_a_layernorm:mul"),
        ]
    else:
        products.append(_column("self_attn.q_proj", q, h, "norm:mul"))
    products.append(
        MatrixProduct(
            name="self_attn.o_proj", n=h, k=heads * VALUE, split="row", input="self_attn:attention"
        )
    )
    saved = (
        Saved(name="self_attn query", bytes=2.0 * q, split="inside", view="fused"),
        Saved(name="self_attn key", bytes=2.0 * q, split="inside", view="fused"),
        Saved(name="self_attn value", bytes=2.0 * heads * VALUE, split="inside", view="fused"),
        Saved(name="latent vectors", bytes=4.0 * (LATENT + ROPE), split="outside", view="fused"),
    )
    weights = tuple(
        Weight(
            name=f"{p.name}.weight", elements=p.n * p.k, split=p.split,
            units=1 if p.split == "outside" else heads,
        )
        for p in products
    )  # fmt: skip
    return _with_attention(block, core, tuple(products), saved, heads * VALUE, weights=weights)


def _with_attention(
    block: BlockShape,
    core: Attention,
    products: tuple[MatrixProduct, ...],
    saved: tuple[Saved, ...],
    width: int,
    *,
    weights: tuple[Weight, ...],
) -> BlockShape:
    """A block with another attention, whose output has `width` elements of a token."""
    outputs = Saved(name="attention output", bytes=2.0 * width, split="inside", view="fused")
    kept = [s for s in block.saved if s.name not in ("query, key, value", "attention output")]
    others = [w for w in block.weights if not w.name.startswith("attention.")]
    return dataclasses.replace(
        block,
        attention=(core,),
        products=(*products, *(p for p in block.products if p.name.startswith("mlp"))),
        saved=(*kept, *saved, outputs),
        weights=(*weights, *others),
    )


def _experts(
    block: BlockShape, h: int, *, experts: int, chosen: int, ffn: int, shared: int
) -> BlockShape:
    """A layer with experts in place of its feed-forward part."""
    k, rows = float(chosen), chosen * ffn

    def of_experts(n: int, inner: int, split: str, source: str) -> MatrixProduct:
        return MatrixProduct(
            name="mlp.experts", n=n, k=inner, split=split, count=k, groups=experts, input=source,
            bare=True, ends=split == "row" and not shared,
        )  # fmt: skip

    products = [p for p in block.products if not p.name.startswith("mlp")]
    products += [
        MatrixProduct(name="mlp.gate", n=experts, k=h, split="outside", input="norm:up", bare=True),
        of_experts(2 * ffn, h, "column", "mlp.experts:index"),
        of_experts(h, ffn, "row", "mlp.experts:mul"),
    ]
    bound = [m for m in block.memory_bound if m.name not in ("activation", "gradient sums", "add")]
    bound += [
        # Both residual sums, and the weighted sum of what a token's experts return.
        MemoryBound(name="add", forward=(7.0 + k) * h, backward=(1.0 + 2 * k) * h, split="outside",
                    kernels=2),
        MemoryBound(name="mlp.experts", forward=(k + 1) * h, backward=(k + 1) * h, split="outside"),
        MemoryBound(name="mlp.experts", forward=2.0 * rows, backward=3.0 * rows, split="inside"),
        MemoryBound(name="gradient sums", forward=0.0, backward=9.0 * h, split="outside",
                    kernels=0, backward_kernels=5),
    ]  # fmt: skip
    held = [s for s in block.saved if s.name not in ("mlp", "mlp.up input", "mlp.down input")]

    def fused(name: str, size: float, split: str) -> Saved:
        return Saved(name=name, bytes=size, split=split, view="fused")

    held += [
        fused("mlp.gate input", 2.0 * h, "outside"),
        fused("mlp.experts input", 2.0 * k * h, "outside"),
        fused("mlp.experts input", 2.0 * rows, "inside"),
        fused("mlp.experts", 4.0 * rows, "inside"),
        fused("add", 2.0 * k * h, "outside"),
    ]
    weights = [w for w in block.weights if w.name not in ("mlp.up.weight", "mlp.down.weight")]
    weights += [
        Weight(name="mlp.gate.weight", elements=experts * h, split="outside"),
        Weight(
            name="mlp.experts.gate_up_proj",
            elements=2 * experts * ffn * h,
            split="expert",
            units=ffn,
        ),
        Weight(name="mlp.experts.down_proj", elements=experts * ffn * h, split="expert", units=ffn),
    ]
    if shared:
        products += [
            _column("mlp.shared_experts.up", 2 * shared, h, "norm:up"),
            MatrixProduct(name="mlp.shared_experts.down", n=h, k=shared, split="row",
                          input="mlp.shared_experts:mul", ends=True),
        ]  # fmt: skip
        bound.append(MemoryBound(name="mlp.shared_experts", forward=3.0 * shared,
                                 backward=5.0 * shared, split="inside"))  # fmt: skip
        held += [
            fused("mlp.shared_experts.down input", 2.0 * shared, "inside"),
            fused("mlp.shared_experts", 4.0 * shared, "inside"),
        ]
        weights += [
            Weight(name="mlp.shared_experts.up.weight", elements=2 * shared * h, split="column",
                   units=shared),
            Weight(name="mlp.shared_experts.down.weight", elements=shared * h, split="row",
                   units=shared),
        ]  # fmt: skip
    return dataclasses.replace(
        block,
        kind="experts",
        products=tuple(products),
        memory_bound=tuple(bound),
        saved=tuple(held),
        weights=tuple(weights),
    )
