"""Every legal layout of a model on a number of GPUs, as columns of numbers.

    mesh        dp x pp x cp x tp = GPUs ; tp divides heads, feed-forward and, or is divided by,
                key/value heads ; pp x virtual stages <= layers ; 2 cp divides the sequence
                (causal work is dealt in two halves) ; ep divides experts, and ep x etp
                dp x cp x tp, where etp is tp, or 1 (each expert whole: folding)
    batch       dp x microbatch x microbatches = global batch
    options     schedule, ZeRO stage, recompute, sequence parallel

The rules themselves stand in `spec.legality`, by which a run is refused too.

Left out, unless pinned, is state in the host's memory, which costs time and is for what fits in no
other way (`planning.plan`). So is what another layout beats: gpipe has the step time of 1f1b and
holds more, sequential waits more than either, more virtual stages whose longest has no fewer layers
only send more, recompute under schedules of other software that defer weight gradients keeps what
it makes again, and recompute of attention cores frees nothing where a fused kernel saves no more
than its inputs.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from hocket.cost.layout_batch import (
    NAMES,
    SCHEDULES,
    Layouts,
    schedule_number,
)
from hocket.cost.terms import Floats, has_latent
from hocket.planning.pins import Pins
from hocket.schedules.registry import compute
from hocket.spec import legality, recompute
from hocket.spec.capabilities import TABLE
from hocket.spec.cut import choose_cut
from hocket.spec.errors import LayoutError
from hocket.spec.layout import AXES, OFFLOAD, Layout, divisors
from hocket.spec.model_shape import ModelShape

SEARCHED = ("1f1b", "interleaved", "zero-bubble", "zb-v")
LATE = ("zero-bubble", "zb-v")
"""Schedules that put the weights' gradients off."""
MOST_VIRTUAL = 16

_NAMED = {value: name for name, value in NAMES.items()}


def legal_parts(
    shape: ModelShape,
    num_gpus: int,
    seq_len: int,
    global_batch: int,
    *,
    pins: Pins | None = None,
    here: bool = False,
    domain: int = 1,
    selective: bool = True,
    deferred: bool = False,
) -> Iterator[Layouts]:
    """Every legal layout of exactly `num_gpus` GPUs, one set of options after the other: of a
    mixture on thousands of GPUs they are millions. Rows that differ by the microbatch alone follow
    each other, from the smallest on.

    Args:
        pins: axis (one of PINS) to the only value it may have.
        here: only what this hocket can carry out itself.
        domain: GPUs that reach each other without the network: state is shared among all data
            ranks, or among those of one domain alone (HSDP).
        selective: whether selective recompute frees anything; else it is left out unless pinned.
        deferred: whether recompute frees anything where weight gradients are deferred.
    """
    pins = dict(pins or {})
    meshes = _meshes(shape, num_gpus, seq_len, global_batch, pins=pins, here=here)
    base = _with_batches(meshes, shape, global_batch, pins)
    offload = pins.get("offload", "none").split("+")
    for option in _options(pins, here, has_latent(shape)):
        schedule, zero, again, parallel = option
        if again == "selective" and not selective and "recompute" not in pins:
            continue
        if "params" in offload and zero != 3:
            continue
        # Under full recompute a layer saves its input alone; what deferred gradients need stays.
        if "activations" in offload and (again == "full" or schedule in LATE):
            continue
        keep = _allowed(base, option, seq_len=seq_len, pins=pins, deferred=deferred)
        chosen = {name: column[keep] for name, column in base.items()}
        count = int(keep.sum())
        for name, value in (
            ("schedule", SCHEDULES.index(NAMES[schedule])),
            ("zero", zero),
            ("recompute", recompute.code(again)),
            ("sequence_parallel", parallel),
        ):
            chosen[name] = np.full(count, float(value))
        chosen["offload"] = np.full(count, float(OFFLOAD.index("+".join(offload))))
        chosen["shard"] = chosen["dp"]
        for rows in _sharded(chosen, zero, domain, pins=pins, here=here):
            yield Layouts(**rows)


def _sharded(
    rows: dict[str, Floats], zero: int, domain: int, *, pins: Pins, here: bool
) -> Iterator[dict[str, Floats]]:
    """Rows with every number of data ranks that may share one state."""
    dp = rows["dp"]
    asked = pins.get("shard")
    if asked is not None:
        keep = legality.shard(dp, asked, zero)
        inner = np.full(len(dp), float(asked))
    else:
        yield rows
        if not zero:
            return
        inner = domain // (rows["tp"] * rows["cp"])
        keep = (inner > 1) & (inner < dp) & legality.shard(dp, np.maximum(inner, 1), zero)
        if here:
            keep &= rows["ep"] == 1
    if keep.any():
        yield {**{name: column[keep] for name, column in rows.items()}, "shard": inner[keep]}


