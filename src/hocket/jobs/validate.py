"""Validation: does the layout fit the model, the batch and the machine? Asked before ranks start.

Torch-free: the model's configuration holds every number that is needed.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any

from hocket.spec.errors import LayoutError, OptionError
from hocket.spec.layout import DEGREES, Layout, divisors
from hocket.spec.run import Workload

# One number, as the families of Hugging Face spell it.
_HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_INNER = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_POSITIONS = ("max_position_embeddings", "n_positions")

_UNSUPPORTED = ("zero", "shard", "recompute", "sequence_parallel")

LARGEST_WORLD = 256
"""Ranks that hocket starts on one machine; more are joined through torchrun or Slurm."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """The numbers of a model that a layout must divide. None: the configuration is silent."""

    heads: int | None = None
    kv_heads: int | None = None
    layers: int | None = None
    inner: int | None = None
    vocab: int | None = None
    positions: int | None = None


def sizes(config: Mapping[str, Any]) -> Sizes:
    """Read the sizes out of a Hugging Face configuration, whatever its family calls them."""
    text = config.get("text_config")
    if isinstance(text, Mapping):
        config = text

    def first(names: tuple[str, ...]) -> int | None:
        found = (config[name] for name in names if isinstance(config.get(name), int))
        return next((n for n in found if n > 0), None)

    heads, hidden = first(_HEADS), first(_HIDDEN)
    return Sizes(
        heads=heads,
        kv_heads=first(_KV_HEADS) or heads,
        layers=first(_LAYERS),
        inner=first(_INNER) or (4 * hidden if hidden is not None else None),
        vocab=first(("vocab_size",)),
        positions=first(_POSITIONS),
    )


def validate(
    config: Mapping[str, Any], layout: Layout, workload: Workload, *, world_size: int | None = None
) -> Layout:
    """The layout with its microbatches resolved, if it fits.

    Args:
        config: the model's Hugging Face configuration.
        world_size: ranks that a launcher has started, None where hocket starts its own.

    Raises:
        LayoutError: the first number that does not fit, with the nearest layouts that do.
        OptionError: a sequence longer than the model has positions for.
    """
    model = sizes(config)
    if model.positions is not None and workload.seq_len > model.positions:
        raise OptionError(
            f"seq_len is {workload.seq_len}; the model has {model.positions} positions",
            hint=f"--seq-len {model.positions}",
        )
    problem = next(_problems(model, layout, workload, world_size), None)
    if problem is not None:
        near = nearest(model, layout, workload, world_size=world_size)
        raise LayoutError(problem, hint=" or ".join(_flags(layout, n) for n in near) or None)
    return dataclasses.replace(layout, microbatches=microbatches(layout, workload))


def microbatches(layout: Layout, workload: Workload) -> int:
    """Microbatches per data rank: as asked, else 1 without a pipeline, else the largest divisor
    of the rank's batch that is at most 2 x pp."""
    if layout.microbatches is not None:
        return layout.microbatches
    if layout.num_stages == 1:
        return 1
    batch = workload.global_batch // layout.dp
    return max((n for n in divisors(batch) if n <= 2 * layout.pp), default=1)


def _problems(
    model: Sizes, layout: Layout, workload: Workload, world_size: int | None
) -> Iterator[str]:
    yield from _unsupported(layout)
    if world_size is not None and layout.world_size != world_size:
        yield (
            f"the layout {layout.axes_text()} needs {layout.world_size} ranks; "
            f"the launcher started {world_size}"
        )
    if world_size is None and layout.world_size > LARGEST_WORLD:
        yield (
            f"the layout {layout.axes_text()} needs {layout.world_size} ranks; hocket starts at "
            f"most {LARGEST_WORLD} on one machine, more are started by torchrun or Slurm"
        )
    yield from _tensor(model, layout.tp)
    yield from _pipeline(model, layout)
    batch, rest = divmod(workload.global_batch, layout.dp)
    if rest:
        yield f"the global batch of {workload.global_batch} does not divide over dp {layout.dp}"
    elif layout.microbatches is not None and batch % layout.microbatches:
        yield (
            f"the batch of {batch} sequences of each data rank ({workload.global_batch} / dp "
            f"{layout.dp}) does not divide into {layout.microbatches} microbatches"
        )


def _unsupported(layout: Layout) -> Iterator[str]:
    """What a layout can say but this release cannot run."""
    if layout.cp > 1:
        yield f"cp is {layout.cp}: this release has no context parallelism"
    if layout.ep > 1:
        yield f"ep is {layout.ep}: this release splits experts over tp, not over ep"
    if layout.zero or layout.shard is not None:
        yield f"zero is {layout.zero}: this release replicates the optimizer state over dp"
    if layout.recompute != "none":
        yield f"recompute is {layout.recompute}: this release keeps every activation"
    if layout.sequence_parallel:
        yield "sequence_parallel is true: this release keeps whole sequences between layers"


