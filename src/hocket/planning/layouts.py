"""A layout as a row of columns, and the reasons for which one is not legal.

`planning.enumeration` makes all that are.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np

from hocket.cost.layout_batch import (
    NAMES,
    SCHEDULES,
    Layouts,
    schedule_number,
)
from hocket.cost.recomputed import feed_forward_part
from hocket.planning.pins import Pins
from hocket.schedules.registry import compute
from hocket.spec import legality, recompute
from hocket.spec.capabilities import TABLE
from hocket.spec.cut import choose_cut
from hocket.spec.errors import LayoutError
from hocket.spec.layout import AXES, OFFLOAD, Layout, divisors
from hocket.spec.model_shape import ModelShape

LATE = ("zero-bubble", "zb-v")
"""Schedules that put the weights' gradients off."""

_NAMED = {value: name for name, value in NAMES.items()}


def layout_at(layouts: Layouts, index: int) -> Layout:
    row = {f.name: int(getattr(layouts, f.name)[index]) for f in dataclasses.fields(Layouts)}
    return Layout(
        dp=row["dp"],
        pp=row["pp"],
        cp=row["cp"],
        tp=row["tp"],
        ep=row["ep"],
        etp=None if row["etp"] == row["tp"] else row["etp"],
        schedule=_NAMED[SCHEDULES[row["schedule"]]],
        microbatches=row["microbatches"],
        pipeline_split="light-ends" if row["lighter"] else "balanced",
        virtual_stages=row["virtual"],
        zero=row["zero"],
        shard=row["shard"] if row["zero"] and row["shard"] != row["dp"] else None,
        recompute=recompute.name(row["recompute"]),
        sequence_parallel=bool(row["sequence_parallel"]),
        offload=OFFLOAD[row["offload"]],
    )


def row(layout: Layout, shape: ModelShape, seq_len: int, global_batch: int) -> Layouts:
    """One layout as one row. Microbatches that are left open are resolved as for a run.

    Raises:
        LayoutError: it does not fit the model or the batch.
        OptionError: a schedule that has no price.
        ScheduleError: stages or microbatches that its schedule cannot take.
    """
    problem = next(_problems(layout, shape, seq_len, global_batch), None)
    if problem is not None:
        raise LayoutError(f"the layout {layout}: {problem[0]}", hint=problem[1])
    schedule = schedule_number(layout)
    batch = global_batch // layout.dp
    count = layout.microbatches or legality.usual_microbatches(batch, layout.pp, seq_len)
    _require_schedule(
        layout.schedule, layout.pp, layout.virtual_stages, count if layout.virtual_stages > 1 else 1
    )
    values = {
        **{axis: getattr(layout, axis) for axis in ("dp", "pp", "cp", "tp", "ep", "zero")},
        "etp": layout.expert_tp,
        "virtual": layout.virtual_stages,
        "microbatch": batch // count,
        "microbatches": count,
        "shard": layout.shard or layout.dp,
        "recompute": recompute.code(layout.recompute),
        "sequence_parallel": layout.sequence_parallel,
        "schedule": schedule,
        "lighter": _has_light_ends(layout, len(shape.layers)),
        "offload": OFFLOAD.index(layout.offload),
    }
    return Layouts(**{name: np.array([float(value)]) for name, value in values.items()})


def _has_light_ends(layout: Layout, layers: int) -> bool:
    """Whether the first and the last stage have one layer fewer, by name or by hand."""
    asked = layout.pipeline_split
    if not isinstance(asked, tuple) or not legality.light_ends(layers, len(asked)):
        return asked == "light-ends"
    if len(asked) == 2:  # both ends as long as in halves
        return False
    return asked == choose_cut("light-ends", layers, len(asked))


@functools.lru_cache(maxsize=1024)
def _require_schedule(name: str, pp: int, virtual_stages: int, microbatches: int) -> None:
    """Refuse what the schedule cannot take; of a plan's hundreds of rows many ask for the same.

    Raises:
        ScheduleError: as `schedules.registry.compute`.
    """
    compute(Layout(pp=pp, virtual_stages=virtual_stages, schedule=name), microbatches)


