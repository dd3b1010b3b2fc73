"""Share: what one rank holds of one stage, as far as it makes the rank communicate.

A share is read off the plan and the placements of a stage (`StageShare.of_plan`), or off a model's
shape (`measured_prices.StepProblem.share`). Legend: B batch rows, S sequence, H hidden; T = B x S
tokens of one microbatch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping
from typing import Any

from hocket.cost.communication_table import FLOAT
from hocket.cost.stage_context import over_context, recomputed_placements
from hocket.spec import recompute
from hocket.spec.layout import Layout
from hocket.spec.model_shape import Attention, Handed, ModuleRuns
from hocket.spec.placement import Placement
from hocket.spec.plan import ParallelPlan, Split, TensorPlan, WeightSegment, block_of, matches
from hocket.spec.process_groups import copies_axis

_Entry = tuple[str, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageShare:
    """What one rank holds of one stage.

    Attributes:
        stage: its number.
        forward_sums: all-reduces over tp of one forward, each of T x H elements.
        backward_sums: the same of one backward.
        expert_weights: routing weights per token whose gradient travels with one of the
            `backward_sums`, summed over the layers (experts per token, for each expert layer).
        wider: elements per token by which all of these sums together are wider than H each, or
            narrower (below 0).
        repeated_sums, repeated_gathers: those of a forward that recompute repeats in backward: all
            of its layers' (`full`) or feed-forward layers' (`mlp`), but for the sums with which
            running one again ends.
        forward_gathers, backward_gathers: widths (elements per token, all ranks' parts together)
            of the all-gathers over tp of one forward and one backward. With sequence parallelism
            those of slices are among them.
        forward_scatters, backward_scatters, repeated_scatters: with sequence parallelism, widths of
            the reduce-scatters over tp that take the place of all sums.
        choices: with sequence parallelism, numbers of experts chosen per token whose indices are
            gathered in one forward; `repeated_choices` in one repeated by full recompute.
        split_loss: the logits stay split by vocabulary, and the loss is found in parts.
        router_sums: numbers of a router's auxiliary loss that data ranks sum in each microbatch.
        gradient_bytes: of each parameter with a gradient, in the module's order.
        late: which of these gradients are summed over other axes too, in the same order (none
            if left empty): under ZeRO they are reduced last, from buckets of their own.
        blocks: the block in which ZeRO-3 gathers each of them (`spec.plan.block_of`), in the same
            order.
        frozen: of each parameter without a gradient its block, its elements in the bytes that a
            gradient would have, whether it lies in the bucket of what would be late, and whether
            it is stored in 4 bits, two elements to a byte.
        experts: number of experts of each module that ep or etp places, in the module's order (of
            the model, not of this rank).
        experts_again: the same of those that full recompute repeats in backward.
        experts_whole: of those, how many are repeated to the end of their module.
        expert_gradients, expert_frozen: block and bytes of the gradient of each of their
            parameters, which the other fields leave out; those that have none, as in `frozen`.
        attentions: each attention of a forward, with the sizes of one tensor rank;
            attentions_constant: those of a part without gradients, which are not among them;
            attentions_again: those that backward runs again (recompute).
        handed: what each recurrent layer of the stage hands on over cp; handed_again: of those that
            are run again in backward.
        partial_bytes: axis to bytes of gradients that are partial sums over it, once a step.
        tied_bytes: bytes of gradients that another stage holds too; one entry per tie.
    """

    stage: int = 0
    forward_sums: int = 0
    backward_sums: int = 0
    expert_weights: int = 0
    wider: int = 0
    forward_gathers: tuple[int, ...] = ()
    backward_gathers: tuple[int, ...] = ()
    repeated_sums: int = 0
    repeated_gathers: tuple[int, ...] = ()
    forward_scatters: tuple[int, ...] = ()
    backward_scatters: tuple[int, ...] = ()
    repeated_scatters: tuple[int, ...] = ()
    choices: tuple[int, ...] = ()
    repeated_choices: tuple[int, ...] = ()
    split_loss: bool = False
    router_sums: int = 0
    gradient_bytes: tuple[int, ...] = ()
    late: tuple[bool, ...] = ()
    blocks: tuple[str, ...] = ()
    frozen: tuple[tuple[str, int, bool, bool], ...] = ()
    experts: tuple[int, ...] = ()
    experts_again: tuple[int, ...] = ()
    experts_whole: int = 0
    expert_gradients: tuple[tuple[str, int], ...] = ()
    expert_frozen: tuple[tuple[str, int], ...] = ()
    attentions: tuple[Attention, ...] = ()
    attentions_constant: tuple[Attention, ...] = ()
    attentions_again: tuple[Attention, ...] = ()
    handed: tuple[Handed, ...] = ()
    handed_again: tuple[Handed, ...] = ()
    partial_bytes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    tied_bytes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.late:
            object.__setattr__(self, "late", (False,) * len(self.gradient_bytes))

    @classmethod
    def of_plan(
        cls,
        plan: ParallelPlan,
        placements: Mapping[str, Placement],
        layout: Layout,
        *,
        stage: int,
        num_stages: int,
        experts_per_token: int = 0,
        trained: Collection[str] | None = None,
        constant: Collection[str] = (),
        fp8: Collection[str] = (),
        packed: Collection[str] = (),
        routing_width: int = 1,
        handed: Mapping[str, Handed] | None = None,
        cores: Collection[tuple[Attention, bool]] = (),
        runs: Mapping[str, ModuleRuns] | None = None,
    ) -> StageShare:
        """Read off a stage's plan and placements (by global parameter name, in module order).

        `trained`: names of the parameters that have a gradient, adapters; None: all of them but
        the `constant` ones, to which the model itself gives no gradient (biases of a router).
        `fp8`: modules that multiply in fp8, which keep their whole input for backward. `packed`:
        parameters that are stored in 4 bits (a quantized base).
        `routing_width`: bytes of a routing weight over those of an activation.
        `handed`: modules that hand on a state, and what (`models.context_scans.state_sizes`).
        `cores`: each attention of a forward, named by its module, and whether it has a gradient
        (`models.context.attention_cores`). `runs`: how often a forward runs modules, and
        on how much (`models.meta_forward`); of one that is absent once, on T x H elements.

        Row products and the embedding are summed forward. Column products of a parent module that
        read the same tensor share it, and its gradient is summed once backward.
        """
        tp, e = layout.tp, FLOAT  # gradients are summed in fp32, whatever the parameters are
        plan = dataclasses.replace(plan, tensor=plan.tensor_for(layout))
        everything = [p for p in placements.values() if _is_own(p, placements)]
        every = [p for p in everything if not p.is_expert]
        moved = [p for p in everything if p.is_expert]
        own = [p for p in every if _is_trained(p, trained, constant)]

        def late(p: Placement) -> bool:
            return (tp > 1 and ("tp" in p.grad_sum or p.has_copies)) or (
                num_stages > 1 and p.name in {*plan.ties, *plan.ties.values()}
            )

        fields = _sums(plan, placements, tp, experts_per_token, runs or {}) if tp > 1 else {}
        slices = tp > 1 and layout.sequence_parallel
        if slices:
            fields |= _slices(plan, placements, fields, experts_per_token, routing_width)
        if slices and fp8:
            fewer = _gathered_again(plan.tensor, placements, fp8, runs or {})
            gathers = fields["backward_gathers"]
            fields["backward_gathers"] = gathers[: len(gathers) - fewer]
        if tp > 1 and trained is not None:
            fields |= _frozen_sums(plan, placements, fields, trained, runs or {}, first=stage == 0)
        if tp > 1 and recompute.repeats_sums(layout.recompute):
            again, stops = _again(plan, placements, layout)
            repeated = _sums(plan, again, tp, 0, runs or {})
            if slices:
                repeated |= _slices(plan, again, repeated, experts_per_token, routing_width)
                scatters = repeated["forward_scatters"]
                fields["repeated_scatters"] = scatters[: len(scatters) - stops]
                fields["repeated_choices"] = repeated["choices"]
            else:
                fields["repeated_sums"] = repeated["forward_sums"] - stops
            fields["repeated_gathers"] = repeated["forward_gathers"]
        partial: dict[str, int] = {}
        for placement in own if tp > 1 else []:
            if "tp" in placement.grad_sum:
                _count(partial, "tp", math.prod(placement.local_shape) * e)
            for block in placement.blocks:
                if block.copies > 1:
                    axis = copies_axis(block.copies, tp)
                    _count(partial, axis, math.prod(block.size) * e)
        tied = []
        ties = plan.ties if num_stages > 1 and trained is None else {}
        for name, owner in sorted(ties.items()):
            held = placements.get(owner, placements.get(name))
            if held is not None:
                tied.append(math.prod(held.local_shape) * e)
        return cls(
            stage=stage,
            gradient_bytes=tuple(math.prod(p.local_shape) * e for p in own),
            late=tuple(late(p) for p in own),
            blocks=tuple(block_of(p.name, plan.stages) for p in own),
            frozen=tuple(
                (
                    block_of(p.name, plan.stages),
                    math.prod(p.local_shape) * e,
                    late(p),
                    p.name in packed,
                )
                for p in every
                if not _is_trained(p, trained, constant)
            ),
            partial_bytes=partial,
            tied_bytes=tuple(tied),
            router_sums=2 * plan.router.experts + 1
            if plan.router is not None and plan.router.of_all_ranks
            else 0,
            **_experts(plan, placements, layout),
            **over_context(plan, placements, layout, handed or {}, cores),
            expert_gradients=tuple(
                (block_of(p.name, plan.stages), math.prod(p.local_shape) * e)
                for p in moved
                if _is_trained(p, trained, constant)
            ),
            expert_frozen=tuple(
                (block_of(p.name, plan.stages), math.prod(p.local_shape) * e)
                for p in moved
                if not _is_trained(p, trained, constant)
            ),
            **fields,
        )


def _experts(
    plan: ParallelPlan, placements: Mapping[str, Placement], layout: Layout
) -> dict[str, Any]:
    """The fields of a share that come from experts over ranks."""

    def counts(held: Mapping[str, Placement]) -> dict[str, int]:
        return {n.rpartition(".")[0]: p.shape[0] for n, p in held.items() if p.is_expert}

    modules = counts(placements)
    if not modules:
        return {}
    found: dict[str, Any] = {"experts": tuple(modules.values())}
    if layout.recompute == "full":
        assert plan.stages is not None
        again = counts(recomputed_placements(plan, placements, layout))
        depth = len(plan.stages.layers.split(".")) + 1
        own = [".".join(module.split(".")[depth:]) for module in again]
        found["experts_again"] = tuple(again.values())
        found["experts_whole"] = sum(name not in plan.stages.ends for name in own)
    return found


def _is_own(placement: Placement, placements: Mapping[str, Placement]) -> bool:
    """Whether a name is a parameter of its own here, not a second name of one on this stage."""
    return placement.tie is None or placement.tie not in placements


def _is_trained(
    placement: Placement, trained: Collection[str] | None, constant: Collection[str]
) -> bool:
    """Whether a parameter has a gradient."""
    return placement.name not in constant if trained is None else placement.name in trained


def _count(table: dict[str, int], key: str, number: int) -> None:
    table[key] = table.get(key, 0) + number


def _sums(
    plan: ParallelPlan,
    placements: Mapping[str, Placement],
    tp: int,
    experts_per_token: int,
    runs: Mapping[str, ModuleRuns],
) -> dict[str, Any]:
    """The fields of a share that come from how its modules are split."""
    if plan.tensor is None:
        return {}
    forward = weights = wider = 0
    entries: dict[_Entry, tuple[int, int]] = {}
    hidden = plan.hidden_size or 0
    once = ModuleRuns(times=1, learned=1, inputs=hidden, outputs=hidden)
    forward_gathers: list[int] = []
    backward_gathers: list[int] = []
    split_loss = False
    for module, owned in _modules(placements).items():
        split = _split_of(plan.tensor, module)
        if split is None:
            continue
        run = runs.get(module, once)
        backward = run.learned, run.learned * (run.inputs - hidden)
        if split.style == "column" and "weight" in owned:
            entry = _entry(module, runs)
            entries[entry] = max(entries.get(entry, backward), backward)
            if split.gather_output:
                forward_gathers += [_gathered(split, tp)] * run.times
        elif split.style == "vocab_head":
            entries[module, 0] = backward
            split_loss = True
        elif split.style in ("row", "vocab_embedding"):
            forward += run.times
            wider += run.times * (run.outputs - hidden)
            if split.scatter_input:
                backward_gathers += [_gathered(split, tp)] * run.learned
        elif split.style == "experts":
            forward += run.times
            wider += run.times * (run.outputs - hidden)
            entries[module, 0] = backward
            weights += experts_per_token * run.learned * run.weighted
    return {
        "forward_sums": forward,
        "backward_sums": sum(times for times, _ in entries.values()),
        "expert_weights": weights,
        "wider": wider + sum(size for _, size in entries.values()),
        "forward_gathers": tuple(forward_gathers),
        "backward_gathers": tuple(backward_gathers),
        "split_loss": split_loss,
    }


def _slices(
    plan: ParallelPlan,
    placements: Mapping[str, Placement],
    sums: Mapping[str, Any],
    experts_per_token: int,
    routing_width: int,
) -> dict[str, Any]:
    """The same with sequence parallelism: each sum over tp becomes a gathering and a sum in slices,
    and what products read is gathered once more for the gradients of their weights."""
    assert plan.tensor is not None
    assert plan.sequence is not None
    assert plan.hidden_size is not None
    width, k = plan.hidden_size, experts_per_token
    modules = _modules(placements)
    styles = {name: getattr(_split_of(plan.tensor, name), "style", "") for name in modules}
    experts = sum(style == "experts" for style in styles.values())
    leaving = sums["forward_sums"]
    entering = sums["backward_sums"] - experts
    # Held whole: the embedding's slices are gathered backward, and the head's input forward.
    embedding = sum(n == plan.sequence.embedding and not s for n, s in styles.items())
    replicated = sum(n in plan.sequence.replicated for n in styles)
    # Activations and routing weights of one dtype travel together, else each by itself.
    one, both = (width,), (width + k,) if routing_width == 1 else (width, k * routing_width)
    return {
        "forward_sums": 0,
        "backward_sums": 0,
        "expert_weights": 0,
        "wider": 0,
        "forward_gathers": sums["forward_gathers"] + one * (entering + replicated) + both * experts,
        "forward_scatters": one * leaving,
        "backward_gathers": sums["backward_gathers"] + one * (leaving + embedding + entering),
        "backward_scatters": one * entering + both * experts,
        "choices": (k,) * experts,
    }


def _gathered_again(
    plan: TensorPlan | None,
    placements: Mapping[str, Placement],
    fp8: Collection[str],
    runs: Mapping[str, ModuleRuns],
) -> int:
    """Inputs that need not be gathered again in backward: all their readers multiply in fp8."""
    assert plan is not None
    entries: dict[_Entry, bool] = {}
    for module, owned in _modules(placements).items():
        if getattr(_split_of(plan, module), "style", "") == "column" and "weight" in owned:
            entry = _entry(module, runs)
            entries[entry] = entries.get(entry, True) and module in fp8
    return sum(entries.values())


def _frozen_sums(
    plan: ParallelPlan,
    placements: Mapping[str, Placement],
    fields: Mapping[str, Any],
    trained: Collection[str],
    runs: Mapping[str, ModuleRuns],
    *,
    first: bool,
) -> dict[str, Any]:
    """The backward of a stage whose weights are frozen, and adapters trained in addition.

    What is gathered again for the gradients of weights is not: adapters keep their whole input. On
    the `first` stage nothing before the first adapter has a gradient, nor has its input.
    """
    assert plan.tensor is not None
    modules = list(_modules(placements))
    adapted = {name.rpartition(".lora_")[0] for name in trained}
    start = min((modules.index(name) for name in adapted if name in modules), default=0)
    entries: dict[_Entry, int] = {}
    leaving = reached = 0
    for index, module in enumerate(modules):
        style = getattr(_split_of(plan.tensor, module), "style", "")
        if style == "column" and "weight" in _modules(placements)[module]:
            entries.setdefault(_entry(module, runs), index)
        elif style in ("vocab_head", "experts"):
            entries.setdefault((module, 0), index)
        if style in ("row", "experts", "vocab_embedding"):
            leaving += 1
            reached += index >= start
    # The layers that share the first adapter's input are one entry, and it has no gradient.
    own = _entry(modules[start], runs) if modules else None
    lost = sum(index <= start or entry == own for entry, index in entries.items()) if first else 0
    if not fields.get("forward_scatters"):
        return {"backward_sums": fields["backward_sums"] - lost}
    width = (plan.hidden_size,)
    split = sum(
        bool(getattr(_split_of(plan.tensor, module), "scatter_input", False)) for module in modules
    )
    whole = fields["backward_gathers"][:split]
    return {
        "backward_gathers": whole + width * (reached if first else leaving),
        "backward_scatters": fields["backward_scatters"][lost:],
    }


def _again(
    plan: ParallelPlan, placements: Mapping[str, Placement], layout: Layout
) -> tuple[dict[str, Placement], int]:
    """The placements of the layers, or feed-forward layers, that are run again, and how many sums
    these stop before."""
    assert plan.stages is not None
    assert plan.tensor is not None
    prefix = f"{plan.stages.layers}."
    again, ends = recomputed_placements(plan, placements, layout), plan.stages.ends
    if layout.recompute != "full":
        again, ends = _of_feed_forward(plan, again), plan.stages.feed_forward_ends
    stops = 0
    for module in _modules(again):
        split = _split_of(plan.tensor, module)
        own = module[len(prefix) :].partition(".")[2]
        if split is not None and split.style in ("row", "experts") and own in ends:
            stops += 1
    return again, stops


def _of_feed_forward(
    plan: ParallelPlan, placements: Mapping[str, Placement]
) -> dict[str, Placement]:
    """Those of them that are in feed-forward layers without experts."""
    assert plan.stages is not None
    assert plan.tensor is not None
    depth = len(plan.stages.layers.split(".")) + 1
    found: dict[str, Placement] = {}
    mixtures: set[str] = set()
    for name, placement in placements.items():
        parts = name.split(".")
        own = ".".join(parts[depth:])
        inside = next((f for f in plan.stages.feed_forward if own.startswith(f"{f}.")), None)
        if inside is None:
            continue
        found[name] = placement
        style = getattr(_split_of(plan.tensor, name.rpartition(".")[0]), "style", "")
        if placement.is_expert or style == "experts":
            mixtures.add(".".join((*parts[:depth], inside, "")))
    return {name: p for name, p in found.items() if not name.startswith(tuple(mixtures))}


def _entry(module: str, runs: Mapping[str, ModuleRuns]) -> _Entry:
    """Where the input of a column layer comes from: its parent module and a tensor's number. Layers
    of one parent count as readers of one tensor where no forward has shown it."""
    return module.rpartition(".")[0], runs[module].reads if module in runs else 0


def _modules(placements: Mapping[str, Placement]) -> dict[str, set[str]]:
    """Module name to the names of its own parameters."""
    found: dict[str, set[str]] = {}
    for name in placements:
        module, _, parameter = name.rpartition(".")
        found.setdefault(module, set()).add(parameter)
    return found


def _split_of(plan: TensorPlan, module: str) -> Split | None:
    if module in plan.splits:
        return plan.splits[module]
    return next((s for pattern, s in plan.splits.items() if matches(pattern, module)), None)


def _gathered(split: Split, tp: int) -> int:
    """Elements per token that an all-gather of one split dim ends with; parts travel padded."""
    return tp * max(_rows(split.segments, rank, tp) for rank in range(tp))


def _rows(segments: tuple[WeightSegment, ...], rank: int, tp: int) -> int:
    return sum(segment.slice(rank, tp)[1] for segment in segments)
