"""A whole step's prices on a machine that was measured: ModelShape x Layout x batch to StepPrices,
and the bytes that a rank holds all the time."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence

from hocket.cost.communication import rank_calls, stage_calls
from hocket.cost.communication_table import CollectiveCall, When
from hocket.cost.measured_links import MeasuredLinks
from hocket.cost.measured_rates import Rates
from hocket.cost.measured_stage import GRADIENT_BYTES, stage_seconds, trained_weights, weights
from hocket.cost.step_problem import StepProblem
from hocket.spec.layout import Layout
from hocket.spec.precision import SMALLEST_8BIT, moment_bytes
from hocket.spec.process_groups import named_groups
from hocket.spec.recompute import MADE_AGAIN
from hocket.spec.step_prices import Collective, RankStep, StageStep, StepPrices

LOOP_CALLS = 60
"""Small operations that a step takes apart from the model: the batch, the gradients' clearing, what
the loop reads and reports; as many as `training.loop` runs."""


def step_prices(job: StepProblem, rates: Rates, links: MeasuredLinks) -> StepPrices:
    layout, place, step = job.layout, job.schedule.stage_ranks, job.step
    stages_of = [job.schedule.stages_of(index) for index in range(layout.pp)]
    shares = [job.share(stage) for stage in range(len(place))]
    # On a rank inside the line of context ranks: it sends most.
    calls = [stage_calls(layout, step, s, place, cp_index=layout.cp // 2) for s in shares]
    ends = [rank_calls(layout, step, [shares[s] for s in own], place) for own in stages_of]

    def estimated(when: When, *calls: Iterable[CollectiveCall]) -> tuple[Collective, ...]:
        """Of one microbatch, or of the step; a message's other end counts it."""
        found: list[Collective | None] = []
        for call in itertools.chain(*calls):
            if call.when == when and call.name != "receive" and call.axis != "pp":
                ranks = group_ranks(layout, call.axis)
                found += [links.collective(call.name, call.axis, call.bytes, ranks)] * call.count
        return tuple(one for one in found if one is not None)

    seconds_of = (
        stage_seconds(
            job.shape,
            job.blocks(stage),
            job.microbatch,
            rates,
            full=job.again(stage, "full"),
            selective=job.again(stage, "core_attn"),
            modules={kind: job.again(stage, kind) for kind in MADE_AGAIN},
        )
        for stage in range(len(place))
    )
    stages = tuple(
        StageStep(
            **vars(seconds),
            forward_collectives=estimated(When.FORWARD, calls[stage]),
            backward_collectives=estimated(When.BACKWARD, calls[stage]),
            message=None if stage == len(place) - 1 else links.message(job.stream_bytes),
            reductions=estimated(When.REDUCTION, calls[stage]),
        )
        for stage, seconds in enumerate(seconds_of)
    )
    # Values gathered: waited for in the next step, and counted in this one.
    sums = [
        estimated(When.END, end, *(calls[stage] for stage in own))
        for end, own in zip(ends, stages_of, strict=True)
    ]
    loss, norm = (next(iter(estimated(when, ends[0])), None) for when in (When.LOSS, When.NORM))
    ranks = tuple(_rank(job, *row, rates) for row in zip(stages_of, sums, strict=True))
    return StepPrices(stages=stages, ranks=ranks, loss=loss, norm=norm)


@functools.lru_cache(maxsize=4096)
def group_ranks(layout: Layout, axis: str) -> int:
    """Ranks of each group of an axis, 1 where it has none."""
    return max(map(len, named_groups(layout, axis)), default=1)


def _rank(
    job: StepProblem, stages: Sequence[int], sums: tuple[Collective, ...], rates: Rates
) -> RankStep:
    layout = job.layout
    held = [w for stage in stages for w in trained_weights(weights(job.shape, job.blocks(stage)))]
    elements = sum(map(job.elements, held))
    gradients, mine = (
        float(elements * GRADIENT_BYTES) / job.state_ranks,
        elements // job.state_ranks,
    )
    if layout.splits_experts:
        mine = sum(job.elements(w) // job.states(w) for w in held)
        gradients = float(mine * GRADIENT_BYTES)
    loop = LOOP_CALLS * rates.call("add")
    # The norm reads every gradient; clipping, where it happens, rewrites them.
    norm = rates.streams(gradients, len(held)) + rates.streams(2 * gradients, len(held))
    return RankStep(
        before=loop / 2,
        sums=sums,
        norm=norm,
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
