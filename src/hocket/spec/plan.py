"""ParallelPlan: how one model may be split, as data.

`models` writes a plan for a Hugging Face model; `runtime` carries it out on any `nn.Module`.

    ParallelPlan
     +- tensor: TensorPlan   which modules are column, row or vocabulary parallel, and how their
     |                       fused weights fall into segments of indivisible units (heads)
     +- experts: ExpertPlan  modules of stacked experts, which ranks may hold some of
     +- stages: StagePlan    what runs before the layers, the layers, what runs after
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Mapping
from typing import Any, TypeVar

from hocket.spec import legality, recompute
from hocket.spec.errors import LayoutError
from hocket.spec.files import parse_json
from hocket.spec.layout import Layout
from hocket.spec.placement import Placement, TensorBlock

Value = TypeVar("Value")

STYLES = ("column", "row", "vocab_embedding", "vocab_head", "sum_grad", "experts")


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightSegment:
    """A run of `units` indivisible units of `size` rows each, along the split dim.

    `what` names the unit in errors ("attention heads"). `copies` allows fewer units than ranks:
    each unit is then held by tp / units consecutive ranks (key/value heads). `uneven` allows
    counts that do not divide (vocabulary rows): the first ranks hold ceil(units / tp).
    """

    units: int
    size: int = 1
    what: str = "units"
    copies: bool = False
    uneven: bool = False

    @property
    def rows(self) -> int:
        """Rows along the split dim."""
        return self.units * self.size

    def slice(self, index: int, degree: int) -> tuple[int, int, int]:
        """(first row, number of rows, copies) held by rank `index` of `degree`."""
        if self.units % degree == 0:
            count = self.units // degree
            return index * count * self.size, count * self.size, 1
        if self.uneven:
            count = -(-self.units // degree)
            first = min(index * count, self.units)
            return first * self.size, (min(first + count, self.units) - first) * self.size, 1
        if self.copies and degree % self.units == 0:
            copies = degree // self.units
            return (index // copies) * self.size, self.size, copies
        raise LayoutError(
            f"{self.units} {self.what} do not divide over tp {degree}",
            hint="a tp that divides: " + ", ".join(f"tp{n}" for n in self.degrees(degree)),
        )

    def degrees(self, near: int) -> list[int]:
        """The legal tensor-parallel degrees up to twice `near`."""
        return [n for n in range(1, 2 * near + 1) if self.fits(n)]

    def fits(self, degree: int) -> bool:
        """Whether `degree` ranks can share this segment."""
        fits = legality.copied_units if self.copies else legality.units
        return self.uneven or fits(self.units, degree)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Split:
    """How tensor parallelism treats one module (or, with `parameter`, one bare parameter).

    Attributes:
        style: `column` (weight split by output; the input's gradient is summed), `row` (weight
            split by input; the output is summed), `vocab_embedding`, `vocab_head` (column, the
            logits stay split for the vocabulary-parallel loss), `sum_grad` (held whole, but each
            rank sees part of the heads: the gradient is summed over tp once a step), `experts`
            (stacked expert weights, column then row inside one module).
        segments: along the split dim, in storage order; their rows add up to that dim.
        dims: parameter name to split dim; a parameter not named is replicated. For a Linear of
            style column `{"weight": 0, "bias": 0}`, of style row `{"weight": 1}`, for GPT-2's
            Conv1D (stored transposed) `{"weight": 1, "bias": 0}` and `{"weight": 0}`.
        parameter_segments: segments of single parameters where they differ from `segments`.
        gather_output: style column only: all-gather the output.
        scatter_input: style row only: the input is whole and is split first.
    """

    style: str
    segments: tuple[WeightSegment, ...] = ()
    dims: Mapping[str, int] = dataclasses.field(default_factory=dict)
    parameter_segments: Mapping[str, tuple[WeightSegment, ...]] = dataclasses.field(
        default_factory=dict
    )
    gather_output: bool = False
    scatter_input: bool = False

    def __post_init__(self) -> None:
        assert self.style in STYLES, self.style

    def place(
        self, name: str, parameter: str, shape: tuple[int, ...], index: int, degree: int
    ) -> Placement:
        """Placement of `parameter` (global name `name`, global `shape`) on one tensor rank."""
        if parameter not in self.dims:
            grad_sum = ("tp",) if self.style == "sum_grad" and degree > 1 else ()
            return dataclasses.replace(
                Placement.whole(name, shape, grad_sum=grad_sum), replicated=("tp",)
            )
        dim = self.dims[parameter]
        segments = self.parameter_segments.get(parameter, self.segments)
        assert sum(s.rows for s in segments) == shape[dim], (name, segments, shape)
        blocks, local, first = [], 0, 0
        for segment in segments:
            try:
                start, rows, copies = segment.slice(index, degree)
            except LayoutError as error:
                raise LayoutError(f"{name}: {error.message}", hint=error.hint) from None
            at = [0] * len(shape)
            to = [0] * len(shape)
            size = list(shape)
            at[dim], to[dim], size[dim] = first + start, local, rows
            blocks.append(
                TensorBlock(start=tuple(at), local=tuple(to), size=tuple(size), copies=copies)
            )
            local += rows
            first += segment.rows
        local_shape = (*shape[:dim], local, *shape[dim + 1 :])
        assert sum(math.prod(b.size) for b in blocks) == math.prod(local_shape)
        return Placement(
            name=name, shape=shape, local_shape=local_shape, blocks=tuple(blocks), sharded=("tp",)
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Patch:
    """An attribute that must hold the local count once its module is split.

    `value` maps the tensor-parallel degree to the local value: an attribute `whole` becomes
    `max(1, whole // tp)` for head counts. `on_config` sets it on a copy of `module.config` instead
    of on the module. `ratio` instead recomputes `attribute` as the quotient of two local counts
    (query heads over key/value heads).
    """

    attribute: str
    whole: int
    on_config: bool = False
    ratio: tuple[int, int] | None = None

    def local(self, degree: int) -> int:
        """The value on each of `degree` ranks."""
        if self.ratio is not None:
            over, under = self.ratio
            return max(1, (over // degree) // max(1, under // degree))
        return max(1, self.whole // degree)


@dataclasses.dataclass(frozen=True, kw_only=True)
class InputSlice:
    """A keyword argument of a module's forward that carries all heads and must be sliced.

    `dim` is sliced into the rank's share of `units` equal parts (BLOOM's alibi: batch x heads
    along dim 0, so `groups` = batch is found as extent / units).
    """

    argument: str
    dim: int
    units: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorPlan:
    """Module-name patterns (`*` stands for one name part) to splits, patches and input slices."""

    splits: Mapping[str, Split] = dataclasses.field(default_factory=dict)
    patches: Mapping[str, tuple[Patch, ...]] = dataclasses.field(default_factory=dict)
    inputs: Mapping[str, tuple[InputSlice, ...]] = dataclasses.field(default_factory=dict)

    def segments(self) -> list[WeightSegment]:
        """Every segment of the plan, for checking a degree before any rank starts."""
        found = []
        for split in self.splits.values():
            found += [*split.segments, *(s for p in split.parameter_segments.values() for s in p)]
        return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertPlan:
    """What expert parallelism may split: modules whose parameters all have the experts as dim 0.

    Attributes:
        modules: name patterns (`*` stands for one name part) of modules with an attribute
            `num_experts` and `forward(hidden_states, top_k_index, top_k_weights)`.
        sliced: those of them whose experts the tensor plan slices over tp.
    """

    modules: tuple[str, ...]
    sliced: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class StagePlan:
    """What a pipeline may cut. All names are relative to the root module, dotted.

    Attributes:
        decoder: module whose forward runs the layers (`model`, `transformer`); "" is the root.
        layers: the ModuleList.
        before: modules that run before the layers and belong to the first stage.
        positions: those of `before` that add a position embedding: zero on later stages.
        after: modules that run after the layers and belong to the last stage (final norm).
        head: modules of the root that only the last stage holds (`lm_head`).
        returns_tuple: length of the tuple a layer returns, 0 if it returns a tensor.
        input_argument: keyword of the root's and decoder's forward for the first stage's input.
        hidden_argument: keyword by which a later stage is fed the hidden state.
        cores: modules of a layer, named from it, whose attention core can run by itself again.
        feed_forward: modules of a layer, named from it, that are a feed-forward layer and, in at
            least one layer, no mixture of experts.
        feed_forward_ends: modules of a layer, named from it, after which the feed-forward layer
            that they are in saves nothing for backward.
        ends: modules of a layer, named from it, after which a layer saves nothing for backward:
            running it again stops before their sum over tp.
        streams: of the hidden state, where layers hand on several (hyper-connections), as
            [B, S, streams, H]; 0: [B, S, H].
        flat_streams: the streams are adjacent, as [B, S, streams H].
        tokens: keyword by which layers are given the token ids; empty: they are not.
        overwrites: the decoder's forward writes into the embedded input that it is given.
        chosen: name patterns of modules of experts, to the share of tokens that each expert gets;
            of modules of layers that compute nothing, 0.
    """

    decoder: str
    layers: str
    num_layers: int
    before: tuple[str, ...] = ()
    positions: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    head: tuple[str, ...] = ()
    returns_tuple: int = 0
    input_argument: str = "input_ids"
    hidden_argument: str = "inputs_embeds"
    cores: tuple[str, ...] = ()
    feed_forward: tuple[str, ...] = ()
    feed_forward_ends: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    streams: int = 0
    flat_streams: bool = False
    tokens: str = ""
    overwrites: bool = False
    chosen: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def share_of(self, parameter: str) -> float | None:
        """Share of tokens that reach a parameter that is named in `chosen`; None: it is not."""
        parts = parameter.split(".")
        for pattern, share in self.chosen.items():
            if matches(pattern, ".".join(parts[: pattern.count(".") + 1])):
                return share
        return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class SequencePlan:
    """What a model needs to run on slices of its sequences between split blocks.

    Attributes:
        embedding: the token embedding, called before the decoder, which is given its slice.
        blocks: modules that read whole sequences: gathered once, as they begin.
        positions: modules that add a position embedding: it is cut to the slice.
        embedders: modules that embed the hidden state they are given and add the embedding of
            `position_ids`: they get those of the shard.
        replicated: modules replicated that read whole sequences (an output head that is not split).
        mask: the decoder learns the length of the sequence from an attention mask of ones, since
            it takes no positions.
    """

    embedding: str
    blocks: tuple[str, ...] = ()
    positions: tuple[str, ...] = ()
    embedders: tuple[str, ...] = ()
    replicated: tuple[str, ...] = ()
    mask: bool = False

    def sees_slices(self, name: str) -> bool:
        """Whether the module `name`,replicated, sees this rank's slice alone: the gradients of its
        parameters are then parts of sums."""
        if name == self.embedding:
            return False
        parts = name.split(".")
        return not any(".".join(parts[:n]) in self._whole for n in range(1, len(parts) + 1))

    @functools.cached_property
    def _whole(self) -> frozenset[str]:
        return frozenset((*self.blocks, *self.replicated))


@dataclasses.dataclass(frozen=True, kw_only=True)
class RouterLoss:
    """A load-balancing loss that the model returns as `aux_loss` and adds to its own loss.

    It multiplies two sums over the tokens of a microbatch and over all layers: how many tokens
    each expert gets, and with what probability.

    Attributes:
        coefficient: by which the model multiplies it.
        gates: modules that make the router's logits, dotted.
        experts, top_k: of the loss of the Switch Transformer, where the model's is that one; 0:
            it is another.
    """

    coefficient: float
    gates: tuple[str, ...] = ()
    experts: int = 0
    top_k: int = 0

    @property
    def of_all_ranks(self) -> bool:
        """Whether it can be computed over the tokens of all data ranks."""
        return self.experts > 0


def experts_rejected(layout: Layout, plan: ParallelPlan) -> tuple[str, str] | None:
    """Why a layout cannot place the experts of a plan, and the flag that can; None: it can."""
    if not layout.splits_experts:
        return None
    if plan.experts is None:
        reason = plan.reasons.get("experts", "it has no modules of stacked experts")
        whole = layout.flag_with(ep=1, etp=None)
        return f"experts cannot be placed over ep {layout.ep}: {reason}", whole
    unsliced = [name for name in plan.experts.modules if name not in plan.experts.sliced]
    if layout.etp is None and layout.tp > 1 and unsliced:
        return (
            f"{', '.join(unsliced)} cannot be sharded over etp {layout.tp} (as tp is, where etp is "
            f"absent): {plan.reasons.get('tensor', 'its tensor plan does not name them')}",
            layout.flag_with(etp=1),
        )
    return None


def recompute_rejected(text: str, plan: ParallelPlan) -> str:
    """Why the layers of a plan cannot be recomputed as `text` names it; empty: they can."""
    if plan.stages is None:
        return "" if text == "none" else plan.reasons.get("stages", "its plan names no layers")
    cores, feed_forward = bool(plan.stages.cores), bool(plan.stages.feed_forward)
    why = plan.reasons.get("cores", "its plan names no attention cores")
    return recompute.rejected(text, cores=cores, feed_forward=feed_forward, why=why)


def router_loss_rejected(layout: Layout, router: RouterLoss) -> str:
    """Why a router's auxiliary loss cannot be computed in a layout, and a fix; empty: it can."""
    loss = "the configuration sets output_router_logits, which adds the router's auxiliary loss"
    without = '"output_router_logits": false trains without it'
    if layout.num_stages > 1:
        return (
            f"{loss}: it multiplies sums over the routers of all layers, and a pipeline stage has "
            f"only its own; {without}"
        )
    if layout.cp > 1 and not router.of_all_ranks:
        return (
            f"{loss}: it is of all tokens of a microbatch, and context ranks have parts; {without}"
        )
    if layout.data_parallel == "threads":
        return f"{loss}, and replicas in threads gather nothing but logits; {without}"
    return ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParallelPlan:
    """How one model may be split. None: that kind of split is not possible for it."""

    tensor: TensorPlan | None = None
    stages: StagePlan | None = None
    sequence: SequencePlan | None = None
    """Not looked for unless it is asked for: then None says that it is not possible."""
    mask_positions: bool = False
    """Whether the model numbers the tokens of padded rows from its attention mask (OPT)."""
    hidden_size: int | None = None
    ties: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Tied parameter to the parameter that owns the values: `lm_head.weight` to the embedding."""
    experts: ExpertPlan | None = None
    inferred: bool = False
    """Whether the tensor plan comes from what the model was seen to compute."""
    router: RouterLoss | None = None
    """The router's auxiliary loss; None: the model adds none."""
    reasons: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """`tensor`, `experts`, `stages`, `sequence` to the reason why that is not possible, or only in
    part."""

    def tensor_for(self, layout: Layout) -> TensorPlan | None:
        """The tensor plan in a layout: without the experts where they are not sliced over tp."""
        if self.tensor is None or layout.etp is None:
            return self.tensor
        splits = {name: s for name, s in self.tensor.splits.items() if s.style != "experts"}
        return dataclasses.replace(self.tensor, splits=splits)

    def crossing(self) -> dict[str, str]:
        """The ties between the two ends of a pipeline: RoBERTa's head also holds its own bias
        twice, which is nothing to the first stage.
        """
        if self.stages is None:
            return {}
        end = (*self.stages.after, *self.stages.head)

        def last(name: str) -> bool:
            return any(name.startswith(f"{module}.") for module in end)

        return {tied: owner for tied, owner in self.ties.items() if last(tied) != last(owner)}

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> ParallelPlan:
        """The inverse of `to_json`."""
        data = parse_json(text)
        tensor, stages, sequence, router, experts = (
            data.pop(name) for name in ("tensor", "stages", "sequence", "router", "experts")
        )
        return cls(
            tensor=None if tensor is None else _tensor_plan(tensor),
            stages=None if stages is None else StagePlan(**_tuples(stages)),
            sequence=None if sequence is None else SequencePlan(**_tuples(sequence)),
            experts=None if experts is None else ExpertPlan(**_tuples(experts)),
            router=None if router is None else RouterLoss(**_tuples(router)),
            **data,
        )


