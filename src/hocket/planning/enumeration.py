"""Every legal layout of a model on a number of ranks, as columns of numbers.

    mesh        dp x pp x cp x tp = ranks ; tp divides heads, feed-forward and, or is divided by,
                key/value heads ; pp x virtual stages <= layers ; 2 cp divides the sequence
                (causal work is dealt in two halves) ; ep divides experts, and ep x etp
                dp x cp x tp, where etp is tp, or 1 (each expert whole: folding)
    batch       dp x microbatch x microbatches = global batch
    options     schedule, ZeRO stage, recompute, sequence parallel

The rules are in `spec.legality`, by which a run is rejected too. Of what they allow a search
considers a `SearchSpace`, and what is pinned. It never considers what another layout beats:
sequential waits more than 1f1b, more virtual stages whose longest has no fewer layers only send
more, recompute under schedules of other software that defer weight gradients keeps what it makes
again. State in the host's memory is for what fits in no other way (`planning.plan`).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from hocket.cost.layout_batch import NAMES, SCHEDULES, Layouts
from hocket.cost.terms import Floats
from hocket.planning.layouts import LATE, layout_at, tensor_degrees, unmet_recompute
from hocket.planning.pins import Pins
from hocket.spec import legality, recompute
from hocket.spec.capabilities import TABLE
from hocket.spec.layout import OFFLOAD, Layout, divisors
from hocket.spec.model_shape import ModelShape
from hocket.spec.run import Workload

Mesh = tuple[int, int, int, int, int, int]
"""dp, pp, cp, tp, ep, etp."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchSpace:
    """Values of a layout's fields that a search considers, unless they are pinned.

    Attributes:
        axes: of cp and ep those that a model is split over. virtual_stages: of a rank at most.
        schedules: without gpipe, which on GPUs has the step time of 1f1b and holds more.
        microbatches: at least and at most, for each pipeline rank.
        sharing: axes of which one needs several ranks before ZeRO is considered.
        domain: GPUs that reach each other without the network: state is shared among all data
            ranks, or among those of one domain alone (HSDP).
        deferred: whether recompute frees anything where weight gradients are deferred.
    """

    axes: Collection[str] = ("cp", "ep")
    schedules: Sequence[str] = ("1f1b", "interleaved", "zero-bubble", "zb-v")
    zero: Sequence[int] = (0, 1, 2, 3)
    recompute: Sequence[str] = recompute.choices(latent=False)
    sequence_parallel: Sequence[bool] = (False, True)
    cuts: Collection[str] = ("balanced", "light-ends")
    virtual_stages: int = 16
    microbatches: tuple[float, float] = (0, math.inf)
    sharing: Sequence[str] = ("dp",)
    domain: int = 1
    deferred: bool = False


ALL = SearchSpace()

CORES = SearchSpace(
    schedules=("1f1b", "gpipe", "zero-bubble"), zero=(0,), recompute=("none",),
    sequence_parallel=(False,), cuts=("balanced",), virtual_stages=1, microbatches=(1, 8),
    sharing=("dp", "cp"),
)  # fmt: skip
"""On measured cores. Beyond eight microbatches a pipeline rank a bubble is small, and every further
one only costs its overhead."""

SAVING = dataclasses.replace(
    CORES, zero=ALL.zero, recompute=("none", "full"), sequence_parallel=ALL.sequence_parallel,
    deferred=True,
)  # fmt: skip
"""The same with what holds less and takes longer: where nothing else fits."""


