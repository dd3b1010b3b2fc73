"""Recomputed: what recompute of modules frees of the tensors that a block saves.

    norm         all that a norm saves and its output; its input is kept: half as wide as its copy
                 in fp32, where it makes one, else saved already
    activation   results of elementwise operations in feed-forward layers and experts
    mla_up       what latent vectors are projected up to, and queries and keys made of it
    mlp          all that a feed-forward layer without experts saves, but its input

By the names of saved tensors in a block's shape, `module:operation`; as `runtime.recipes` runs them
again.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterator, Mapping, Sequence

from hocket.spec.model_shape import BlockShape, MatrixProduct, Saved

NORMS = ("rsqrt", "native_layer_norm", "_fused_rms_norm")
"""Operations by which a module is known as a norm."""

ELEMENTWISE = frozenset({
    "add", "sub", "rsub", "mul", "div", "pow", "neg", "sqrt", "rsqrt", "reciprocal", "exp",
    "sigmoid", "tanh", "silu", "gelu", "softplus", "clamp", "clamp_min", "clamp_max", "mean",
    "_to_copy", "cat", "clone", "new_empty", "where",
})  # fmt: skip
"""Operations of `runtime.recipes.OPERATIONS`, by the names under which they are traced. A relu's
result is not among them: its input would be kept in its place."""

COPY = "_to_copy"

FEED_FORWARD_MODULE = re.compile(r"mlp|ffn|feed_?forward")
"""How feed-forward layers are named in layers without attention, where `feed_forward` knows none.
"""

AT_ONCE = {"activation": 1, "mla_up": 2, "mlp": 1}
"""Modules whose results are there together when a layer's backward has come to them: those of a
feed-forward layer, or of an attention. Of queries, keys and values so are their gradients, which
are wider than those of the feed-forward layer. A layer's norms are made again one by one."""


def latent(product: MatrixProduct) -> bool:
    """Whether a product reads what a norm inside its own module made: MLA's latent vectors."""
    norm = product.input.partition(":")[0]
    return "norm" in norm and norm.rpartition(".")[0] == product.name.rpartition(".")[0] != ""


def rows_after(rows: dict[str, int], gone: Mapping[str, float]) -> dict[str, int]:
    """Bytes by the name of a saved tensor, of what is held from forward to backward; `gone`: which
    part of it is freed."""
    found = {}
    for name, nbytes in rows.items():
        kept = 1.0 - gone.get(name, 0.0)
        if kept:
            found[name] = round(nbytes * kept)
    return found


def made_at_once(block: BlockShape, rows: dict[str, int], kinds: Collection[str]) -> int:
    """Bytes of what a backward makes again and needs at the same time, of `rows`."""
    most = 0.0
    for kind in kinds:
        parts = dict(freed(block, (kind,)))
        nbytes = sum(rows.get(name, 0) * part for name, part in parts.items())
        most = max(most, AT_ONCE.get(kind, 0) * nbytes)
    return round(most)


def freed(block: BlockShape, kinds: Collection[str]) -> Iterator[tuple[str, float]]:
    """(name of a saved tensor, which part of its bytes is freed)."""
    norms = norm_modules(block)
    projected = {p.name for p in block.products if latent(p)}
    attention = {name.rpartition(".")[0] for name in projected}
    within = feed_forward(block)
    dense = feed_forward_part(block).products if "mlp" in kinds else ()
    whole = {row.name for row in _of_feed_forward(block, dense, "eager")}
    for row in block.saved:
        if row.view not in ("eager", "both") or row.square:
            continue
        module, operation, number = _parts(row)
        if row.name in whole:
            yield row.name, 1.0
        elif module in norms:
            if "norm" in kinds and not (operation == "native_layer_norm" and number):
                # The copy in fp32 gives way to what it was made of.
                yield row.name, 0.5 if operation == COPY and not number else 1.0
        elif module in projected or module in attention:
            if "mla_up" in kinds and (module in projected or operation in ELEMENTWISE):
                yield row.name, 1.0
        elif "activation" in kinds and module.startswith(within) and operation in ELEMENTWISE:
            yield row.name, 1.0