def _tensor_plan(data: Mapping[str, Any]) -> TensorPlan:
    def segments(rows: list[dict[str, Any]]) -> tuple[WeightSegment, ...]:
        return tuple(WeightSegment(**row) for row in rows)

    def split(row: dict[str, Any]) -> Split:
        own = {name: segments(rows) for name, rows in row["parameter_segments"].items()}
        return Split(**{**row, "segments": segments(row["segments"]), "parameter_segments": own})

    return TensorPlan(
        splits={name: split(row) for name, row in data["splits"].items()},
        patches={
            name: tuple(Patch(**_tuples(row)) for row in rows)
            for name, rows in data["patches"].items()
        },
        inputs={
            name: tuple(InputSlice(**row) for row in rows) for name, rows in data["inputs"].items()
        },
    )


def _tuples(row: Mapping[str, Any]) -> dict[str, Any]:
    """JSON knows lists only."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}


BEFORE, AFTER, OTHER = "before", "after", "other"
"""Blocks of what is no layer, as `block_of` names them."""


def block_of(name: str, stages: StagePlan | None) -> str:
    """The block in which ZeRO-3 gathers a parameter: the module of its layer, else what of the
    model it belongs to: `before` the layers, `after` them (the head too), or `other`.

    Args:
        name: of the parameter.
        stages: None: nothing is known of the model but its names: whatever is numbered is a layer.
    """
    parts = name.split(".")
    if stages is None:
        number = next((i for i, part in enumerate(parts[:-1]) if part.isdigit()), None)
        return OTHER if number is None else ".".join(parts[: number + 1])
    depth = len(stages.layers.split("."))
    if name.startswith(f"{stages.layers}."):
        return ".".join(parts[: depth + 1])
    for block, modules in ((BEFORE, stages.before), (AFTER, (*stages.after, *stages.head))):
        if any(name.startswith(f"{module}.") for module in modules):
            return block
    return OTHER


def matches(pattern: str, name: str) -> bool:
    """Whether a module name fits a pattern; `*` stands for exactly one dotted part."""
    parts, names = pattern.split("."), name.split(".")
    return len(parts) == len(names) and all(
        p in ("*", n) for p, n in zip(parts, names, strict=True)
    )


def matched(patterns: Mapping[str, Value], name: str) -> Value | None:
    """The value of a module name, else of the first pattern that it fits; None without one."""
    if name in patterns:
        return patterns[name]
    return next((value for pattern, value in patterns.items() if matches(pattern, name)), None)
