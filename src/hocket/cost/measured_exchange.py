"""Exchanges of context and expert parallelism on a measured machine, from the same tables as the
theory (`cost.context_communication`, `cost.expert_communication`).

A microbatch's messages of one kind are taken as equally long: what they cost is nearly linear in
their bytes. Nothing hides them: on CPU cores the copies are the ranks' own work.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hocket.cost.communication_table import Table
from hocket.cost.context_communication import add_attention, add_states
from hocket.cost.expert_communication import add_experts
from hocket.cost.measured_links import MeasuredLinks
from hocket.cost.stage_communication import StageShare
from hocket.spec.model_shape import Attention, Weight
from hocket.spec.step_prices import Collective

if TYPE_CHECKING:
    from hocket.cost.measured_prices import StepProblem

FORWARD = {"send": 1 / 3, "all-to-all": 1 / 2, "all-gather": 1 / 2}
"""Share of a microbatch's exchanges that forward has: a ring sends keys and values once there, and
them and their gradients in backward."""

GRADIENT_BYTES = 4


def exchange_share(
    job: StepProblem, stage: int, placed: Sequence[tuple[str, Weight]]
) -> dict[str, Any]:
    """The fields of a `StageShare` that cp, ep and etp need; none without them.

    Args:
        placed: weights of experts that lie over ranks, with the block that ZeRO-3 gathers them in.
    """
    found: dict[str, Any] = {}
    layout, blocks = job.layout, job.shape.blocks
    again = job.again(stage, "full")
    if layout.cp > 1:

        def cores(kinds: Sequence[str]) -> tuple[Attention, ...]:
            every = (core for kind in kinds for core in blocks[kind].attention)
            return tuple(core.on_rank(layout.tp) for core in every)

        repeated = [*again, *job.again(stage, "core_attn")]
        found |= {
            "attentions": cores(job.blocks(stage)),
            "attentions_again": cores(repeated),
            "handed": tuple(each for kind in job.blocks(stage) for each in blocks[kind].handed),
            "handed_again": tuple(each for kind in again for each in blocks[kind].handed),
        }
    if layout.splits_experts:

        def sets(kinds: Sequence[str]) -> tuple[int, ...]:
            return tuple(
                job.shape.experts
                for kind in kinds
                if any(p.groups > 1 for p in blocks[kind].products)
            )

        sizes = [(block, job.elements(w) * GRADIENT_BYTES, w.frozen) for block, w in placed]
        found |= {
            "experts": sets(job.blocks(stage)),
            "experts_again": sets(again),
            "expert_gradients": tuple((b, size) for b, size, frozen in sizes if not frozen),
            "expert_frozen": tuple((b, size) for b, size, frozen in sizes if frozen),
        }
    return found


def exchanges(
    job: StepProblem, share: StageShare, links: MeasuredLinks
) -> tuple[list[Collective], list[Collective], list[Collective]]:
    """What a stage exchanges: of one microbatch forward and backward, and of experts' gradients and
    values once a step."""
    table, lines, layout, number = Table(), Table(), job.layout, job.microbatches
    add_attention(table, layout, job.step, share)
    add_states(lines, layout, job.step, share, layout.cp // 2)  # inside the line: it sends most
    add_experts(table, layout, job.step, share, 0)
    ranks = {
        "cp": layout.cp,
        "expert": layout.ep,
        "tp": layout.tp,
        "expert_data": layout.expert_copies,
    }
    forward: list[Collective] = []
    backward: list[Collective] = []
    states: list[Collective] = []
    rows = [(row, FORWARD) for row in table.rows.items()]
    rows += [(row, dict.fromkeys(FORWARD, 1 / 2)) for row in lines.rows.items()]
    for ((name, axis, phase), (count, nbytes)), early in rows:
        if name == "receive":  # the other end of a message that is counted
            continue
        each = nbytes // max(count, 1)
        one = (
            links.message(each, axis)
            if name == "send"
            else links.collective(name, axis, each, ranks[axis])
        )
        if one is None:
            continue
        if phase == "step":
            states += [one] * count
            continue
        once = count // number
        there = round(early[name] * once)
        forward += [one] * there
        backward += [one] * (once - there)
    return forward, backward, states
