"""Validation: does the layout fit the model, the batch and the machine? Asked before ranks start.

Torch-free: the model's dimensions hold every number that is needed. What divides what is said by
`spec.legality`, which the planner reads too; this is how a rejection is worded.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from hocket.spec import legality
from hocket.spec.capabilities import TABLE, absent
from hocket.spec.errors import LayoutError, OptionError
from hocket.spec.layout import TERMS, Layout, divisors
from hocket.spec.run import Workload

if TYPE_CHECKING:
    from hocket.models.dimensions import Dimensions

_UNSUPPORTED = tuple(row.field for row in TABLE if row.field not in TERMS)

_WRITTEN = ("zero", "shard", "recompute", "recompute_layers", "sequence_parallel")
"""Fields that have no flag: they stand in the layout's text."""

LARGEST_WORLD = 256
"""Ranks that hocket starts on one machine; more are joined through torchrun or Slurm."""


def validate_layout(
    model: Dimensions, layout: Layout, workload: Workload, *, world_size: int | None = None
) -> Layout:
    """The layout with its microbatches resolved, if it fits.

    Args:
        model: the model's sizes.
        world_size: ranks that a launcher has started, None where hocket starts its own.

    Raises:
        LayoutError: the first number that does not fit, with the nearest layouts that do.
        OptionError: a sequence longer than the model has positions for.
    """
    if model.max_positions is not None and workload.seq_len > model.max_positions:
        raise OptionError(
            f"seq_len is {workload.seq_len}; the model has {model.max_positions} positions",
            hint=f"--seq-len {model.max_positions}",
        )
    problem = next(_problems(model, layout, workload, world_size), None)
    if problem is not None:
        near = nearest_layouts(model, layout, workload, world_size=world_size)
        if layout.sequence_parallel and layout.tp == 1:
            # The flag stays where it was typed: what is near has to have tensor ranks.
            wider = dataclasses.replace(layout, tp=2)
            near = [wider] if next(_problems(model, wider, workload, None), None) is None else near
        raise LayoutError(problem, hint=" or ".join(_flags(layout, n) for n in near) or None)
    return dataclasses.replace(layout, microbatches=resolved_microbatches(layout, workload))


def resolved_microbatches(layout: Layout, workload: Workload) -> int:
    """Microbatches per data rank: as asked, or as usual."""
    if layout.microbatches is not None:
        return layout.microbatches
    batch = workload.global_batch // layout.dp
    return legality.usual_microbatches(batch, layout.pp, workload.seq_len)


def _problems(
    model: Dimensions, layout: Layout, workload: Workload, world_size: int | None
) -> Iterator[str]:
    yield from (row.reason(layout) for row in absent(layout))
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
    yield from _experts(model, layout)
    yield from _pipeline(model, layout)
    sliced = legality.slices(workload.seq_len, layout.cp, layout.tp)
    if layout.sequence_parallel and layout.tp == 1:
        yield (
            "sequence_parallel shards activations between split blocks over tensor ranks, of which "
            "there must be at least 2; tp is 1"
        )
    elif layout.sequence_parallel and not sliced:
        yield (
            f"sequences of {workload.seq_len} tokens do not divide over tp {layout.tp}, as "
            "sequence parallelism needs"
        )
    if not legality.context(workload.seq_len, layout.cp):
        chunks = 2 * layout.cp
        near = max(chunks, workload.seq_len - workload.seq_len % chunks)
        yield (
            f"sequences of {workload.seq_len} tokens do not divide into 2 x cp = {chunks} chunks; "
            f"--seq-len {near} does"
        )
    elif not legality.context(workload.seq_len, layout.cp, model.handed_width):
        chunks = 2 * layout.cp
        yield (
            f"sequences of {workload.seq_len} tokens are cut into 2 x cp = {chunks} chunks of "
            f"{workload.seq_len // chunks}, fewer than the {model.handed_width} earlier inputs "
            f"that a convolution of the model reads; --seq-len {chunks * model.handed_width} is "
            "enough"
        )
    batch = workload.global_batch // layout.dp
    if not legality.batch(workload.global_batch, layout.dp):
        yield f"the global batch of {workload.global_batch} does not divide over dp {layout.dp}"
    elif layout.microbatches and not legality.microbatches(batch, layout.microbatches):
        yield (
            f"the batch of {batch} sequences of each data rank ({workload.global_batch} / dp "
            f"{layout.dp}) does not divide into {layout.microbatches} microbatches"
        )


