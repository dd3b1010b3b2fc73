"""A whole step's prices on a machine that was measured: ModelShape x Layout x batch to StepPrices.

The model's shape must be traced in the type it is trained in (`trace(config, dtype=...)`): what is
cast to fp32 and back in bf16 is no work at all in fp32.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from hocket.cost.communication import (
    Step,
    bucket_bytes,
    communication,
    frozen_buckets,
    shared_buckets,
)
from hocket.cost.local import held_elements, is_expert, stacked_experts, tensor_elements
from hocket.cost.measured_exchange import exchange_share, exchanges
from hocket.cost.measured_links import MeasuredLinks
from hocket.cost.measured_rates import BYTES, Rates
from hocket.cost.measured_stage import (
    GRADIENT_BYTES,
    Microbatch,
    stage_blocks,
    stage_seconds,
    trained_weights,
    weight_blocks,
    weights,
)
from hocket.cost.stage_communication import StageShare
from hocket.spec.cut import choose_cut, stage_layers
from hocket.spec.layout import Layout
from hocket.spec.model_shape import ModelShape, Weight
from hocket.spec.precision import SMALLEST_8BIT, moment_bytes
from hocket.spec.process_groups import copies_axis, num_copies
from hocket.spec.recompute import MADE_AGAIN, modules
from hocket.spec.run import Workload
from hocket.spec.schedule import Schedule
from hocket.spec.step_prices import Collective, RankStep, StageStep, StepPrices

LOOP_CALLS = 60
"""Small operations that a step takes apart from the model: the batch, the gradients' clearing, what
the loop reads and reports; as many as `training.loop` runs."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepProblem:
    """What is estimated.

    Attributes:
        shape: of the model, traced in `workload.dtype`. layout: with its microbatches.
        schedule: of the layout's pipeline ranks. bucket_mb: of gradients. clip: whether the norm
            is computed and gradients are scaled. optimizer: as `TrainOptions.optimizer`.
    """

    shape: ModelShape
    layout: Layout
    workload: Workload
    schedule: Schedule
    bucket_mb: float = 25.0
    clip: bool = True
    optimizer: str = "adamw"
    cuda: bool = False

    @property
    def microbatches(self) -> int:
        """Of one data rank."""
        return self.layout.microbatches or 1

    @property
    def microbatch(self) -> Microbatch:
        """What one forward is given."""
        return Microbatch(
            batch=self.workload.global_batch // self.layout.dp // self.microbatches,
            sequence=self.workload.seq_len,
            tp=self.layout.tp,
            dp=self.layout.dp,
            cp=self.layout.cp,
            slices=self.layout.sequence_parallel,
            ep=self.layout.ep,
            etp=self.layout.etp,
        )

    @property
    def element_bytes(self) -> int:
        """Of weights and activations."""
        return BYTES[self.workload.dtype]

    @property
    def hidden_bytes(self) -> int:
        """What tensor ranks sum or gather: one hidden state."""
        return self.microbatch.tokens * self.shape.hidden * self.element_bytes

    @property
    def stream_bytes(self) -> int:
        """What a rank has of a hidden state between blocks, and what stages send each other."""
        return self.hidden_bytes // self.microbatch.stream_ranks

    def blocks(self, stage: int) -> list[str]:
        """The kinds of the blocks of one stage, in order."""
        bounds = self.bounds()
        last = stage == len(bounds) - 1
        return stage_blocks(self.shape, stage_layers(bounds, stage), stage == 0, last)

    def again(self, stage: int, mode: str) -> list[str]:
        """The kinds of a stage's layers that are recomputed, if they are in this mode."""
        if self.layout.recompute != mode and mode not in modules(self.layout.recompute):
            return []
        layers = [kind for kind in self.blocks(stage) if kind not in ("embedding", "head")]
        return layers[: self.layout.recompute_layers]

    def adapter_bytes(self, kind: str) -> int:
        """What adapters of one block keep of whole sequences, where the rest keeps slices: the
        gathered input of each split block, once, and what A returns."""
        if not self.layout.sequence_parallel or self.layout.tp == 1:
            return 0
        products = self.shape.blocks[kind].products
        adapters = {p.name: p for p in products if p.lora}
        thin = [adapters[f"{p.name}.lora_A"] for p in products if f"{p.name}.lora_A" in adapters]
        inputs = {p.input or p.name: p.k * p.count for p in thin if p.split == "outside"}
        elements = sum(inputs.values()) + sum(p.n * p.count for p in thin)
        missing = elements * (self.layout.tp - 1) / self.layout.tp  # one slice is counted already
        return round(missing * self.microbatch.tokens * self.element_bytes)

    def bounds(self) -> tuple[int, ...]:
        """Layers per stage, cut as the runtime cuts."""
        shape, number = self.shape, self.schedule.num_stages
        if number == 1:
            return (len(shape.layers),)
        return choose_cut(
            self.layout.pipeline_split,
            len(shape.layers),
            number,
            **shape.cut_costs(cuda=self.cuda),
        )

    def share(self, stage: int) -> StageShare:
        """What a tensor rank holds of a stage, as far as it makes it communicate."""
        blocks, tp = self.blocks(stage), self.layout.tp
        held = weights(self.shape, blocks)
        forward = backward = 0
        split_loss = False
        for kind in blocks if tp > 1 else ():
            block = self.shape.blocks[kind]
            products = [p for p in block.products if not p.lora]
            if self.layout.etp is not None:  # experts are whole: nothing of theirs is summed
                products = [p for p in products if p.groups == 1]
            forward += sum(p.split == "row" for p in products)
            backward += len({p.input or p.name for p in products if p.split == "column"})
            if kind == "embedding":
                forward += any(w.split == "vocab" for w in block.weights)
            if kind == "head" and any(p.split == "vocab" for p in block.products):
                backward += 1
                split_loss = True
        again = self.again(stage, "full") if tp > 1 else []
        rows = [
            p
            for kind in again
            for p in self.shape.blocks[kind].products
            if p.split == "row" and not p.lora
            if p.groups == 1 or self.layout.etp is None
        ]
        repeated = sum(not p.ends for p in rows)
        entries, exits = self._untouched(blocks) if tp > 1 else (0, 0)
        sums: dict[str, Any] = {
            "forward_sums": forward, "repeated_sums": repeated,
            "backward_sums": backward - entries,
        }  # fmt: skip
        if tp > 1 and self.layout.sequence_parallel:
            one, entered = (self.shape.hidden,), len(rows)
            # Inputs are gathered once more for the gradients of what is not frozen.
            inputs = 0 if self.adapted else backward
            sums = {
                "forward_gathers": one * backward,
                "forward_scatters": one * forward,
                "repeated_gathers": one * entered,
                "repeated_scatters": one * repeated,
                "backward_gathers": one * (forward - exits + inputs),
                "backward_scatters": one * (backward - entries),
            }
        of_blocks = list(zip(weight_blocks(self.shape, blocks), held, strict=True))
        placed = [pair for pair in of_blocks if self.is_placed(pair[1])]
        of_blocks = [pair for pair in of_blocks if not self.is_placed(pair[1])]
        held = [weight for _, weight in of_blocks]
        return StageShare(
            stage=stage,
            split_loss=split_loss,
            gradient_bytes=tuple(
                tensor_elements(w, tp) * GRADIENT_BYTES for w in trained_weights(held)
            ),
            late=tuple(self.is_late(w) for w in trained_weights(held)),
            blocks=tuple(block for block, weight in of_blocks if not weight.frozen),
            frozen=tuple(
                (block, tensor_elements(w, tp) * GRADIENT_BYTES, self._sees_a_slice(w))
                for block, w in of_blocks
                if w.frozen
            ),
            **exchange_share(self, stage, placed),
            partial_bytes=self._partial(trained_weights(held)),
            tied_bytes=self._tied(blocks),
            **sums,
        )

    def _untouched(self, blocks: Sequence[str]) -> tuple[int, int]:
        """(ways in, ways out) of split products through which no gradient goes back: nothing before
        a model's first adapter is trained."""
        entries: set[str] = set()
        exits = 0
        if not self.adapted or blocks[0] != "embedding":
            return 0, 0
        for number, kind in enumerate(blocks):
            block = self.shape.blocks[kind]
            exits += kind == "embedding" and any(w.split == "vocab" for w in block.weights)
            names = {p.name for p in block.products}
            for product in (p for p in block.products if not p.lora):
                if product.split == "column":
                    entries.add(f"{number}.{product.input or product.name}")
                if f"{product.name}.lora_A" in names:
                    return len(entries), exits
                exits += product.split == "row"
        return len(entries), exits

    def is_late(self, weight: Weight) -> bool:
        """Whether a gradient is summed over other axes before it is reduced: a part's, that of
        heads that several ranks hold, and that of a weight which another stage holds too."""
        if self._sees_a_part(weight) or _partial([weight], self.layout.tp):
            return True
        if not self.shape.tied or self.schedule.num_stages == 1:
            return False
        ends = [self.shape.blocks[kind].weights for kind in ("embedding", "head")]
        return all(weight.name in {w.name for w in held} for held in ends)

    def _sees_a_part(self, weight: Weight) -> bool:
        """Whether a weight that is not split sees one slice of the sequence alone, or also a
        frozen one that is split a part of its inputs or outputs."""
        whole = self.adapted and self.layout.tp > 1 and weight.split == "outside"
        return whole or self._sees_a_slice(weight)

    def _sees_a_slice(self, weight: Weight) -> bool:
        """Whether a weight that is not split sees one slice of the sequence alone."""
        slices = self.layout.sequence_parallel and self.layout.tp > 1
        return slices and weight.split == "outside"

    @property
    def adapted(self) -> bool:
        """Whether adapters are trained instead of the model."""
        return any(w.frozen for w in self.shape.blocks["head"].weights)

    def _partial(self, held: Sequence[Weight]) -> dict[str, int]:
        """Gradients that are summed over tensor ranks once a step: of key/value heads that several
        hold, and of what each has seen a slice for."""
        found = _partial(held, self.layout.tp)
        parts = sum(w.elements * GRADIENT_BYTES for w in held if self._sees_a_part(w))
        if parts:
            found["tp"] = found.get("tp", 0) + parts
        return found

    def is_placed(self, weight: Weight) -> bool:
        """Whether a weight is of experts that lie over ranks."""
        return self.layout.splits_experts and is_expert(weight, self._experts)

    @property
    def state_ranks(self) -> int:
        """Ranks that share one optimizer state of what is no expert."""
        return (self.layout.shard or self.layout.dp) * self.layout.cp if self.layout.zero else 1

    def elements(self, weight: Weight) -> int:
        """Of a weight, on the rank with the most: of an expert's, of those over ep and etp."""
        return held_elements(weight, self.layout, self._experts)

    def states(self, weight: Weight) -> int:
        """Ranks that share the optimizer state of a weight."""
        if self.layout.zero and self.is_placed(weight):
            return self.layout.expert_copies
        return self.state_ranks

    @functools.cached_property
    def _experts(self) -> tuple[str, ...]:
        """Beginnings of the names of stacked experts' weights."""
        blocks = self.shape.blocks.values()
        return stacked_experts(p for block in blocks for p in block.products)

    def _tied(self, blocks: Sequence[str]) -> tuple[int, ...]:
        if not self.shape.tied or self.schedule.num_stages == 1:
            return ()
        ends = [self.shape.blocks[kind].weights for kind in blocks if kind in ("embedding", "head")]
        other = {w.name for kind in ("embedding", "head") for w in self.shape.blocks[kind].weights}
        both = [
            w
            for w in self.shape.blocks["head"].weights
            if not w.frozen
            if w.name in {e.name for e in self.shape.blocks["embedding"].weights} & other
        ]
        return (
            tuple(tensor_elements(w, self.layout.tp) * GRADIENT_BYTES for w in both) if ends else ()
        )

    @property
    def step(self) -> Step:
        """One step, as `cost.communication` asks for it."""
        return Step(
            seq_len=self.workload.seq_len // self.layout.cp,
            microbatch_size=self.microbatch.batch,
            num_microbatches=self.microbatches,
            hidden_size=self.shape.hidden,
            element_bytes=self.element_bytes,
            counts_tokens=False,
            experts_per_token=self.shape.experts_per_token,
            bucket_bytes=self.bucket_mb * 1e6,
        )

    def communication(self) -> list[list[dict[str, Any]]]:
        """By rank: every collective of one step, as the runtime counts them."""
        place = self.schedule.stage_ranks
        shares = [self.share(stage) for stage in range(len(place))]
        found = []
        for rank in range(self.layout.world_size):
            here = self.layout.coordinate(rank)["pp"]
            held = [share for share, owner in zip(shares, place, strict=True) if owner == here]
            found.append(communication(self.layout, rank, self.step, held, place))
        return found