def _problems(
    layout: Layout, shape: ModelShape, seq_len: int, global_batch: int
) -> Iterator[tuple[str, str | None]]:
    """What does not fit, each with a hint."""
    degrees, layers = tensor_degrees(shape), len(shape.layers)
    if layout.tp not in degrees:
        near = min(degrees, key=lambda n: abs(n - layout.tp))
        yield f"{shape.heads} heads do not divide over tp {layout.tp}", layout.flag_with(tp=near)
    if isinstance(layout.pipeline_split, tuple):
        pass  # `choose_cut` counts them
    elif layout.pipeline_split == "light-ends":
        if not legality.light_ends(layers, layout.num_stages):
            yield (
                f"{layers} layers cannot be cut into {layout.num_stages} stages of which the first "
                "and the last have one layer fewer",
                layout.flag_with(pipeline_split="balanced"),
            )
    elif not legality.stages(layers, layout.num_stages):
        fewer = layout.flag_with(pp=min(layers, layout.pp), virtual_stages=1)
        yield f"{layers} layers cannot be cut into {layout.num_stages} stages", fewer
    if not legality.context(seq_len, layout.cp, shape.handed_width):
        yield _unsplit(seq_len, layout.cp, shape), None
    if layout.splits_experts and not shape.experts:
        why = f"{shape.name} has no experts to divide over ranks, as {layout.axes_text()} does"
        yield why, layout.flag_with(ep=1, etp=None)
    elif not legality.experts(shape.experts, layout.ep):
        why = f"{shape.experts} experts do not divide over ep {layout.ep}"
        yield why, layout.flag_with(ep=1, etp=None)
    if layout.sequence_parallel and not legality.slices(seq_len, layout.cp, layout.tp):
        why = f"a sequence of {seq_len} does not divide over cp x tp"
        if layout.tp == 1:
            why = "sequence_parallel shards sequences over tensor ranks, and tp is 1"
        yield why, layout.flag_with(sequence_parallel=False)
    if layout.recompute_layers is not None:
        why = "the planner estimates full recomputation, or none"
        yield why, layout.flag_with(recompute_layers=None)
    if unmet := unmet_recompute(shape, layout.recompute):
        yield unmet, layout.flag_with(recompute="full")
    batch = global_batch // layout.dp
    if not legality.batch(global_batch, layout.dp):
        what = f"the global batch of {global_batch} does not divide over dp {layout.dp}"
        yield what, f"--global-batch {max(1, batch) * layout.dp}"
    elif not legality.microbatches(batch, layout.microbatches or 1):
        fits = [n for n in divisors(batch) if n <= (layout.microbatches or 1)]
        yield (
            f"the batch of {batch} of each data rank does not divide into "
            f"{layout.microbatches} microbatches",
            layout.flag_with(microbatches=fits[-1]),
        )


def runs_here(layouts: Layouts, axes: Collection[str] | None = None) -> np.ndarray:
    """[r] bool: which rows the runtime can carry out, by `spec.capabilities`.

    Args:
        axes: under which the model's type trains; None: not known, any.
    """
    columns = {
        "cp": layouts.cp,
        "ep": layouts.ep,
        "zero": layouts.zero,
        "sequence_parallel": layouts.sequence_parallel,
    }
    found = np.ones(len(layouts), dtype=bool)
    hybrid = layouts.shard != layouts.dp
    found &= ~hybrid | ((layouts.ep == 1) & (layouts.etp == layouts.tp))
    for row in (row for row in TABLE if row.field in columns):  # an etp is tp or 1
        found &= np.isin(columns[row.field], [float(v) for v in row.runs])
    if axes is not None:
        for unsplit in not_trained(layouts, axes).values():
            found &= ~unsplit
    return found


def not_trained(at: Layouts | Layout, axes: Collection[str]) -> dict[str, Any]:
    """By axis that is not among those under which a model's type trains: whether a layout uses it,
    or [r] bool of many."""
    found = {axis: getattr(at, axis) > 1 for axis in ("pp", "cp", "tp", "ep") if axis not in axes}
    if "sequence" not in axes:
        found["sequence_parallel"] = at.sequence_parallel > 0
    return found