def _tensor(model: Dimensions, tp: int) -> Iterator[str]:
    if not legality.units(model.num_heads, tp):
        yield f"{model.num_heads} attention heads do not divide over tp {tp}"
    kv = model.num_key_value_heads
    if not legality.copied_units(kv, tp):
        yield f"{kv} key/value heads neither divide over tp {tp} nor are a divisor of it"
    if not legality.units(model.intermediate_size, tp):
        yield f"the MLP's {model.intermediate_size} inner features do not divide over tp {tp}"
    if not legality.rows(model.vocab_size, tp):
        yield f"a vocabulary of {model.vocab_size} leaves a rank of tp {tp} without any row"


def _experts(model: Dimensions, layout: Layout) -> Iterator[str]:
    if not layout.splits_experts:
        return
    if not model.num_experts:
        yield f"the model has no experts, which {layout.axes_text()} places over ranks"
    elif not legality.experts(model.num_experts, layout.ep):
        yield f"{model.num_experts} experts do not divide over ep {layout.ep}"


def _pipeline(model: Dimensions, layout: Layout) -> Iterator[str]:
    stages, layers = layout.num_stages, model.num_layers
    if isinstance(layout.pipeline_split, tuple):
        if sum(layout.pipeline_split) != layers:
            yield (
                f"pipeline_split {'-'.join(map(str, layout.pipeline_split))} places "
                f"{sum(layout.pipeline_split)} layers; "
                f"the model has {layers}"
            )
    elif layout.pipeline_split == "light-ends":
        if not legality.light_ends(layers, stages):
            yield (
                f"{layers} layers cannot be cut into {stages} stages of which the first and the "
                "last have one layer fewer"
            )
    elif not legality.stages(layers, stages):
        yield f"{layers} layers cannot be cut into {stages} stages"
    elif layout.pipeline_split == "even" and not legality.even_stages(layers, stages):
        yield f"{layers} layers do not divide evenly into {stages} stages"
    again, longest = layout.recompute_layers, _longest(layers, stages, layout.pipeline_split)
    if again is not None and not legality.recomputed(again, longest):
        of = f"the longest of {stages} stages holds at most {longest} of its " if stages > 1 else ""
        yield f"recompute_layers is {again}, of each stage; {of or 'the model has '}{layers} layers"


def _longest(layers: int, stages: int, cut: str | tuple[int, ...]) -> int:
    """Layers of the longest stage; where costs are to decide, the most that it can have."""
    if isinstance(cut, tuple):
        return max(cut)
    if cut == "light-ends":
        return (layers + 2) // stages
    return layers // stages if cut == "even" else layers - stages + 1


