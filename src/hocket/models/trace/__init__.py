"""A model reads itself: one run on fake tensors tells every size that a plan needs.

    trace(config) -> ModelShape

Nothing here knows a family. The model is built at its real size without memory, the first layer of
each kind runs forward and backward once, and the graph of what ran is turned into products,
memory-bound kernels, bytes held for backward, and weights; the model's parallel plan says how each
is split.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from hocket.models import skeleton
from hocket.models.attention import flexible
from hocket.models.context_scans import state_sizes
from hocket.models.failure import raise_if_exhausted
from hocket.models.plans.tensor import tensor_plan
from hocket.models.proxy import proxy_of
from hocket.models.trace.fused import Costs
from hocket.models.trace.graph import Splits
from hocket.models.trace.positions import lengthened
from hocket.models.trace.record import PRIMES, TracedSize, WrittenOut
from hocket.models.trace.run import Run, run_trace
from hocket.spec.model_shape import BlockShape, Handed, ModelShape, Weight
from hocket.spec.plan import Split, TensorPlan, WeightSegment, matches

_STYLES = {
    "column": "column",
    "row": "row",
    "vocab_embedding": "vocab",
    "vocab_head": "vocab",
    "sum_grad": "outside",
    "experts": "expert",
}

_THRESHOLDS = ("keep_window_size", "index_topk")
"""Sizes of configurations: for a longer sequence, a family's own code selects positions."""

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}

_cache: dict[str, ModelShape] = {}


def trace(
    model: Mapping[str, Any] | nn.Module | Any,
    *,
    name: str = "",
    dropout: float | None = None,
    dtype: str = "bf16",
    frozen: bool = False,
    size: tuple[int, int] | None = None,
) -> ModelShape:
    """The shape of a causal language model.

    Args:
        model: a Hugging Face configuration (dictionary or object), or a model that carries one.
        name: what the shape is called; its model type if not given.
        dropout: overrides every dropout probability; None: as configured.
        dtype: of weights and activations, `bf16` or `fp32`. Rows of the view `eager` hold the
            bytes of that very type (an element is two of them still); `fused` ones are of bf16.
        frozen: no weight has a gradient: rows of the view `eager` are what is saved and moved for
            the gradient of the input alone (`cost.adapters` adds what adapters save).
        size: rows of a microbatch and tokens of each. Where a family saves what does not grow with
            tokens (`ModelShape.uneven`), the rows `saved` of the view `eager` are those of this
            size, per token; None: what does not grow with tokens is left out. A recurrence that is
            written out position by position has all its figures of so many tokens.

    Returns:
        its shape; the same configuration is traced once in a process.

    Raises:
        ModelError: transformers cannot build it, or it cannot be run without values.
    """
    values: Any = model.config if isinstance(model, nn.Module) else model
    if isinstance(values, Mapping):
        config: Any = skeleton.config_of(dict(values), dropout=dropout, router_loss=False)
    else:
        config = skeleton.config_of(values.to_dict(), dropout=dropout, router_loss=False)
    if not hasattr(config, "num_hidden_layers"):  # a model of text and images: its text part
        config = config.get_text_config()
    text = json.dumps([config.to_dict(), name, dtype, frozen, size], sort_keys=True, default=str)
    key = hashlib.sha256(text.encode()).hexdigest()
    if key not in _cache:

        def of(traced: TracedSize | None) -> ModelShape:
            done = run_trace(config, _DTYPES[dtype], frozen=frozen, traced=traced)
            return _shape(done, name or str(config.model_type))

        try:
            found = of(None)
            if found.uneven and size is not None:
                found = _with_saved(found, of(TracedSize(*size)))
        except WrittenOut:
            rows, tokens = size or (0, PRIMES.sequence)
            found = lengthened(lambda short: of(TracedSize(sequence=short)), tokens)
            if size is not None:
                sized = lengthened(lambda short: of(TracedSize(rows, short)), tokens)
                found = _with_saved(found, sized)
        _cache[key] = found
    return _cache[key]


def _with_saved(shape: ModelShape, sized: ModelShape) -> ModelShape:
    """The shape with what another one saves in the eager view."""
    views = ("eager", "shared", "backward")
    blocks = {}
    for kind, block in shape.blocks.items():
        rows = [row for row in block.saved if row.view not in views]
        rows += [row for row in sized.blocks[kind].saved if row.view in views]
        blocks[kind] = dataclasses.replace(block, saved=tuple(rows))
    return dataclasses.replace(shape, blocks=blocks)


