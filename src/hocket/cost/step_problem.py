"""StepProblem: one step of one layout, from a model's shape: what each stage holds, and what its
ranks communicate.

The model's shape must be traced in the type it is trained in (`trace(config, dtype=...)`): what is
cast to fp32 and back in bf16 is no work at all in fp32.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any

from hocket.cost.communication import communication
from hocket.cost.communication_table import Step
from hocket.cost.local import (
    held_elements,
    is_expert,
    stacked_experts,
    stream_ranks,
    tensor_elements,
    tensor_gathers,
    tensor_sums,
)
from hocket.cost.measured_rates import BYTES
from hocket.cost.measured_stage import (
    ENDS,
    GRADIENT_BYTES,
    Microbatch,
    placed_weights,
    stage_blocks,
    trained_weights,
)
from hocket.cost.recomputed import feed_forward_part
from hocket.cost.stage_communication import StageShare
from hocket.spec.cut import stage_layers
from hocket.spec.layout import Layout
from hocket.spec.model_shape import ModelShape, Weight
from hocket.spec.process_groups import copies_axis
from hocket.spec.recompute import modules
from hocket.spec.run import Workload
from hocket.spec.schedule import Schedule


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepProblem:
    """What is estimated.

    Attributes:
        shape: of the model, traced in `workload.dtype`. layout: with its microbatches.
        schedule: of the layout's pipeline ranks. bucket_mb: of gradients.
        optimizer: as `TrainOptions.optimizer`.
        element_bytes: of weights and activations; 0: as the workload's dtype has it.
        gradient_bytes: of an element of a gradient.
    """

    shape: ModelShape
    layout: Layout
    workload: Workload
    schedule: Schedule
    bucket_mb: float = 25.0
    optimizer: str = "adamw"
    cuda: bool = False
    element_bytes: int = 0
    gradient_bytes: int = GRADIENT_BYTES

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
            layout=self.layout,
        )

    def __post_init__(self) -> None:
        element_bytes = self.element_bytes or BYTES[self.workload.dtype]
        object.__setattr__(self, "element_bytes", element_bytes)

    @property
    def hidden_bytes(self) -> int:
        """What tensor ranks sum or gather: one hidden state."""
        return self.step.hidden_bytes

    @property
    def stream_bytes(self) -> int:
        """What a rank has of a hidden state between blocks, and what stages send each other."""
        return self.hidden_bytes // stream_ranks(self.layout)

    def blocks(self, stage: int) -> list[str]:
        """The kinds of the blocks of one stage, in order."""
        bounds = self.bounds()
        last = stage == len(bounds) - 1
        return stage_blocks(self.shape, stage_layers(bounds, stage), stage == 0, last)

    def again(self, stage: int, mode: str) -> list[str]:
        """The kinds of a stage's layers that are recomputed, if they are in this mode; activation
        functions, where they are not part of a feed-forward layer that is."""
        asked = modules(self.layout.recompute)
        if self.layout.recompute != mode and mode not in asked:
            return []
        layers = [kind for kind in self.blocks(stage) if kind not in ENDS]
        layers = layers[: self.layout.recompute_layers]
        if mode == "activation" and "mlp" in asked:
            blocks = self.shape.blocks
            layers = [kind for kind in layers if not feed_forward_part(blocks[kind]).products]
        return layers

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
        number = self.schedule.num_stages
        split = self.layout.pipeline_split if number > 1 else "balanced"
        return self.shape.cut(split, number, cuda=self.cuda)

    def share(self, stage: int) -> StageShare:
        """What a tensor rank holds of a stage, as far as it makes it communicate."""
        blocks, tp = self.blocks(stage), self.layout.tp
        whole = self.layout.etp is not None  # experts are: nothing of theirs is summed
        once, again = (
            [tensor_sums(self.shape.blocks[kind], experts=not whole) for kind in kinds if tp > 1]
            for kinds in (blocks, self.again(stage, "full"))
        )
        if tp > 1:
            dense = (self.shape.blocks[kind] for kind in self.again(stage, "mlp"))
            again += [tensor_sums(feed_forward_part(block)) for block in dense]
        forward, backward = (sum(each[way] for each in once) for way in (0, 1))
        entered, repeated = (sum(each[way] for each in again) for way in (0, 2))
        logits, one = self.shape.blocks["head"].products, (self.shape.hidden,)
        entries, exits = self._untouched(blocks) if tp > 1 else (0, 0)
        sums: dict[str, Any] = {
            "forward_sums": forward, "repeated_sums": repeated,
            "backward_sums": backward - entries,
        }  # fmt: skip
        outputs, gradients, outputs_again = (
            tuple(
                round(width)
                for kind in kinds
                for width in tensor_gathers(self.shape.blocks[kind])[way]
                if tp > 1
            )
            for kinds, way in ((blocks, 0), (blocks, 1), (self.again(stage, "full"), 0))
        )
        sums |= {
            "forward_gathers": outputs, "repeated_gathers": outputs_again,
            "backward_gathers": gradients,
        }  # fmt: skip
        if tp > 1 and self.layout.sequence_parallel:
            # Inputs are gathered once more for the gradients of what is not frozen.
            inputs = 0 if self.adapted else backward
            sums = {
                "forward_gathers": outputs + one * backward,
                "forward_scatters": one * forward,
                "repeated_gathers": outputs_again + one * entered,
                "repeated_scatters": one * repeated,
                "backward_gathers": gradients + one * (forward - exits + inputs),
                "backward_scatters": one * (backward - entries),
            }
        of_blocks = [
            (ENDS.get(blocks[number], str(number)), weight)
            for number, weight in placed_weights(self.shape, blocks)
        ]
        placed = [pair for pair in of_blocks if self.is_placed(pair[1])]
        of_blocks = [pair for pair in of_blocks if not self.is_placed(pair[1])]
        held = [weight for _, weight in of_blocks]
        return StageShare(
            stage=stage,
            split_loss=tp > 1 and "head" in blocks and any(p.split == "vocab" for p in logits),
            gradient_bytes=tuple(
                tensor_elements(w, tp) * self.gradient_bytes for w in trained_weights(held)
            ),
            late=tuple(self.is_late(w) for w in trained_weights(held)),
            blocks=tuple(block for block, weight in of_blocks if not weight.frozen),
            frozen=tuple(
                (
                    block,
                    tensor_elements(w, tp) * self.gradient_bytes,
                    self._sees_a_slice(w),
                    w.stored < 1,
                )
                for block, w in of_blocks
                if w.frozen
            ),
            **self._over_context(stage),
            **self._over_experts(stage, placed),
            partial_bytes=self._partial(trained_weights(held)),
            tied_bytes=self._tied(blocks),
            **sums,
        )

    def _over_context(self, stage: int) -> dict[str, Any]:
        """The fields of a share that cp needs."""
        if self.layout.cp == 1:
            return {}
        full, tp = self.again(stage, "full"), self.layout.tp

        def every(kinds: Sequence[str], field: str) -> list[Any]:
            return [each for kind in kinds for each in getattr(self.shape.blocks[kind], field)]

        again = every([*full, *self.again(stage, "core_attn")], "attention")
        return {
            "attentions": tuple(a.on_rank(tp) for a in every(self.blocks(stage), "attention")),
            "attentions_again": tuple(a.on_rank(tp) for a in again),
            "handed": tuple(every(self.blocks(stage), "handed")),
            "handed_again": tuple(every(full, "handed")),
        }

    def _over_experts(self, stage: int, placed: Sequence[tuple[str, Weight]]) -> dict[str, Any]:
        """The fields of a share that ep and etp need; `placed`: the experts' weights that lie over
        ranks, with the block that ZeRO-3 gathers them in."""
        if not self.layout.splits_experts:
            return {}

        def sets(kinds: Sequence[str]) -> tuple[int, ...]:
            blocks = [self.shape.blocks[kind].products for kind in kinds]
            return (self.shape.experts,) * sum(any(p.groups > 1 for p in b) for b in blocks)

        sizes = [(b, self.elements(w) * self.gradient_bytes, w.frozen) for b, w in placed]
        return {
            "experts": sets(self.blocks(stage)),
            "experts_again": sets(self.again(stage, "full")),
            "expert_gradients": tuple((b, size) for b, size, frozen in sizes if not frozen),
            "expert_frozen": tuple((b, size) for b, size, frozen in sizes if frozen),
        }

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
        copied = _copied([weight], self.layout.tp)
        return self._sees_a_part(weight) or bool(copied) or weight.name in self._shared

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
        found = _copied(held, self.layout.tp)
        parts = sum(w.elements for w in held if self._sees_a_part(w))
        if parts:
            found["tp"] = found.get("tp", 0) + parts
        return {axis: elements * self.gradient_bytes for axis, elements in found.items()}

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
        held = self.shape.blocks["head"].weights if set(blocks) & ENDS.keys() else ()
        return tuple(
            tensor_elements(w, self.layout.tp) * self.gradient_bytes
            for w in held
            if not w.frozen and w.name in self._shared
        )

    @functools.cached_property
    def _shared(self) -> frozenset[str]:
        """Names of the weights that the first and the last of several stages hold."""
        if not self.shape.tied or self.schedule.num_stages == 1:
            return frozenset()
        first, last = ({w.name for w in self.shape.blocks[kind].weights} for kind in ENDS)
        return frozenset(first & last)

    @property
    def step(self) -> Step:
        """One step, as `cost.communication` asks for it."""
        return Step(
            seq_len=self.workload.seq_len // self.layout.cp,
            microbatch_size=self.microbatch.batch,
            num_microbatches=self.microbatches,
            hidden_size=self.shape.hidden,
            element_bytes=self.element_bytes,
            gradient_bytes=self.gradient_bytes,
            counts_tokens=False,
            experts_per_token=self.shape.experts_per_token,
            bucket_bytes=self.bucket_mb * 1e6,
        )

    def communication(self, ranks: Iterable[int] | None = None) -> list[list[dict[str, Any]]]:
        """Of these ranks, or all: every collective of one step, as the runtime counts them."""
        place = self.schedule.stage_ranks
        shares = [self.share(stage) for stage in range(len(place))]
        found = []
        for rank in range(self.layout.world_size) if ranks is None else ranks:
            here = self.layout.coordinate(rank)["pp"]
            held = [share for share, owner in zip(shares, place, strict=True) if owner == here]
            found.append(communication(self.layout, rank, self.step, held, place))
        return found


def _copied(held: Sequence[Weight], tp: int) -> dict[str, int]:
    """Elements of key/value heads that several tensor ranks hold, by the axis of their ranks: their
    gradients are summed once a step."""
    found: dict[str, int] = {}
    for weight in held:
        for elements, units in weight.segments:
            if weight.split == "column" and 1 < units < tp:
                axis = copies_axis(tp // units, tp)
                found[axis] = found.get(axis, 0) + elements // units
    return found