def layout_at(layouts: Layouts, index: int) -> Layout:
    """One row as a Layout."""
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
        yield f"{shape.heads} heads do not divide over tp {layout.tp}", f"tp{near}"
    if isinstance(layout.pipeline_split, tuple):
        pass  # `choose_cut` counts them
    elif layout.pipeline_split == "light-ends":
        if not legality.light_ends(layers, layout.num_stages):
            yield (
                f"{layers} layers cannot be cut into {layout.num_stages} stages of which the first "
                "and the last have one layer fewer",
                "pipeline_split=balanced",
            )
    elif not legality.stages(layers, layout.num_stages):
        yield f"{layers} layers cannot be cut into {layout.num_stages} stages", f"pp{layers}"
    if not legality.context(seq_len, layout.cp, shape.handed_width):
        yield _unsplit(seq_len, layout.cp, shape), None
    if layout.splits_experts and not shape.experts:
        why = f"as {layout.axes_text()} does"
        yield f"{shape.name} has no experts to divide over ranks, {why}", "ep1"
    elif not legality.experts(shape.experts, layout.ep):
        yield f"{shape.experts} experts do not divide over ep {layout.ep}", "ep1"
    if layout.sequence_parallel and not legality.slices(seq_len, layout.cp, layout.tp):
        why = f"a sequence of {seq_len} does not divide over cp x tp"
        if layout.tp == 1:
            why = "sequence_parallel shards sequences over tensor ranks, and tp is 1"
        yield why, "sequence_parallel=false"
    if layout.recompute_layers is not None:
        yield "the planner estimates full recomputation, or none", f"recompute={layout.recompute}"
    batch = global_batch // layout.dp
    if not legality.batch(global_batch, layout.dp):
        what = f"the global batch of {global_batch} does not divide over dp {layout.dp}"
        yield what, f"--global-batch {max(1, batch) * layout.dp}"
    elif not legality.microbatches(batch, layout.microbatches or 1):
        fits = [n for n in divisors(batch) if n <= (layout.microbatches or 1)]
        yield (
            f"the batch of {batch} of each data rank does not divide into "
            f"{layout.microbatches} microbatches",
            f"microbatches={fits[-1]}",
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
    for axis in ("cp", "ep"):
        if axes is not None and axis not in axes:
            found &= columns[axis] == 1
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
    if "shard" in pins and pins.get("zero") == 0:
        return f"shard {pins['shard']} applies to ZeRO, and zero is pinned at 0"
    return None


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


# --- the parts of `legal_layouts` ---


def _degrees(field: str, choices: Sequence[int], pins: Pins, here: bool) -> list[int]:
    """The choices that pins and, where asked, the runtime leave over."""
    allowed = next((row.runs for row in TABLE if row.field == field), None) if here else None
    return [
        c
        for c in choices
        if c == pins.get(field, c) and (allowed is None or field in pins or c in allowed)
    ]


def _meshes(
    shape: ModelShape, num_gpus: int, seq_len: int, global_batch: int, *, pins: Pins, here: bool
) -> list[tuple[int, int, int, int, int, int]]:
    """(dp, pp, cp, tp, ep, etp), each a way to use all GPUs."""
    sizes = divisors(num_gpus)
    tensor = _degrees("tp", [n for n in tensor_degrees(shape) if num_gpus % n == 0], pins, here)
    stages = _degrees("pp", _stage_counts(len(shape.layers), sizes), pins, here)
    halves = [n for n in sizes if legality.context(seq_len, n, shape.handed_width)]
    context = _degrees("cp", halves, pins, here)
    expert = _degrees("ep", divisors(shape.experts) if shape.experts else [1], pins, here)
    found: list[tuple[int, int, int, int, int, int]] = []
    if "etp" in pins and not shape.experts:
        return found
    for tp, pp, cp in itertools.product(tensor, stages, context):
        dp, rest = divmod(num_gpus, tp * pp * cp)
        if rest or not dp or dp != pins.get("dp", dp) or not legality.batch(global_batch, dp):
            continue
        found += [
            (dp, pp, cp, tp, ep, etp)
            for ep in expert
            for etp in _expert_tensor(tp, ep, pins)
            if legality.expert_ranks(dp, cp, ep, tp, etp)
        ]
    return found


def _expert_tensor(tp: int, ep: int, pins: Pins) -> list[int]:
    """Ranks that divide one expert: tensor ranks (etp absent), or each expert whole (folding)."""
    if "etp" in pins:
        return [pins["etp"]]
    return [tp] if tp == 1 or ep == 1 else [tp, 1]


def _stage_counts(layers: int, sizes: Sequence[int]) -> list[int]:
    return [n for n in sizes if legality.stages(layers, n) or legality.light_ends(layers, n)]


def _with_batches(
    meshes: list[tuple[int, int, int, int, int, int]],
    shape: ModelShape,
    global_batch: int,
    pins: Pins,
) -> dict[str, Floats]:
    """Each mesh with every number of virtual stages and every size of a microbatch."""
    rows = []
    layers = len(shape.layers)
    for dp, pp, cp, tp, ep, etp in meshes:
        counts = _virtual_stages(layers, pp)
        if "virtual_stages" in pins:
            counts = [pins["virtual_stages"]]
        cuts = [(v, 0) for v in counts if legality.stages(layers, pp * v)]
        if "virtual_stages" not in pins:
            counts = list(range(1, MOST_VIRTUAL + 1))
        cuts += [(v, 1) for v in counts if pp > 1 and legality.light_ends(layers, pp * v)]
        batch = global_batch // dp
        sizes = [
            b
            for b in divisors(batch)
            if b == pins.get("microbatch", b) and batch // b == pins.get("microbatches", batch // b)
        ]
        rows += [
            (dp, pp, cp, tp, ep, etp, *cut, b, batch // b)
            for cut, b in itertools.product(cuts, sizes)
        ]
    names = (
        "dp", "pp", "cp", "tp", "ep", "etp", "virtual", "lighter", "microbatch", "microbatches",
    )  # fmt: skip
    table = np.array(rows, dtype=np.float64).reshape(-1, len(names))
    return {name: np.ascontiguousarray(table[:, i]) for i, name in enumerate(names)}


@functools.cache
def _virtual_stages(layers: int, pp: int) -> list[int]:
    """Numbers of stages of a rank that make the longest stage shorter than any smaller number does:
    the others send more for no smaller bubble. Two are always there, for ZB-V."""
    if pp == 1:
        return [1]
    most = min(MOST_VIRTUAL, max(layers // pp, 1))
    longest = {v: -(-layers // (pp * v)) for v in range(1, most + 1)}
    return [v for v in longest if v <= 2 or longest[v] < longest[v - 1]]


def _options(pins: Pins, here: bool, latent: bool) -> Iterator[tuple[str, int, str, bool]]:
    """(schedule, ZeRO stage, recompute, sequence parallel)."""
    allowed = {row.field: row.runs for row in TABLE} if here else {}

    def choices(field: str, all_of_them: Sequence[Any]) -> Sequence[Any]:
        if field in pins:
            return (pins[field],)
        return [c for c in all_of_them if field not in allowed or c in allowed[field]]

    return itertools.product(
        choices("schedule", SEARCHED),
        choices("zero", (0, 1, 2, 3)),
        choices("recompute", recompute.choices(latent)),
        choices("sequence_parallel", (False, True)),
    )


def _allowed(
    base: Mapping[str, Floats],
    option: tuple[str, int, str, bool],
    *,
    seq_len: int,
    pins: Pins,
    deferred: bool,
) -> np.ndarray:
    """[r] bool: the rows of `base` that these options fit."""
    schedule, zero, again, parallel = option
    pp, virtual, m = base["pp"], base["virtual"], base["microbatches"]
    piped = pp > 1
    if schedule == "interleaved":
        # Rounds of microbatches must be equal, as the schedule's builder asks.
        keep = piped & (virtual > 1) & legality.interleaved_rounds(m, pp)
    elif schedule in LATE:
        # What recompute makes again for the first half of backward waits for the second. hocket
        # keeps it from there on; of other software it is taken as kept from forward on, so that
        # recompute costs time and frees nothing.
        stages = 2 if schedule == "zb-v" else 1
        keep = piped & (virtual == stages) & (deferred or again in ("none", "selective"))
    elif schedule == "1f1b" or "schedule" in pins:
        several = schedule != "1f1b" and "virtual_stages" in pins
        keep = (several | (virtual == 1)) & (piped | (schedule in ("1f1b", pins.get("schedule"))))
    else:
        keep = np.zeros(len(pp), dtype=bool)
    if zero and "zero" not in pins and "params" not in pins.get("offload", "none"):
        keep = keep & (base["dp"] > 1)
    if zero == 2 and "zero" not in pins:
        # Of a pipeline's many microbatches every one would be summed apart; nobody does that.
        keep = keep & ((m == 1) | ~piped)
    if parallel:
        keep = keep & legality.slices(seq_len, base["cp"], base["tp"])
    return keep
