"""A decoder from its dimensions: what one transformer costs whose code is not at hand.

Published tables give dimensions, not code. The two architectures that they measure are described
as a trace of their modules in transformers describes them, entry by entry (a test compares):

    GPT    GPT-2: layer norm, biases, GELU of width f, learned positions, tied embeddings
    gated  Llama: RMS norm, no bias, SwiGLU of width f (two input matrices), rotary positions

Legend: h hidden, q width of all query heads, kv of all key heads, f feed-forward, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable

from hocket.spec.errors import OptionError
from hocket.spec.legality import MOST_LAYERS
from hocket.spec.model_shape import (
    Attention,
    BlockShape,
    MatrixProduct,
    MemoryBound,
    ModelShape,
    Saved,
    Weight,
)


def decoder(
    *,
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int | None = None,
    ffn: int | None = None,
    vocab: int = 50304,
    gated: bool = False,
    tied: bool | None = None,
    dropout: bool | None = None,
    positions: int = 0,
    name: str = "decoder",
) -> ModelShape:
    """A dense decoder.

    Args:
        kv_heads: None: as many as heads. ffn: None: 4 x hidden.
        tied: embedding and head are one matrix; None: as the architecture does.
        dropout: masks are drawn and saved; None: as the architecture does.
        positions: learned ones.
    """
    kv_heads = heads if kv_heads is None else kv_heads
    ffn = 4 * hidden if ffn is None else ffn
    tied = (not gated) if tied is None else tied
    dropout = (not gated) if dropout is None else dropout
    if min(layers, hidden, heads, kv_heads, ffn, vocab) < 1 or layers > MOST_LAYERS:
        raise OptionError(
            f"{name}: {layers} layers, {hidden} hidden, {heads} heads, {kv_heads} key/value heads, "
            f"{ffn} feed-forward and {vocab} tokens are not a model's sizes"
        )
    kv = kv_heads * hidden // heads
    blocks = {
        "decoder": BlockShape(
            kind="decoder",
            products=_products(hidden, kv, ffn, gated, dropout),
            attention=(_attention(hidden, heads, kv_heads),),
            memory_bound=tuple(_memory_bound(hidden, kv, ffn, gated, dropout)),
            saved=tuple(_saved(hidden, heads, kv, ffn, gated=gated, dropout=dropout)),
            weights=tuple(_weights(hidden, kv, ffn, gated=gated, heads=heads, kv_heads=kv_heads)),
            unfused=(_scores(heads, dropout),),
        ),
        "embedding": _embedding(hidden, vocab, positions, dropout),
        "head": _head(hidden, vocab, gated, tied),
    }
    return ModelShape(
        name=name,
        hidden=hidden,
        vocab=vocab,
        heads=heads,
        kv_heads=kv_heads,
        layers=("decoder",) * layers,
        blocks=blocks,
        tied=tied,
    )


def _products(
    hidden: int, kv: int, ffn: int, gated: bool, dropout: bool
) -> tuple[MatrixProduct, ...]:
    def column(name: str, n: int) -> MatrixProduct:
        return MatrixProduct(name=name, n=n, k=hidden, split="column", input=f"{name}:norm")

    return (
        column("attention.query_key_value", hidden + 2 * kv),
        MatrixProduct(
            name="attention.output", n=hidden, k=hidden, split="row", input="core:attention"
        ),
        column("mlp.up", (2 if gated else 1) * ffn),
        MatrixProduct(
            name="mlp.down", n=hidden, k=ffn, split="row", input="mlp:act", ends=not dropout
        ),
    )


def _attention(hidden: int, heads: int, kv_heads: int) -> Attention:
    width = hidden // heads if hidden % heads == 0 else hidden / heads
    return Attention(
        name="attention",
        heads=heads,
        kv_heads=kv_heads,
        head_dim=width,  # type: ignore[arg-type]
        value_dim=width,  # type: ignore[arg-type]
    )


def _memory_bound(
    hidden: int, kv: int, ffn: int, gated: bool, dropout: bool
) -> Iterable[MemoryBound]:
    mask = 0.5 if dropout else 0.0
    yield MemoryBound(
        name="norms",
        forward=4 * hidden,
        backward=6 * hidden,
        split="outside",
        kernels=2,
        backward_kernels=2,
    )
    # Both residual sums with dropout: the gradient of a plain sum is the sum's, and moves nothing.
    yield MemoryBound(
        name="add",
        forward=(6 + 2 * mask) * hidden,
        backward=(4 + 2 * mask) * hidden if dropout else 0.0,
        split="outside",
        kernels=2,
        backward_kernels=2 if dropout else 0,
    )
    yield MemoryBound(
        name="gradient sums",
        forward=0.0,
        backward=6 * hidden,
        split="outside",
        kernels=0,
        backward_kernels=2,
    )
    yield MemoryBound(
        name="activation",
        forward=(3 if gated else 2) * ffn,
        backward=(5 if gated else 3) * ffn,
        split="inside",
    )
    if gated:
        rotary = 2.0 * (hidden + kv)
        yield MemoryBound(
            name="rotary",
            forward=rotary,
            backward=rotary,
            split="inside",
            kernels=2,
            backward_kernels=2,
        )
    else:
        for split, width in (("outside", 2 * hidden), ("inside", hidden + 2 * kv + ffn)):
            yield MemoryBound(
                name="bias gradients",
                forward=0.0,
                backward=width,
                split=split,
                kernels=0,
                backward_kernels=2,
            )


def _scores(heads: int, dropout: bool) -> MemoryBound:
    """What attention without a fused kernel moves per score: the first product writes 1; softmax
    reads and writes 1 each; dropout reads 1, writes 1 and a mask of 1/2; the second product reads
    1. Backward likewise with the gradients."""
    return MemoryBound(
        name="softmax",
        forward=(6.5 if dropout else 4.0) * heads,
        backward=(9.5 if dropout else 7.0) * heads,
        split="inside",
        kernels=2 if dropout else 1,
        backward_kernels=2 if dropout else 1,
        square=True,
        view="core",
    )


def _saved(
    hidden: int, heads: int, kv: int, ffn: int, *, gated: bool, dropout: bool
) -> Iterable[Saved]:
    def fused(name: str, size: float, split: str) -> Saved:
        return Saved(name=name, bytes=size, split=split, view="fused")

    yield fused("statistics", 2 * (4 if gated else 8), "outside")
    yield fused("norm inputs", 4 * hidden, "outside")
    # Named as the products that read them: recompute of modules makes these again.
    yield fused("attention.query_key_value input", 2 * hidden, "outside")
    yield fused("mlp.up input", 2 * hidden, "outside")
    yield fused("query, key, value", 2 * (hidden + 2 * kv), "inside")
    yield fused("attention output", 2 * hidden, "inside")
    yield fused("attention row sums", 4 * heads, "inside")
    yield fused("mlp", (4 if gated else 2) * ffn, "inside")
    yield fused("mlp.down input", 2 * ffn, "inside")
    if dropout:
        yield fused("dropout masks", 2 * hidden, "outside")
    # Probabilities; with dropout its mask and its output, for each pair of tokens.
    yield Saved(
        name="scores",
        bytes=(5 if dropout else 2) * heads,
        split="inside",
        square=True,
        view="core",
        selective=True,
    )


def attention_weights(
    query: int, key_value: int, output: int, heads: int, kv_heads: int
) -> tuple[Weight, ...]:
    """Weights of an attention block from their elements, in the units that ranks hold whole. As all
    here, they have the names of the matmuls that take them (`cost.local.matmul_shards`)."""
    return (
        Weight(
            name="attention.query_key_value.weight", elements=query + key_value, split="column",
            units=heads, copied_elements=key_value, copied_units=kv_heads,
        ),
        Weight(name="attention.output.weight", elements=output, split="row", units=heads),
    )  # fmt: skip


def _weights(
    hidden: int, kv: int, ffn: int, *, gated: bool, heads: int, kv_heads: int
) -> Iterable[Weight]:
    bias = 0 if gated else 1
    inputs, width = 2 if gated else 1, hidden + bias
    norms = Weight(name="norms_and_biases", elements=(2 + 4 * bias) * hidden, split="outside")
    if bias:  # the order of GPT-2's own weights, else of Llama's
        yield norms
    yield from attention_weights(hidden * width, 2 * kv * width, hidden * hidden, heads, kv_heads)
    yield Weight(name="mlp.up.weight", elements=inputs * ffn * width, split="column", units=ffn)
    yield Weight(name="mlp.down.weight", elements=ffn * hidden, split="row", units=ffn)
    if not bias:
        yield norms


def _table(hidden: int, vocab: int, name: str = "table") -> Weight:
    return Weight(name=name, elements=vocab * hidden, split="vocab", units=vocab)


def _embedding(hidden: int, vocab: int, positions: int, dropout: bool) -> BlockShape:
    learned = positions > 0
    weights = [_table(hidden, vocab)]
    if learned:
        weights.append(Weight(name="positions", elements=positions * hidden, split="outside"))
    return BlockShape(
        kind="embedding",
        memory_bound=(
            MemoryBound(
                name="lookup",
                forward=(2 + 0.5 * dropout) * hidden,
                backward=2 * hidden,
                split="outside",
            ),
        ),
        saved=(Saved(name="mask", bytes=hidden, split="outside", view="fused"),) * dropout,
        weights=tuple(weights),
    )


def _head(hidden: int, vocab: int, gated: bool, tied: bool) -> BlockShape:
    bias = 0 if gated else 1
    weights = (
        _table(hidden, vocab, "table" if tied else "head"),
        Weight(name="norm", elements=hidden * (1 + bias), split="outside"),
    )
    return BlockShape(
        kind="head",
        products=(
            MatrixProduct(name="logits", n=vocab, k=hidden, split="vocab", input="norm:mul"),
        ),
        memory_bound=(
            MemoryBound(name="norm", forward=2 * hidden, backward=3 * hidden, split="outside"),
            MemoryBound(name="loss", forward=3 * vocab, backward=3 * vocab, split="vocab"),
        ),
        saved=(
            Saved(name="statistics", bytes=4 * (1 + bias), split="outside", view="fused"),
            Saved(name="norm input", bytes=2 * hidden, split="outside", view="fused"),
            Saved(name="logits input", bytes=2 * hidden, split="outside", view="fused"),
            Saved(name="logits", bytes=4 * vocab, split="vocab", view="fused"),
        ),
        weights=weights if bias else weights[::-1],
    )