def freed_fused(block: BlockShape, kind: str) -> Iterator[Saved]:
    """Where norms and activation functions are kernels: outputs that they make again from their
    inputs, which are saved as well, and queries, keys and values that latent vectors are projected
    up to; or all that feed-forward layers save."""
    if kind == "mlp":
        yield from _of_feed_forward(block, feed_forward_part(block).products, "fused")
        return
    # Inputs of products by their bytes too: stacked experts have two products of one name. What is
    # indexed or attended to is no elementwise operation's result, and latent vectors stay.
    norms = norm_modules(block)
    made = {
        (f"{p.name} input", 2.0 * p.k * p.count)
        for p in block.products
        if ":" in p.input and p.input.rpartition(":")[2] not in ("attention", "index")
        if not latent(p) and _of_norm(p, norms) == (kind == "norm")
    }
    projected = {p.name.rpartition(".")[0] for p in block.products if latent(p)}
    up = {f"{module} {what}" for module in projected for what in ("query", "key", "value")}
    for row in block.saved:
        if row.name in up if kind == "mla_up" else (row.name, row.bytes) in made:
            yield row


def norm_modules(block: BlockShape) -> frozenset[str]:
    """Names of a block's norms."""
    found = (_parts(row)[:2] for row in block.saved if row.view in ("eager", "both"))
    return frozenset(module for module, operation in found if operation in NORMS)


def _of_norm(product: MatrixProduct, norms: frozenset[str]) -> bool:
    """Whether a product reads a norm's output. Blocks made from dimensions name no module there."""
    module, _, operation = product.input.partition(":")
    return module in norms or "norm" in (module, operation)


def feed_forward(block: BlockShape) -> tuple[str, ...]:
    """How the names of modules begin that are feed-forward layers or experts."""
    attention = {core.name.partition(".")[0] for core in block.attention}
    roots = {p.name.partition(".")[0] for p in block.products} - attention
    return tuple(sorted(roots)) if block.attention else ()


def feed_forward_part(block: BlockShape) -> BlockShape:
    """The matmuls of a block's feed-forward layer that is a module and no mixture of experts, if it
    has one; `ends` as of a block that were this layer alone."""
    roots = _dense_roots(block)
    own = [p for p in block.products if _root(p.name) in roots]
    last = next((p for p in reversed(own) if not p.lora), None)
    saved = [row.name for row in _of_feed_forward(block, own, "eager")]
    done = last is not None and (last.ends or last.input in saved[-1:])
    found = tuple(dataclasses.replace(p, ends=p is last and done) for p in own)
    return dataclasses.replace(block, products=found)


def _dense_roots(block: BlockShape) -> set[str]:
    """The modules of a block that are a feed-forward layer and no mixture of experts. Linear layers
    of the block itself are none."""
    experts = {_root(p.name) for p in block.products if p.groups > 1 or p.bare}
    layers = {p.name for p in block.products}
    named = {root for p in block.products if FEED_FORWARD_MODULE.fullmatch(root := _root(p.name))}
    return (set(feed_forward(block)) or named) - experts - layers


def _of_feed_forward(
    block: BlockShape, products: Sequence[MatrixProduct], view: str
) -> Iterator[Saved]:
    """What the feed-forward layer of these products saves: not its input, nor what others save of
    its output."""
    if not products:
        return
    roots = {_root(p.name) for p in products}
    given = {f"{p.name} input" for p in products if p.input == products[0].input}
    last = next(p.name for p in reversed(products) if not p.lora)
    for row in block.saved:
        inside = row.view in (view, "both") and not row.square and _root(row.name) in roots
        if inside and row.name not in given and not row.name.startswith(f"{last}:"):
            yield row


def _root(name: str) -> str:
    """The first part of the name of a module, or of a tensor that it saves."""
    return re.split("[.: ]", name, maxsplit=1)[0]


def _parts(row: Saved) -> tuple[str, str, str]:
    """Module, operation and number of a saved tensor's name."""
    module, _, rest = row.name.partition(":")
    operation, _, number = rest.partition("#")
    return module, operation, number