def concatenate(parts: Sequence[Layouts]) -> Layouts:
    """The rows of all parts, in order."""
    if len(parts) == 1:
        return parts[0]
    names, none = [field.name for field in dataclasses.fields(Layouts)], np.empty(0)
    return Layouts(**{n: np.concatenate([none, *(getattr(p, n) for p in parts)]) for n in names})


def unmet_pin(shape: ModelShape, num_gpus: int, seq_len: int, batch: int, pins: Pins) -> str | None:
    """What keeps pins from being legal, if it is one of them alone."""
    degrees = tensor_degrees(shape)
    if pins.get("tp", 1) not in degrees:
        return f"tp {pins['tp']} does not divide its {shape.heads} heads; it may be " + ", ".join(
            map(str, degrees)
        )
    counts = len(shape.layers), pins.get("pp", 1)
    if not (legality.stages(*counts) or legality.light_ends(*counts)):
        return f"it has {len(shape.layers)} layers, fewer than pp {pins['pp']}"
    if ("etp" in pins or pins.get("ep", 1) > 1) and not shape.experts:
        return "it has no experts to divide over ranks"
    if not legality.experts(shape.experts, pins.get("ep", 1)):
        return f"its {shape.experts} experts do not divide over ep {pins['ep']}"
    used = math.prod(pins.get(axis, 1) for axis in AXES)
    if num_gpus % used:
        return f"the pinned axes use {used} GPUs, which does not divide {num_gpus}"
    for name in ("dp", "microbatch", "microbatches"):
        if not legality.batch(batch, pins.get(name, 1)):
            return f"the global batch of {batch} does not divide by {name} {pins[name]}"
    if not legality.context(seq_len, pins.get("cp", 1), shape.handed_width):
        return _unsplit(seq_len, pins["cp"], shape)
    if pins.get("sequence_parallel") and pins.get("tp") == 1:
        return "sequence_parallel shards sequences over tensor ranks, and tp is pinned at 1"
    offload = pins.get("offload", "none")
    if "params" in offload and pins.get("zero", 3) != 3:
        return f"offload={offload} needs zero=3, and zero is pinned at {pins['zero']}"
    if "activations" in offload and pins.get("recompute") == "full":
        return (
            "recompute=full saves a layer's input alone, which stays on the GPU under "
            f"offload={offload}; recompute=selective works with it"
        )
    if why := unmet_recompute(shape, pins.get("recompute", "none")):
        return why
    if "shard" in pins and pins.get("zero") == 0:
        return f"shard {pins['shard']} applies to ZeRO, and zero is pinned at 0"
    return None


def unmet_recompute(shape: ModelShape, text: str) -> str:
    """Why the layers of a model cannot be recomputed so; empty: they can."""
    if not {"core_attn", "mlp"} & {*recompute.modules(text)}:
        return ""
    blocks = [shape.blocks[kind] for kind in dict.fromkeys(shape.layers)]
    return recompute.rejected(
        text,
        cores=any(b.attention for b in blocks) and not shape.own_attention,
        feed_forward=any(feed_forward_part(b).products for b in blocks),
    )


def _unsplit(seq_len: int, cp: int, shape: ModelShape) -> str:
    """Why context ranks cannot divide a sequence."""
    if not legality.context(seq_len, cp):
        return f"a sequence of {seq_len} does not divide over 2 x cp {cp}"
    return (
        f"a sequence of {seq_len} over 2 x cp {cp} has chunks of {seq_len // (2 * cp)}, fewer than "
        f"the {shape.handed_width} earlier inputs that its convolutions read"
    )


def tensor_degrees(shape: ModelShape) -> list[int]:
    """The degrees of tensor parallelism that divide a model."""
    weights = [
        weight
        for block in shape.blocks.values()
        for weight in block.weights
        if weight.split in ("column", "row", "inside")
    ]
    return [
        tp
        for tp in divisors(shape.heads)
        if legality.attention(shape.heads, shape.kv_heads, tp)
        and all(weight.divides(tp) for weight in weights)
        and legality.rows(shape.vocab, tp)
    ]