def _plan(done: Run) -> TensorPlan | None:
    """The tensor plan of the model; of a family without one it is inferred, as for training."""
    config: Any = done.model.config
    decoder = done.layers.rpartition(".")[0]
    try:
        if plan := tensor_plan(done.model, decoder)[0]:
            return plan
        return tensor_plan(done.model, decoder, proxy_of(config), done.layers)[0]
    except Exception as error:  # heads counted another way, or a proxy model that fails
        raise_if_exhausted(error)
        return None


def _shape(done: Run, name: str) -> ModelShape:
    config: Any = done.model.config
    plan = _plan(done)
    picked = sorted(set(done.kinds))
    names = _names(done, picked)
    weights, splits = _weights(done, plan, picked)
    kv_heads = _number(config, "num_key_value_heads")
    blocks: dict[str, BlockShape] = {}
    uneven = any(_number(config, name) for name in _THRESHOLDS)
    for key, part in done.parts.items():
        kind = names[int(key)] if key.isdigit() else key
        costs = Costs(
            part,
            done.recorder.values,
            splits,
            window=_window(done, int(key)) if key.isdigit() else None,
            kv_heads=kv_heads,
            leaves=done.leaves,
            linear=done.linear,
        )
        uneven = uneven or costs.uneven()
        blocks[kind] = BlockShape(
            kind=kind,
            products=costs.products(),
            attention=costs.attention(),
            handed=_handed(done, key) if key.isdigit() else (),
            memory_bound=costs.memory_bound(),
            saved=costs.saved(),
            unfused=costs.unfused(),
            weights=tuple(weights[key]),
            buffers=_buffers(done, key) if key.isdigit() else 0,
        )
    layers = tuple(names[index] for index in done.kinds)
    blocks = _numbered(blocks, dict.fromkeys((*layers, *blocks)))
    found = [core for block in blocks.values() for core in block.attention]
    heads = max((core.heads for core in found), default=_number(config, "num_attention_heads"))
    products = [p for block in blocks.values() for p in block.products if p.groups > 1]
    return ModelShape(
        name=name,
        hidden=int(config.hidden_size),
        vocab=int(config.vocab_size),
        heads=heads if plan is not None else 1,
        kv_heads=min((core.kv_heads for core in found), default=heads) if plan is not None else 1,
        layers=layers,
        blocks=blocks,
        tied=bool({w.name for w in weights["head"]} & {w.name for w in weights["embedding"]}),
        experts=max((p.groups for p in products), default=0),
        experts_per_token=round(max((p.count for p in products), default=0)),
        uneven=uneven,
        flexible=flexible(done.model),
        own_attention=bool(found) and not done.asks,
    )


def _handed(done: Run, index: str) -> tuple[Handed, ...]:
    """What a layer hands on along the sequence, where that is known."""
    config: Any = done.model.config
    layer = done.model.get_submodule(f"{done.layers}.{index}")
    return tuple(state_sizes(layer, int(config.hidden_size)).values())


def _buffers(done: Run, index: str) -> int:
    """Elements of a layer's tensors that are no parameters."""
    layer = done.model.get_submodule(f"{done.layers}.{index}")
    return sum(buffer.numel() for buffer in layer.buffers())


def _numbered(blocks: dict[str, BlockShape], order: Iterable[str]) -> dict[str, BlockShape]:
    """The blocks with what they share numbered as layers first use it: a model may make its tables
    in an order of its own in each process, that of a set."""
    names: dict[str, str] = {}
    for row in (row for kind in order for row in blocks[kind].saved if row.view == "shared"):
        what = row.name.partition(" ")[0]
        count = sum(name.startswith(f"{what} ") for name in names)
        names.setdefault(row.name, f"{what} {count}")
    return {
        kind: dataclasses.replace(
            block,
            saved=tuple(
                dataclasses.replace(row, name=names[row.name]) if row.view == "shared" else row
                for row in block.saved
            ),
        )
        for kind, block in blocks.items()
    }


def _number(config: Any, key: str) -> int:
    """A count of the configuration; 0 where it has none for the whole model."""
    try:
        return int(getattr(config, key, None) or 0)
    except (AttributeError, RuntimeError, TypeError, ValueError):  # it differs by layer
        return 0