def _tensor(model: Sizes, tp: int) -> Iterator[str]:
    if model.heads is not None and model.heads % tp:
        yield f"{model.heads} attention heads do not divide over tp {tp}"
    kv = model.kv_heads
    if kv is not None and kv % tp and tp % kv:
        yield f"{kv} key/value heads neither divide over tp {tp} nor are a divisor of it"
    if model.inner is not None and model.inner % tp:
        yield f"the MLP's {model.inner} inner features do not divide over tp {tp}"
    # Vocabulary rows may be uneven, but every rank must hold some.
    if model.vocab is not None and (tp - 1) * -(-model.vocab // tp) >= model.vocab:
        yield f"a vocabulary of {model.vocab} leaves a rank of tp {tp} without any row"


def _pipeline(model: Sizes, layout: Layout) -> Iterator[str]:
    stages, layers = layout.num_stages, model.layers
    if layers is None:
        return
    if isinstance(layout.cut, tuple):
        if sum(layout.cut) != layers:
            yield (
                f"the cut {'-'.join(map(str, layout.cut))} places {sum(layout.cut)} layers; "
                f"the model has {layers}"
            )
    elif stages > layers:
        yield f"{layers} layers cannot be cut into {stages} stages"
    elif layout.cut == "even" and layers % stages:
        yield f"{layers} layers do not divide evenly into {stages} stages"


def nearest(
    model: Sizes,
    layout: Layout,
    workload: Workload,
    *,
    world_size: int | None = None,
    count: int = 3,
) -> list[Layout]:
    """The legal layouts most like `layout`, the nearest first.

    If only options such as the cut must change, the one layout with the same axes. Otherwise
    those whose degrees differ least, of half to twice as many ranks.
    """
    world = min(layout.world_size, LARGEST_WORLD)
    if layout.data_parallel == "threads":
        sizes = range(1, 2 * layout.dp + 1)
    elif world_size is not None:
        sizes = range(world_size, world_size + 1)
    else:
        sizes = range(max(1, world // 2), min(2 * world, LARGEST_WORLD) + 1)
    found = [
        candidate
        for size in sizes
        for candidate in _candidates(model, layout, workload, size)
        if next(_problems(model, candidate, workload, world_size), None) is None
    ]
    found.sort(key=lambda other: _distance(layout, other))
    if found and found[0].axes_text() == layout.axes_text():
        return found[:1]
    return found[:count]


def _candidates(model: Sizes, layout: Layout, workload: Workload, size: int) -> Iterator[Layout]:
    """Layouts of `size` ranks (or threads) that keep what they can of the options asked for."""
    if layout.data_parallel == "threads":
        degrees = [(size, 1, 1)]
    else:
        degrees = [
            (dp, pp, size // dp // pp) for dp in divisors(size) for pp in divisors(size // dp)
        ]
    for dp, pp, tp in degrees:
        virtual = layout.virtual_stages if pp == layout.pp else 1
        cut = layout.cut
        if isinstance(cut, tuple) and (len(cut) != pp * virtual or sum(cut) != model.layers):
            cut = "balanced"
        if cut == "even" and model.layers is not None and model.layers % (pp * virtual):
            cut = "balanced"
        batch = workload.global_batch // dp
        asked = layout.microbatches
        if asked is not None and batch:
            asked = min(divisors(batch), key=functools.partial(_doublings, asked))
        yield Layout(
            dp=dp,
            pp=pp,
            tp=tp,
            virtual_stages=virtual,
            cut=cut,
            microbatches=asked,
            schedule=layout.schedule,
            data_parallel=layout.data_parallel,
            order=layout.order,
        )


def _doublings(one: float, other: float) -> float:
    return abs(math.log2(one / other))


def _distance(wanted: Layout, other: Layout) -> tuple[float, float, int]:
    """How far the degrees lie apart, in doublings; then the microbatches; then the larger tp."""
    axes = sum(_doublings(wanted.degree(axis), other.degree(axis)) for axis in ("dp", "pp", "tp"))
    world = _doublings(wanted.world_size, other.world_size)
    if wanted.microbatches is None or other.microbatches is None:
        return axes + world / 2, 0.0, other.tp
    return axes + world / 2, _doublings(wanted.microbatches, other.microbatches), other.tp


def _flags(wanted: Layout, other: Layout) -> str:
    """The flags that turn one layout into the other."""
    flags = []
    dropped = any(getattr(wanted, name) != getattr(other, name) for name in _UNSUPPORTED)
    if dropped or other.axes_text() != wanted.axes_text():
        flags.append(f"--layout {other.axes_text()}")
    for field in dataclasses.fields(Layout):
        value = getattr(other, field.name)
        if field.name in (*DEGREES, *_UNSUPPORTED) or value is None:
            continue
        if value == getattr(wanted, field.name):
            continue
        text = "-".join(map(str, value)) if isinstance(value, tuple) else str(value).lower()
        flags.append(f"--{field.name.replace('_', '-')} {text}")
    return " ".join(flags)
