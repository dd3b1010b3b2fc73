"""A model as serving engines hold it: heads, experts, feed-forward and vocabulary divided.

A ModelShape says how this hocket's runtime splits a model; where it has no plan for a family, or
replicates a part, its products stand as `outside`. Engines split what can be split:

    attention    heads and key/value heads; the down-projections of latent attention stay whole
    experts      each expert's units, or whole experts
    head         vocabulary rows
    routers      stay whole

Key/value heads that a trace repeats, as many as query heads, become those that are cached: what
query, key and value products yield, less the queries. (Where fewer are traced they are not
repeated, and the query's product may hold a gate too: Qwen3-Next.)
"""

from __future__ import annotations

import dataclasses

from hocket.spec.model_shape import Attention, BlockShape, MatrixProduct, ModelShape, Weight

ROUTER = 1024
"""Most columns of a product that counts as a router (experts of one layer)."""


def served_shape(shape: ModelShape) -> ModelShape:
    """The shape with the splits that an engine uses; kept for the last shapes asked for."""
    found = _KEPT.get(id(shape))
    if found is None or found[0] is not shape:
        blocks = {name: _block(shape, block) for name, block in shape.blocks.items()}
        found = (shape, dataclasses.replace(shape, blocks=blocks))
        while len(_KEPT) >= KEPT:
            _KEPT.pop(next(iter(_KEPT)))
        _KEPT[id(shape)] = found
    return found[1]


KEPT = 64
_KEPT: dict[int, tuple[ModelShape, ModelShape]] = {}


def latent_width(core: Attention, block: BlockShape) -> int:
    """Elements of the latent vector that multi-head latent attention caches for a token; 0 where
    keys and values are cached themselves.

    The up-projection of keys and values has heads x (own width + value width) columns and as many
    inner elements as the latent vector less its rotary part (Liu et al. 2024, DeepSeek-V2, 2.1).
    """
    for p in block.products:
        own = p.n / core.heads - core.value_dim
        rotary = core.head_dim - own
        if 0 < own < core.head_dim:
            width = p.k + rotary
            if any(q.n == width and q is not p for q in block.products):
                return int(width)
    return 0


def _block(shape: ModelShape, block: BlockShape) -> BlockShape:
    splits = {i: _split(shape, block, i) for i in range(len(block.products))}
    products = tuple(dataclasses.replace(p, split=splits[i]) for i, p in enumerate(block.products))
    return dataclasses.replace(
        block,
        products=products,
        attention=tuple(_core(shape, core, block) for core in block.attention),
        weights=tuple(_weight(w, block.kind, products) for w in block.weights),
    )


def cached_shape(shape: ModelShape) -> ModelShape:
    """The shape as it was traced, with the key/value heads that are cached; of latent attention
    those that a prompt attends to, of which none is."""
    blocks = {}
    planned = any(p.split != "outside" for b in shape.blocks.values() for p in b.products)
    for kind, block in shape.blocks.items():
        cores = served_shape(shape).blocks[kind].attention
        if planned:  # what is `outside` then is whole on every rank
            cores = tuple(
                own
                if latent_width(own, block)
                else dataclasses.replace(own, kv_heads=core.kv_heads)
                for own, core in zip(block.attention, cores, strict=True)
            )
        blocks[kind] = dataclasses.replace(block, attention=cores)
    return dataclasses.replace(shape, blocks=blocks)


def _core(shape: ModelShape, core: Attention, block: BlockShape) -> Attention:
    if latent_width(core, block) or core.kv_heads < core.heads:  # which were not repeated
        return dataclasses.replace(core, split="inside")
    keys = _made_heads(core, block)
    if keys is None:  # of an earlier layer (Gemma 3n)
        sizes = core.heads, core.head_dim, core.value_dim
        keys = next(
            (
                made
                for other in shape.blocks.values()
                for one in other.attention
                if (one.heads, one.head_dim, one.value_dim) == sizes
                and (made := _made_heads(one, other))
            ),
            core.kv_heads,
        )
    return dataclasses.replace(core, split="inside", kv_heads=keys)


def _made_heads(core: Attention, block: BlockShape) -> int | None:
    """Key/value heads that the products of a block yield; None: they yield none, or something
    else."""
    inputs = [p for p in block.products if _reads_layer(p, core, block)]
    width = sum(p.n for p in inputs) - core.heads * core.head_dim
    found, rest = divmod(width, core.head_dim + core.value_dim)
    return int(found) if rest == 0 and 1 <= found <= core.heads else None


def _reads_layer(p: MatrixProduct, core: Attention, block: BlockShape) -> bool:
    """Whether a product makes queries, keys or values."""
    return p.name.startswith(core.name) and p is not _end(core, block)


def _end(core: Attention, block: BlockShape) -> MatrixProduct | None:
    """The product that reads what attention yields: the last of its module, or the next of the
    module around it (BERT: `attention.self` and `attention.output`)."""
    width, around = core.heads * core.value_dim, core.name.rpartition(".")[0]
    own = [i for i, q in enumerate(block.products) if q.name.startswith(core.name)]
    if not own:
        return None
    last = block.products[own[-1]]
    for after in block.products[own[-1] + 1 : own[-1] + 2]:
        if around and after.name.startswith(f"{around}.") and (after.k, after.n) == (width, last.k):
            return after
    return last if last.k == width else None


def _split(shape: ModelShape, block: BlockShape, index: int) -> str:
    p = block.products[index]
    if p.split != "outside":
        return p.split
    if block.kind == "head":
        return "vocab"
    for core in block.attention:
        if p is _end(core, block):
            return "row"
        if p.name.startswith(core.name):
            latent = latent_width(core, block)
            whole = latent and p.k == shape.hidden and p.n < shape.hidden
            return "outside" if whole else "column"
    if p.groups > 1:
        earlier = any(q.name == p.name for q in block.products[:index])
        return "row" if earlier else "column"
    if p.k == shape.hidden and p.n <= ROUTER:
        return "outside"
    return "column" if p.k == shape.hidden else "row"


def _weight(weight: Weight, kind: str, products: tuple[MatrixProduct, ...]) -> Weight:
    if weight.split != "outside":
        return weight
    if kind == "embedding" and weight.elements > 1 << 20:
        return dataclasses.replace(weight, split="vocab", units=1 << 16)
    for p in products:
        if weight.name.startswith(p.name + ".") and p.split != "outside":
            if p.groups > 1:
                return dataclasses.replace(weight, split="expert", units=1 << 16)
            if weight.elements == p.n * p.k:
                return dataclasses.replace(weight, split=p.split, units=1 << 16)
    return weight
