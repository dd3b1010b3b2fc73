"""Models whose size is not known: hypotheses, each with what it rests on, and their shapes.

The size of GPT-4 is not public: "this report contains no further details about the architecture
(including model size)" (OpenAI 2023, GPT-4 Technical Report, section 2). What is asked about it can
be answered only for a hypothesis, and each is labelled as one.
"""

from __future__ import annotations

import dataclasses

from hocket.catalogue import shapes
from hocket.cost.serving import WEIGHT_BYTES
from hocket.planning.decoder import decoder
from hocket.spec.errors import OptionError
from hocket.spec.model_shape import (
    BlockShape,
    MatrixProduct,
    MemoryBound,
    ModelShape,
    Weight,
)
from hocket.spec.units import format_bytes

HEAD = 128
"""Width of a head in the shapes made here."""

KEYS = 8
"""Key/value heads of a model of which only the bytes are known: those of Llama 2 and 3 70B."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hypothesis:
    """One size that a model could have.

    Attributes:
        name: short. claim: what is assumed.
        source: who says so, or that nobody can be named.
        shape: that is estimated.
    """

    name: str
    claim: str
    source: str
    shape: ModelShape


def hypothesis_names() -> tuple[str, ...]:
    """Models that are answered by hypotheses."""
    return ("gpt-4",)


def hypotheses(name: str, *, precision: str = "bf16") -> tuple[Hypothesis, ...]:
    """What a model of `names()` could be, smallest first."""
    assert name in hypothesis_names(), name
    quoted = "a size often named in questions about GPT-4, with no source that can be checked"
    found = []
    for size in (150_000_000_000, 200_000_000_000):
        text = format_bytes(size)
        shape = of_bytes(size, precision=precision, name=f"{name} as {text}")
        found.append(
            Hypothesis(
                name=f"{name}: {text}",
                claim=claim_of(shape, size, precision),
                source=quoted,
                shape=shape,
            )
        )
    return (
        *found,
        Hypothesis(
            name=f"{name}: 175B dense",
            claim="175 billion parameters as GPT-3: 96 layers of 12,288, 96 key/value heads",
            source="that GPT-4 is no larger than GPT-3; the shape is of Brown et al. 2020, "
            "table 2.1",
            shape=dataclasses.replace(shapes.shape("gpt3-175b"), name=f"{name} as 175B dense"),
        ),
        Hypothesis(
            name=f"{name}: 1.8T experts",
            claim="1.8 trillion parameters, 120 layers, 16 experts of which 2 serve a token, "
            "one key/value head",
            source="SemiAnalysis, 10 July 2023, unconfirmed; widths chosen here so that attention "
            "has 55 and each expert about 111 billion parameters, as reported",
            shape=mixture(
                layers=120,
                hidden=15360,
                ffn=29696,
                experts=16,
                experts_per_token=2,
                kv_heads=1,
                name=f"{name} as 1.8T experts",
            ),
        ),
    )


def of_bytes(size: int, *, precision: str = "bf16", name: str = "") -> ModelShape:
    """A dense model of which only the bytes of its weights are known.

    In the proportions of Llama 3 70B (layers of 8,192 x 80, feed-forward 3.5 times as wide, 8
    key/value heads of 128), as near as whole heads and layers come; its feed-forward width then
    makes up the bytes.

    Raises:
        OptionError: fewer bytes than such a model can have.
    """
    each, vocab = WEIGHT_BYTES[precision], 128256
    parameters = size / each
    best: tuple[float, int, int, int] | None = None
    for blocks in range(1, 65):
        hidden = KEYS * HEAD * blocks
        for layers in range(4, 4 * hidden // 256, 4):
            ends = vocab * hidden * (WEIGHT_BYTES["bf16"] + each) / each  # embeddings keep 16 bits
            rest = (parameters - ends) / layers - 2 * hidden * hidden
            ffn = round((rest - 2 * hidden * KEYS * HEAD) / (3 * hidden) / 256) * 256
            off = abs(ffn / hidden / 3.5 - 1) + abs(hidden / layers / 102.4 - 1)
            if ffn > 0 and (best is None or off < best[0]):
                best = off, hidden, layers, ffn
    if best is None or best[0] > 1:
        side = "little" if best is None or best[1] < 8192 else "much"
        raise OptionError(
            f"{format_bytes(size)} of weights, {parameters:,.0f} parameters, is too {side} for a "
            f"model in the proportions of Llama 3 70B",
            hint="--weights 140GB, or the name of a model",
        )
    _, hidden, layers, ffn = best
    return _divided(
        decoder(
            layers=layers,
            hidden=hidden,
            heads=hidden // HEAD,
            kv_heads=KEYS,
            ffn=ffn,
            vocab=vocab,
            gated=True,
            name=name or f"{format_bytes(size)} of weights",
        )
    )


def mixture(
    *,
    layers: int,
    hidden: int,
    ffn: int,
    experts: int,
    experts_per_token: int,
    kv_heads: int,
    name: str = "mixture",
) -> ModelShape:
    """A mixture of experts in every layer, plain (not gated) experts of width `ffn`."""
    dense = decoder(
        layers=layers,
        hidden=hidden,
        heads=hidden // HEAD,
        kv_heads=kv_heads,
        ffn=ffn,
        vocab=100352,
        tied=False,
        dropout=False,
        name=name,
    )
    (kind,) = set(dense.layers)
    block = dense.blocks[kind]
    attention = [p for p in block.products if p.name.rpartition(".")[2] not in ("up", "down")]
    assert len(attention) == len(block.products) - 2
    top = float(experts_per_token)
    products = (
        *attention,
        MatrixProduct(name="mlp.gate", n=experts, k=hidden, split="outside"),
        MatrixProduct(
            name="mlp.experts", n=ffn, k=hidden, split="column", count=top, groups=experts
        ),
        MatrixProduct(name="mlp.experts", n=hidden, k=ffn, split="row", count=top, groups=experts),
    )
    activation = [m for m in block.memory_bound if m.name != "activation"]
    activation += [
        MemoryBound(
            name="activation", forward=2 * top * ffn, backward=3 * top * ffn, split="inside"
        ),
        MemoryBound(name="dispatch", forward=3 * top * hidden, backward=0.0, split="outside"),
    ]
    weights = [w for w in block.weights if not w.name.startswith("mlp.")]
    assert len(weights) == len(block.weights) - 2
    weights += [
        Weight(name="mlp.gate", elements=hidden * experts, split="outside"),
        Weight(name="mlp.experts.up", elements=experts * hidden * ffn, split="expert", units=ffn),
        Weight(name="mlp.experts.down", elements=experts * hidden * ffn, split="expert", units=ffn),
    ]
    changed = BlockShape(
        kind=kind,
        products=products,
        attention=block.attention,
        memory_bound=tuple(activation),
        saved=block.saved,
        weights=tuple(weights),
        unfused=block.unfused,
    )
    return _divided(
        dataclasses.replace(
            dense,
            blocks={**dense.blocks, kind: changed},
            experts=experts,
            experts_per_token=experts_per_token,
        )
    )


def _divided(shape: ModelShape) -> ModelShape:
    """With the units that tensor parallelism divides: heads, of every split matrix; and with a
    head of its own where it is not the embedding's."""
    blocks = {
        name: dataclasses.replace(
            block,
            weights=tuple(
                dataclasses.replace(w, units=shape.heads)
                if w.units == 1 and w.split in ("column", "row", "inside")
                else w
                for w in block.weights
            ),
        )
        for name, block in shape.blocks.items()
    }
    if not shape.tied:
        head = blocks["head"]
        own = tuple(dataclasses.replace(w, name=f"head {w.name}") for w in head.weights)
        blocks["head"] = dataclasses.replace(head, weights=own)
    return dataclasses.replace(shape, blocks=blocks)


def claim_of(shape: ModelShape, size: int, precision: str) -> str:
    """What is assumed of a model of which only the bytes are known."""
    return (
        f"{format_bytes(size)} of weights in {precision}, dense, as {len(shape.layers)} layers of "
        f"{shape.hidden:,} with {shape.heads} heads and {shape.kv_heads} key/value heads "
        "(the proportions of Llama 3 70B)"
    )