def nearest_layouts(
    model: Dimensions, layout: Layout, workload: Workload, *, world_size: int | None = None
) -> list[Layout]:
    """The three legal layouts most like `layout`, the nearest first.

    If only options such as the cut must change, the one layout with the same axes. Otherwise
    those whose degrees differ least, of half to twice as many ranks; where none of them is legal,
    those of the most ranks below.
    """
    world = min(layout.world_size, LARGEST_WORLD)
    if layout.data_parallel == "threads":
        sizes = range(1, 2 * layout.dp + 1)
    elif world_size is not None:
        sizes = range(world_size, world_size + 1)
    else:
        sizes = range(max(1, world // 2), min(2 * world, LARGEST_WORLD) + 1)

    def legal(size: int) -> list[Layout]:
        return [
            candidate
            for candidate in _candidates(model, layout, workload, size)
            if next(_problems(model, candidate, workload, world_size), None) is None
        ]

    found = [candidate for size in sizes for candidate in legal(size)]
    if world_size is None:
        fewer = (legal(size) for size in range(sizes[0] - 1, 0, -1))
        found = found or next(filter(None, fewer), [])
    found.sort(key=lambda other: _distance(layout, other))
    if found and found[0].axes_text() == layout.axes_text():
        return found[:1]
    return found[:3]


def _candidates(
    model: Dimensions, layout: Layout, workload: Workload, size: int
) -> Iterator[Layout]:
    """Layouts of `size` ranks (or threads) that keep what they can of the options asked for."""
    if layout.data_parallel == "threads":
        degrees = [(size, 1, 1)]
    else:
        degrees = [
            (dp, pp, size // dp // pp) for dp in divisors(size) for pp in divisors(size // dp)
        ]
    fits = legality.context(workload.seq_len, layout.cp, model.handed_width)
    cp = layout.cp if fits else 1
    if size % cp == 0 and cp > 1:
        degrees += [
            (dp, pp, size // cp // dp // pp)
            for dp in divisors(size // cp)
            for pp in divisors(size // cp // dp)
        ]
    for dp, pp, tp in degrees:
        virtual = layout.virtual_stages if pp == layout.pp else 1
        cut = layout.pipeline_split
        if isinstance(cut, tuple) and (len(cut) != pp * virtual or sum(cut) != model.num_layers):
            cut = "balanced"
        if cut == "even" and not legality.even_stages(model.num_layers, pp * virtual):
            cut = "balanced"
        if cut == "light-ends" and not legality.light_ends(model.num_layers, pp * virtual):
            cut = "balanced"
        again = layout.recompute_layers
        if again and not legality.recomputed(again, _longest(model.num_layers, pp * virtual, cut)):
            again = None
        batch = workload.global_batch // dp
        asked = layout.microbatches
        if asked is not None and batch:
            asked = min(divisors(batch), key=functools.partial(_doublings, asked))
        ep, etp = _expert_degrees(model, layout, dp, tp)
        hybrid = layout.shard if ep == 1 and etp is None else None
        yield Layout(
            dp=dp,
            pp=pp,
            cp=size // (dp * pp * tp) if layout.data_parallel != "threads" else 1,
            tp=tp,
            ep=ep,
            etp=etp,
            virtual_stages=virtual,
            pipeline_split=cut,
            microbatches=asked,
            schedule=layout.schedule,
            zero=layout.zero,
            shard=hybrid if hybrid and legality.shard(dp, hybrid, layout.zero) else None,
            offload=layout.offload,
            recompute=layout.recompute,
            recompute_layers=again,
            sequence_parallel=layout.sequence_parallel and tp > 1,
            data_parallel=layout.data_parallel,
            order=layout.order,
        )


def _expert_degrees(model: Dimensions, layout: Layout, dp: int, tp: int) -> tuple[int, int | None]:
    """The ep and etp of another dp and tp, as near as they can be to those asked for."""
    if not layout.splits_experts or not model.num_experts:
        return 1, None
    etp = 1 if layout.etp is not None and tp > 1 else None
    ranks = dp * tp // (etp or tp)
    legal = [n for n in divisors(ranks) if legality.experts(model.num_experts, n)]
    return min(legal, key=functools.partial(_doublings, layout.ep)), etp


def _doublings(one: float, other: float) -> float:
    return abs(math.log2(one / other))


def _distance(wanted: Layout, other: Layout) -> tuple[float, float, int]:
    """How far the degrees lie apart, in doublings; then the microbatches; then the larger tp."""
    axes = sum(
        _doublings(wanted.degree(axis), other.degree(axis)) for axis in ("dp", "pp", "cp", "tp")
    )
    axes += _doublings(wanted.ep, other.ep)
    world = _doublings(wanted.world_size, other.world_size)
    if wanted.microbatches is None or other.microbatches is None:
        return axes + world / 2, 0.0, other.tp
    return axes + world / 2, _doublings(wanted.microbatches, other.microbatches), other.tp


def _flags(wanted: Layout, other: Layout) -> str:
    """The flags that turn one layout into the other."""
    flags = []
    names = (*_UNSUPPORTED, *_WRITTEN)
    dropped = any(getattr(wanted, name) != getattr(other, name) for name in names)
    if dropped or other.axes_text() != wanted.axes_text():
        kept = {name: getattr(other, name) for name in _WRITTEN}
        written = str(Layout(dp=other.dp, tp=other.tp, **kept)).partition(":")[2]
        flags.append(f"--layout {':'.join(filter(None, (other.axes_text(), written)))}")
    for field in dataclasses.fields(Layout):
        value = getattr(other, field.name)
        if field.name in (*TERMS, *names) or value is None:
            continue
        if value == getattr(wanted, field.name):
            continue
        text = "-".join(map(str, value)) if isinstance(value, tuple) else str(value).lower()
        flags.append(f"--{field.name.replace('_', '-')} {text}")
    return " ".join(flags)
