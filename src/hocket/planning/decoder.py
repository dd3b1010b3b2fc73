"""A decoder from its dimensions: what one transformer costs whose code is not at hand.

Published tables give dimensions, not code. The two architectures that they measure are described
by what fused training kernels read and write (Korthikanti et al. 2022, section 4, for what is
saved):

    GPT    layer norm, biases, GELU of width f, learned positions, dropout, tied embeddings
    gated  RMS norm, no bias, SwiGLU of width f (two input matrices), rotary positions
"""

from __future__ import annotations

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
        dropout: masks are saved; None: as the architecture does.
        positions: learned ones.
    """
    kv_heads = heads if kv_heads is None else kv_heads
    ffn = 4 * hidden if ffn is None else ffn
    tied = (not gated) if tied is None else tied
    dropout = (not gated) if dropout is None else dropout
    head_dim = hidden // heads if hidden % heads == 0 else hidden / heads
    kv = kv_heads * hidden // heads
    inputs = 2 if gated else 1
    fused = hidden + 2 * kv
    products = (
        MatrixProduct(name="query_key_value", n=fused, k=hidden, split="column"),
        MatrixProduct(name="attention_output", n=hidden, k=hidden, split="row"),
        MatrixProduct(name="up", n=inputs * ffn, k=hidden, split="column"),
        MatrixProduct(name="down", n=hidden, k=ffn, split="row"),
    )
    core = Attention(
        name="core",
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,  # type: ignore[arg-type]
        value_dim=head_dim,  # type: ignore[arg-type]
    )
    rotary = 2 * (hidden + kv) if gated else 0
    memory_bound = (
        MemoryBound(
            name="norms_and_residuals",
            forward=10 * hidden,
            backward=14 * hidden,
            split="outside",
            kernels=8,
        ),
        MemoryBound(
            name="activation",
            forward=(3 if gated else 2) * ffn,
            backward=(5 if gated else 3) * ffn,
            split="inside",
            kernels=3 if gated else 2,
        ),
        MemoryBound(
            name="heads",
            forward=rotary + fused,
            backward=rotary + fused,
            split="inside",
            kernels=6 if gated else 5,
        ),
    )
    saved = [
        Saved(name="norm_inputs", bytes=4 * hidden, split="outside"),
        Saved(name="column_inputs", bytes=4 * hidden, split="outside"),
        Saved(name="query_key_value", bytes=2 * fused, split="inside"),
        Saved(name="attention_output", bytes=2 * hidden, split="inside"),
        Saved(name="flash_statistics", bytes=4 * heads, split="inside", view="fused"),
        # Softmax input or output, dropout's mask and its output, for each pair of tokens.
        Saved(
            name="scores",
            bytes=(5 if dropout else 4) * heads,
            split="inside",
            square=True,
            view="eager",
            selective=True,
        ),
        Saved(name="activation", bytes=(6 if gated else 4) * ffn, split="inside"),
    ]
    if dropout:
        saved.append(Saved(name="dropout_masks", bytes=2 * hidden, split="outside"))
    bias = 0 if gated else 1
    weights = (
        Weight(name="query_key_value", elements=fused * (hidden + bias), split="column"),
        Weight(name="attention_output", elements=hidden * hidden, split="row"),
        Weight(name="up", elements=inputs * ffn * (hidden + bias), split="column"),
        Weight(name="down", elements=ffn * hidden, split="row"),
        Weight(name="norms_and_biases", elements=(2 + 4 * bias) * hidden, split="outside"),
    )
    table = Weight(name="table", elements=vocab * hidden, split="vocab")
    blocks = {
        "decoder": BlockShape(
            kind="decoder",
            products=products,
            attention=(core,),
            memory_bound=memory_bound,
            saved=tuple(saved),
            weights=weights,
        ),
        "embedding": BlockShape(
            kind="embedding",
            memory_bound=(
                MemoryBound(
                    name="lookup", forward=3 * hidden, backward=3 * hidden, split="outside"
                ),
            ),
            saved=(Saved(name="ids", bytes=8, split="outside"),)
            + ((Saved(name="mask", bytes=hidden, split="outside"),) if dropout else ()),
            weights=(table,)
            + (
                (Weight(name="positions", elements=positions * hidden, split="outside"),)
                if positions
                else ()
            ),
        ),
        "head": BlockShape(
            kind="head",
            products=(MatrixProduct(name="logits", n=vocab, k=hidden, split="vocab"),),
            memory_bound=(
                MemoryBound(name="loss", forward=4 * vocab, backward=4 * vocab, split="inside"),
            ),
            saved=(
                Saved(name="norm_input", bytes=4 * hidden, split="outside"),
                Saved(name="logits", bytes=4 * vocab, split="vocab"),
            ),
            weights=(table, Weight(name="norm", elements=hidden * (1 + bias), split="outside")),
        ),
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