def _partial(held: Sequence[Weight], tp: int) -> dict[str, int]:
    """Key/value heads that several tensor ranks hold: their gradients are summed once a step."""
    found: dict[str, int] = {}
    for weight in held:
        for elements, units in weight.segments:
            if weight.split == "column" and 1 < units < tp:
                axis = copies_axis(tp // units, tp)
                found[axis] = found.get(axis, 0) + elements // units * GRADIENT_BYTES
    return found


def step_prices(job: StepProblem, rates: Rates, links: MeasuredLinks) -> StepPrices:
    """The prices of everything that a step does."""
    layout, place = job.layout, job.schedule.stage_ranks
    stages = tuple(_stage(job, number, rates, links) for number in range(len(place)))
    ranks = tuple(
        _rank(job, [s for s, owner in enumerate(place) if owner == index], rates, links)
        for index in range(layout.pp)
    )
    one_replica = layout.pp * layout.cp * layout.tp
    return StepPrices(
        stages=stages,
        ranks=ranks,
        loss=links.collective("all-reduce", "world", 4, layout.world_size),
        norm=links.collective("all-reduce", "model", 4, one_replica) if job.clip else None,
    )


def _stage(job: StepProblem, stage: int, rates: Rates, links: MeasuredLinks) -> StageStep:
    blocks, share, tp = job.blocks(stage), job.share(stage), job.layout.tp
    seconds = stage_seconds(
        job.shape,
        blocks,
        job.microbatch,
        rates,
        full=job.again(stage, "full"),
        selective=job.again(stage, "core_attn"),
        modules={kind: job.again(stage, kind) for kind in MADE_AGAIN},
    )

    def tensor(name: str, count: int) -> list[Collective]:
        one = links.collective(name, "tp", job.hidden_bytes, tp) if count else None
        return [one] * count if one else []

    forward = tensor("all-reduce", share.forward_sums)
    forward += tensor("all-gather", len(share.forward_gathers))
    forward += tensor("reduce-scatter", len(share.forward_scatters))
    backward = tensor("all-reduce", share.backward_sums + share.repeated_sums)
    backward += tensor("all-gather", len(share.backward_gathers) + len(share.repeated_gathers))
    backward += tensor("reduce-scatter", len(share.backward_scatters + share.repeated_scatters))
    if share.split_loss:
        found = links.collective("all-gather", "tp", tp * 2 * job.microbatch.tokens * 4, tp)
        forward += [found] if found else []
    reductions: list[Collective | None] = []
    whole = [] if job.layout.zero else bucket_bytes(share.gradient_bytes, job.bucket_mb * 1e6)
    data = "data" if job.layout.cp > 1 else "dp"
    reductions += [links.collective("all-reduce", data, n, job.layout.data_degree) for n in whole]
    gathered: list[tuple[Collective, int]] = []
    shared = shared_buckets(job.layout, job.step, share) if job.layout.zero else ()
    for late, nbytes, gathers in shared:
        ranks = job.state_ranks
        if job.layout.zero == 3:
            size = nbytes // GRADIENT_BYTES * job.element_bytes
            values = links.collective("all-gather", "shard", size, ranks)
            gathered += [(values, gathers)] if values else []
        # ZeRO-2 and 3 reduce in every microbatch; all of them are laid to the last.
        often = job.microbatches if job.layout.zero > 1 and not late else 1
        reductions += [links.collective("reduce-scatter", "shard", nbytes, ranks)] * often
        rest = job.layout.data_degree // ranks
        reductions.append(links.collective("all-reduce", "replicas", nbytes // ranks, rest))
    for nbytes, gathers in frozen_buckets(job.layout, job.step, share) if job.layout.zero else ():
        size = nbytes // GRADIENT_BYTES * job.element_bytes
        values = links.collective("all-gather", "shard", size, job.state_ranks)
        gathered += [(values, gathers)] if values else []
    for values, gathers in gathered:
        forward.append(values)
        backward += [values] * (gathers // job.microbatches - 1)
    there, back, states = exchanges(job, share, links)
    forward, backward = forward + there, backward + back
    reductions += states
    last = stage == job.schedule.num_stages - 1
    return StageStep(
        forward=seconds.forward,
        input=seconds.input,
        weight=seconds.weight,
        first_weight=seconds.first_weight,
        forward_collectives=tuple(forward),
        backward_collectives=tuple(backward),
        message=None if last else links.message(job.stream_bytes),
        reductions=tuple(one for one in reductions if one is not None),
    )


def _rank(job: StepProblem, stages: Sequence[int], rates: Rates, links: MeasuredLinks) -> RankStep:
    layout, place = job.layout, job.schedule.stage_ranks
    held = [w for stage in stages for w in trained_weights(weights(job.shape, job.blocks(stage)))]
    elements = sum(map(job.elements, held))
    gradients = float(elements * GRADIENT_BYTES)
    sums: list[Collective | None] = []
    ends = [stage for stage in stages if stage in (0, len(place) - 1)]
    if ends and place[0] != place[-1]:
        sums += [
            links.collective("all-reduce", "embedding", nbytes, 2)
            for nbytes in job.share(ends[0]).tied_bytes
        ]
    for stage in stages:
        for axis, nbytes in job.share(stage).partial_bytes.items():
            ranks = num_copies(axis, layout.tp)
            sums.append(links.collective("all-reduce", axis, nbytes, ranks))
        # Values gathered: waited for in the next step, and counted in this one.
        if layout.zero in (1, 2):
            for nbytes in bucket_bytes(job.share(stage).gradient_bytes, job.bucket_mb * 1e6):
                size = nbytes // GRADIENT_BYTES * job.element_bytes
                sums.append(links.collective("all-gather", "shard", size, job.state_ranks))
    gradients, mine = gradients / job.state_ranks, elements // job.state_ranks
    if layout.splits_experts:
        mine = sum(job.elements(w) // job.states(w) for w in held)
        gradients = float(mine * GRADIENT_BYTES)
    loop = LOOP_CALLS * rates.call("add")
    # The norm reads every gradient; clipping, where it happens, rewrites them.
    norm = rates.streams(gradients, len(held)) + rates.streams(2 * gradients, len(held))
    return RankStep(
        before=loop / 2,
        sums=tuple(one for one in sums if one is not None),
        norm=norm if job.clip else 0.0,
        optimizer=rates.optimizer(mine, len(held)),
        after=loop / 2,
    )


def resident_bytes(job: StepProblem, index: int) -> dict[str, int]:
    """Bytes that a pipeline rank holds all the time: `parameters`, `gradients`, `optimizer`. On a
    GPU, whose allocator is asked for its peak, buffers of modules count with parameters."""
    stages = [s for s, owner in enumerate(job.schedule.stage_ranks) if owner == index]
    held = [w for stage in stages for w in weights(job.shape, job.blocks(stage))]
    values = sum(job.elements(w) * w.stored for w in held)
    if job.layout.zero == 3:
        values = sum(job.elements(w) // job.states(w) * w.stored for w in held)
    held = trained_weights(held)
    elements = sum(map(job.elements, held))
    mine = sum(job.elements(w) // job.states(w) for w in held)
    exact = job.element_bytes == GRADIENT_BYTES and not job.layout.offloads("optimizer")
    masters = 0 if exact else 4 * mine
    gradients = mine if job.layout.zero else elements
    small = sum(job.elements(w) // job.states(w) for w in held if w.elements < SMALLEST_8BIT)
    moments = 8 * small + moment_bytes(job.optimizer) * (mine - small)
    kinds = (kind for stage in stages for kind in job.blocks(stage)) if job.cuda else ()
    buffers = sum(job.shape.blocks[kind].buffers for kind in kinds)
    return {
        "parameters": round((values + buffers) * job.element_bytes),
        "gradients": gradients * GRADIENT_BYTES,
        # Two moments, a step's number for each tensor, and masters of what is not fp32.
        "optimizer": round(moments) + 4 * len(held) + masters,
    }