def _names(done: Run, picked: list[int]) -> dict[int, str]:
    """A name for each kind of layer: what its configuration calls it, or its first index."""
    if len(picked) == 1:
        return {picked[0]: "block"}
    types = getattr(done.model.config, "layer_types", None)
    found: dict[int, str] = {}
    for index in picked:
        name = str(types[index]) if types and index < len(types) else "block"
        found[index] = name if name not in found.values() else f"{name}-{index}"
    return found


def _window(done: Run, index: int) -> int | None:
    """How far back the attention of a layer looks; None: to the beginning."""
    config: Any = done.model.config
    types = getattr(config, "layer_types", None)
    if types:
        kind = str(types[index])
        if "sliding" in kind:
            return int(config.sliding_window) if config.sliding_window else None
        if "chunked" in kind:
            return int(config.attention_chunk_size)
        return None
    if getattr(config, "use_sliding_window", True) is False:
        return None
    window = getattr(config, "sliding_window", None)
    return int(window) if isinstance(window, int) and window > 0 else None


def _weights(
    done: Run, plan: TensorPlan | None, picked: list[int]
) -> tuple[dict[str, list[Weight]], Splits]:
    """The weights of every part, and how each is split."""
    depth = done.layers.count(".") + 1
    parts: dict[str, list[Weight]] = {key: [] for key in done.parts}
    kinds: dict[str, str] = {}
    gathers, up = set(), set()
    used = {
        key: {op.weight for op in (*part.forward, *part.backward)}
        for key, part in done.parts.items()
    }
    # By module: an operation that reads a norm's weight and bias names only one of the two.
    first = {name.rpartition(".")[0] for name in used["embedding"] if name}
    order = list(done.model.named_parameters())
    for full, parameter in order:
        module, _, own = full.rpartition(".")
        if full.startswith(f"{done.layers}."):
            key = full.split(".")[depth]
            if int(key) not in picked:
                continue
            name = ".".join(full.split(".")[depth + 1 :])
        else:
            key = "embedding" if module in first else "head"
            name = full
        split = _split_of(plan, module)
        style, units = "outside", _Units()
        if split is not None and own in split.dims:
            style = _STYLES[split.style]
            segments = split.parameter_segments.get(own, split.segments)
            units = _units(segments, parameter.numel())
            if split.gather_output or split.scatter_input:
                gathers.add(full)
            if style == "expert" and split.dims[own] == _up_dim(split):
                up.add(full)
        kinds[full] = style
        weight = Weight(
            name=name,
            elements=parameter.numel(),
            split=style,
            units=units.most,
            copied_elements=units.copied_elements,
            copied_units=units.copied,
            copyable=units.copyable,
        )
        parts[key].append(weight)
        if key == "embedding" and full in used["head"]:
            parts["head"].append(weight)
    return parts, Splits(weights=kinds, gathers=frozenset(gathers), up=frozenset(up))


def _up_dim(split: Split) -> int:
    """The dim by which stacked up projections are split: 1 of [experts, out, in], 2 of [experts,
    in, out] (Llama 4). Gate and up in one weight are two segments."""
    fused = [split.dims[name] for name, s in split.parameter_segments.items() if len(s) > 1]
    return fused[0] if fused else 1


class _Units(NamedTuple):
    """The units of a parameter, and of its segments that several ranks may hold."""

    most: int = 1
    copied_elements: int = 0
    copied: int = 1
    copyable: bool = True


def _units(segments: Sequence[WeightSegment], numel: int) -> _Units:
    """Of a parameter of so many elements, whose segments are along its split dim."""
    heads = [s for s in segments if s.copies]
    others = [s for s in segments if not s.copies]
    fewest = min((s.units for s in heads), default=1)
    if not others or not heads:
        most = min((s.units for s in segments), default=1)
        return _Units(most=most, copyable=bool(heads) or most == 1)
    rows = sum(s.rows for s in segments)
    return _Units(
        most=min(s.units for s in others),
        copied_elements=numel // rows * sum(s.rows for s in heads),
        copied=fewest,
        copyable=False,
    )


def _split_of(plan: TensorPlan | None, module: str) -> Split | None:
    if plan is None:
        return None
    for pattern, split in plan.splits.items():
        if matches(pattern, module):
            return split
    return None