def legal_parts(
    shape: ModelShape,
    num_ranks: int,
    seq_len: int,
    global_batch: int,
    *,
    pins: Pins | None = None,
    here: bool = False,
    space: SearchSpace = ALL,
) -> Iterator[Layouts]:
    """Every legal layout of exactly `num_ranks`, one set of options after the other: of a mixture
    on thousands of GPUs they are millions. Rows that differ by the microbatch alone follow each
    other, from the smallest on.

    Args:
        pins: axis (one of PINS) to the only value it may have.
        here: only what this hocket can carry out itself.
    """
    pins = dict(pins or {})
    meshes = [
        mesh
        for mesh in _meshes(shape, num_ranks, seq_len, pins=pins, here=here, space=space)
        if legality.batch(global_batch, mesh[0])
    ]
    base = _with_batches(meshes, len(shape.layers), global_batch, pins, space)
    offload = pins.get("offload", "none").split("+")
    for option in _options(pins, here, space):
        schedule, zero, again, parallel = option
        if ("params" in offload and zero != 3) or unmet_recompute(shape, again):
            continue
        # Under full recompute a layer saves its input alone; what deferred gradients need stays.
        if "activations" in offload and (again == "full" or schedule in LATE):
            continue
        keep = _allowed(base, option, seq_len=seq_len, pins=pins, space=space)
        equal = {
            "schedule": SCHEDULES.index(NAMES[schedule]), "recompute": recompute.code(again),
            "offload": OFFLOAD.index("+".join(offload)), "zero": zero, "sequence_parallel": parallel
        }  # fmt: skip
        chosen = {name: column[keep] for name, column in base.items()}
        chosen |= {name: np.full(keep.sum(), float(value)) for name, value in equal.items()}
        chosen["shard"] = chosen["dp"]
        for rows in _sharded(chosen, zero, space.domain, pins=pins, here=here):
            yield Layouts(**rows)


def candidate_layouts(
    shape: ModelShape,
    workload: Workload,
    most_ranks: int,
    axes: Collection[str] = (),
    *,
    saving: bool = False,
) -> list[Layout]:
    """Layouts of `CORES` of up to `most_ranks`; with `saving` the further ones of `SAVING`.

    Args:
        axes: of cp and ep those that the model is split over as well.
    """
    space = dataclasses.replace(SAVING if saving else CORES, axes=axes)
    found = []
    for ranks in range(1, most_ranks + 1):
        for rows in legal_parts(shape, ranks, workload.seq_len, workload.global_batch, space=space):
            saves = (rows.zero > 0) | (rows.recompute > 0) | (rows.sequence_parallel > 0)
            found += [layout_at(rows, int(i)) for i in np.flatnonzero(saves == saving)]
    return found


def meshes(shape: ModelShape, most_ranks: int) -> list[Layout]:
    """Every dp x pp x tp of up to `most_ranks` ranks that a model allows, simplest first."""
    space = dataclasses.replace(CORES, axes=())
    found = [_meshes(shape, n + 1, 1, pins={}, here=False, space=space) for n in range(most_ranks)]
    return [
        Layout(dp=dp, pp=pp, tp=tp)
        for dp, pp, _, tp, *_ in itertools.chain(*found)
        if legality.stages(len(shape.layers), pp)
    ]


