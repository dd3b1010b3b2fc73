"""Adapters: the shape of a model whose matrices are frozen, with thin trained ones in parallel.

    y = x W^T + (x A^T) B^T alpha / r            A [r, k], B [n, r]          (Hu et al. 2021)

What LoRA saves is in the shape, so that whatever prices a shape prices it: frozen weights have no
gradient, no optimizer state, and their products no third one in backward. What it costs is there as
well: two thin products for each adapted one, the sum of both results, and of both gradients.

As `runtime.lora` splits them: of a matmul split by columns A is replicated and B is split, of
one split by rows A is split and B is whole. Saved for backward is what the frozen model saves (in
the view `eager` of a shape that was traced `frozen`), what A reads and what B reads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from hocket.cost.measured_rates import BYTES
from hocket.spec.errors import OptionError, nearest, unknown
from hocket.spec.model_shape import (
    BlockShape,
    MatrixProduct,
    MemoryBound,
    ModelShape,
    Saved,
    Weight,
)
from hocket.spec.precision import QUANTIZED_BASES
from hocket.spec.run import RunSpec, target_words

VIEWS = {"memory_bound": "fused", "unfused": "eager"}


def adapted_shape(shape: ModelShape, spec: RunSpec) -> ModelShape:
    """The shape as a run trains it: with its adapters, or as it is. Raises OptionError."""
    options = spec.options
    if options.lora_rank is None:
        return shape
    return adapted(
        shape,
        options.lora_rank,
        target_words(options.lora_targets),
        element_bytes=BYTES[spec.workload.dtype],
        base=options.quantize_base,
    )


def of_options(
    shape: ModelShape, rank: int | None, targets: str | None, base: str | None = None
) -> ModelShape:
    """The shape as it is trained: with adapters of that rank, or as it is where there is none.

    Raises:
        OptionError: targets without a rank, a rank below 1, or a layer that is not there.
    """
    if rank is None:
        if targets is not None:
            raise OptionError(
                "--lora-targets names layers, and no rank is given", hint="--lora-rank 8"
            )
        if base is not None:
            raise OptionError(
                "--quantize-base is for a frozen model, and no rank is given", hint="--lora-rank 8"
            )
        return shape
    return adapted(shape, rank, target_words(targets), base=base)


def adapted(
    shape: ModelShape,
    rank: int,
    targets: Collection[str] = (),
    *,
    element_bytes: int = 2,
    base: str | None = None,
) -> ModelShape:
    """The shape under LoRA.

    Args:
        shape: of the model, traced `frozen` where its view `eager` is read.
        rank: r.
        element_bytes: of an activation, in the type that the shape was traced in.
        targets: names of layers, or their ends after a dot (`q_proj`); none: every linear layer but
            the head. Stacked experts are no linear layers.
        base: the quantization of the frozen linear layers (`QUANTIZED_BASES`), as `--quantize-base`
            has it. The time of their unpacking is not estimated.

    Raises:
        OptionError: a rank below 1, or a target that is in no layer, with the nearest.
    """
    if rank < 1:
        raise OptionError(f"the rank of LoRA is {rank}; it must be at least 1", hint="rank 8 or 16")
    layers = {kind: shape.blocks[kind] for kind in dict.fromkeys(shape.layers)}
    leaves = sorted({p.name.rpartition(".")[2] for b in layers.values() for p in _linear(b)})
    for word in targets:
        if not any(_means(word, p.name) for b in layers.values() for p in _linear(b)):
            near = nearest(word, leaves)
            raise OptionError(
                f"{shape.name} has no linear layer {word!r}; it has {', '.join(leaves)}",
                hint=f"--lora-targets {near or 'all-linear'}",
            )
    if base is not None and base not in QUANTIZED_BASES:
        message, hint = unknown("quantize_base", base, QUANTIZED_BASES)
        raise OptionError(message, hint=hint)
    smaller = 1.0 if base is None else QUANTIZED_BASES[base] / element_bytes
    blocks = {
        name: _stored(_adapted(block, rank, targets, element_bytes), smaller)
        if name in layers
        else _frozen(block)
        for name, block in shape.blocks.items()
    }
    return dataclasses.replace(shape, blocks=blocks)


def _linear(block: BlockShape) -> list[MatrixProduct]:
    return [p for p in block.products if not p.bare]


def _means(word: str, name: str) -> bool:
    return name == word or name.endswith(f".{word}")


def _frozen(block: BlockShape) -> BlockShape:
    return dataclasses.replace(
        block,
        products=tuple(dataclasses.replace(p, frozen=True) for p in block.products),
        weights=tuple(dataclasses.replace(w, frozen=True) for w in block.weights),
    )


def _stored(block: BlockShape, smaller: float) -> BlockShape:
    """The block, the frozen weights of its linear layers stored in a fraction of their bytes."""
    names = {f"{p.name}.weight" for p in _linear(block)}
    return dataclasses.replace(
        block,
        weights=tuple(
            dataclasses.replace(w, stored=smaller) if w.frozen and w.name in names else w
            for w in block.weights
        ),
    )


def _behind(saved: list[Saved], product: MatrixProduct) -> int:
    """Where in a block's saved tensors, which are in the order of the forward, those of a matmul's
    adapter are: behind its input and the adapters that read that too; of an input that is not
    saved, behind the module that makes it."""
    rows = [row.name if row.view != "fused" else "" for row in saved]
    if product.input in rows:
        at = rows.index(product.input) + 1
        while at < len(rows) and rows[at].endswith(".lora_A"):
            at += 1
        return at
    makes = product.input.partition(":")[0]
    inside = [i for i, row in enumerate(rows) if row.startswith((f"{makes}.", f"{makes}:"))]
    return inside[-1] + 1 if inside else len(rows)


def _adapted(
    block: BlockShape, rank: int, targets: Collection[str], element_bytes: int
) -> BlockShape:
    frozen = _frozen(block)
    chosen = [
        p for p in _linear(block) if not targets or any(_means(word, p.name) for word in targets)
    ]
    products, weights, saved = list(frozen.products), list(frozen.weights), list(frozen.saved)
    kept = {row.name for row in saved if row.view == "eager"}
    moved = {field: list(getattr(block, field)) for field in VIEWS}
    width = element_bytes / 2  # elements are counted as of 16 bits
    for p in chosen:
        own = next((w for w in block.weights if w.name.startswith(f"{p.name}.")), None)
        units = own.units if own is not None else p.k if p.split == "row" else p.n
        first = "row" if p.split == "row" else "outside"
        second = "outside" if p.split in ("row", "outside") else p.split
        thin = f"{p.name}.lora_A", f"{p.name}.lora_B"
        products += [
            MatrixProduct(
                name=thin[0], n=rank, k=p.k, split=first, count=p.count, input=p.input, lora=True
            ),
            MatrixProduct(
                name=thin[1], n=p.n, k=rank, split=second, count=p.count, input=thin[0], lora=True
            ),
        ]
        for name, elements, split in (
            (thin[0], rank * p.k, first),
            (thin[1], p.n * rank, second),
        ):
            count = 1 if split == "outside" else units
            weights.append(
                Weight(name=f"{name}.weight", elements=elements, split=split, units=count)
            )
        entered = "inside" if p.split == "row" else "outside"
        at = _behind(saved, p)
        if p.input not in kept:  # what A reads; frozen matrices alone would not keep it
            kept.add(p.input)
            size = float(element_bytes * p.k * p.count)
            saved.insert(at, Saved(name=p.input, bytes=size, split=entered, view="eager"))
            at += 1
        thin_bytes = element_bytes * rank * p.count
        saved.insert(at, Saved(name=thin[0], bytes=thin_bytes, split="outside"))
        left = "inside" if p.split in ("column", "vocab") else "outside"
        for field, view in VIEWS.items():
            moved[field] += [
                MemoryBound(
                    name=f"{p.name} and its adapter",
                    forward=width * (3 * p.n + 2 * rank) * p.count,
                    backward=width * 2 * rank * p.count, split=left, kernels=2, view=view,
                ),
                MemoryBound(
                    name=f"gradients of {p.name} and its adapter", forward=0.0,
                    backward=width * 3 * p.k * p.count, split=entered, kernels=0, view=view,
                ),
            ]  # fmt: skip
    return dataclasses.replace(
        frozen,
        products=tuple(products),
        weights=tuple(weights),
        saved=tuple(saved),
        memory_bound=tuple(moved["memory_bound"]),
        unfused=tuple(moved["unfused"]),
    )