def resized(own: Layout, count: int, batch: int) -> Iterator[Layout]:
    """Layouts of at most `count` ranks, nearest first: `own` with other data parallelism and
    microbatches of at most as many sequences, then the most ranks with the least tensor and
    pipeline parallelism. The model is not asked; `batch` is the global one."""
    for dp in range(count * own.dp // own.world_size, 0, -1):
        least = own.microbatches and -(-own.microbatches * own.dp // dp)
        counts = [n for n in divisors(batch // dp or 1) if n >= least] if least else []
        for count_of in (*counts,) or (least,):
            yield legality.narrowed(dataclasses.replace(own, microbatches=count_of), dp=dp)
    for world in range(count, 0, -1):
        for split in divisors(world):
            for tp in divisors(split):
                yield Layout(dp=world // split, pp=split // tp, tp=tp)


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


def _degrees(field: str, choices: Sequence[int], pins: Pins, here: bool) -> list[int]:
    """The choices that pins and, where asked, the runtime leave over."""
    allowed = next((row.runs for row in TABLE if row.field == field), None) if here else None
    return [
        c
        for c in choices
        if c == pins.get(field, c) and (allowed is None or field in pins or c in allowed)
    ]


def _meshes(
    shape: ModelShape, num_ranks: int, seq_len: int, *, pins: Pins, here: bool, space: SearchSpace
) -> list[Mesh]:
    """Each way to use all ranks."""
    found: list[Mesh] = []
    if "etp" in pins and not shape.experts:
        return found
    sizes, experts, layers = divisors(num_ranks), shape.experts, len(shape.layers)
    cuts = [n for n in sizes if legality.stages(layers, n) or legality.light_ends(layers, n)]
    halves = [n for n in sizes if legality.context(seq_len, n, shape.handed_width)]
    tensor = _degrees("tp", [n for n in tensor_degrees(shape) if num_ranks % n == 0], pins, here)
    stages = _degrees("pp", cuts, pins, here)
    context = _degrees("cp", halves if "cp" in space.axes else [1], pins, here)
    over = divisors(experts) if experts and "ep" in space.axes else [1]
    expert = _degrees("ep", over, pins, here)
    for tp, pp, cp in itertools.product(tensor, stages, context):
        dp, rest = divmod(num_ranks, tp * pp * cp)
        if rest or not dp or dp != pins.get("dp", dp):
            continue
        found += [
            (dp, pp, cp, tp, ep, etp)
            for ep in expert
            # All tensor ranks divide one expert, or each expert is whole (folding).
            for etp in dict.fromkeys(pins.get("etp", n) for n in (tp, 1 if ep > 1 else tp))
            if legality.expert_ranks(dp, cp, ep, tp, etp)
        ]
    return found


def _with_batches(
    meshes: Sequence[Mesh], layers: int, global_batch: int, pins: Pins, space: SearchSpace
) -> dict[str, Floats]:
    """Each mesh with every number of virtual stages and every size of a microbatch."""
    rows = []
    for dp, pp, cp, tp, ep, etp in meshes:
        most_virtual, pinned = space.virtual_stages, [pins.get("virtual_stages", 0)]
        counts = pinned if any(pinned) else _virtual_stages(layers, pp, most_virtual)
        cuts = [(v, 0) for v in counts if legality.stages(layers, pp * v)]
        if pp > 1 and "light-ends" in space.cuts:
            counts = pinned if any(pinned) else list(range(1, most_virtual + 1))
            cuts += [(v, 1) for v in counts if legality.light_ends(layers, pp * v)]
        batch = global_batch // dp
        least, most = (pp * count for count in space.microbatches)
        sizes = [
            b
            for b in divisors(batch)
            if b == pins.get("microbatch", b)
            and batch // b == pins.get("microbatches", batch // b)
            and least <= batch // b <= most
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
def _virtual_stages(layers: int, pp: int, most: int) -> list[int]:
    """Numbers of stages of a rank that make the longest stage shorter than any smaller number does:
    the others send more for no smaller bubble. Two are always there, for ZB-V."""
    if pp == 1:
        return [1]
    most = min(most, max(layers // pp, 1))
    longest = {v: -(-layers // (pp * v)) for v in range(1, most + 1)}
    return [v for v in longest if v <= 2 or longest[v] < longest[v - 1]]


def _options(pins: Pins, here: bool, space: SearchSpace) -> Iterator[tuple[str, int, str, bool]]:
    """(schedule, ZeRO stage, recompute, sequence parallel)."""
    allowed = {row.field: row.runs for row in TABLE} if here else {}

    def choices(field: str, all_of_them: Sequence[Any]) -> Sequence[Any]:
        if field in pins:
            return (pins[field],)
        return [c for c in all_of_them if field not in allowed or c in allowed[field]]

    return itertools.product(
        choices("schedule", space.schedules),
        choices("zero", space.zero),
        choices("recompute", space.recompute),
        choices("sequence_parallel", space.sequence_parallel),
    )


def _allowed(
    base: Mapping[str, Floats],
    option: tuple[str, int, str, bool],
    *,
    seq_len: int,
    pins: Pins,
    space: SearchSpace,
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
        keep = piped & (virtual == stages) & (space.deferred or again in ("none", "selective"))
    else:
        several = schedule != "1f1b" and "virtual_stages" in pins
        keep = (several | (virtual == 1)) & (piped | (schedule in ("1f1b", pins.get("schedule"))))
    if zero and "zero" not in pins and "params" not in pins.get("offload", "none"):
        keep = keep & (math.prod(base[axis] for axis in space.sharing) > 1)
    if zero == 2 and "zero" not in pins:
        # Of a pipeline's many microbatches every one would be summed apart.
        keep = keep & ((m == 1) | ~piped)
    if parallel:
        keep = keep & legality.slices(seq_len, base["cp"], base["tp"])
    return keep
