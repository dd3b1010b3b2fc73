"""Memory of each rank of a job on CPU, as `training.memory` counts it: tensor bytes by kind.

The step is walked action by action, by the very schedule. Gradients come into being with the first
backward of a stage, so a step of one microbatch is at its fullest when it has none of them yet:
what is counted as activations is the fullest moment less all gradients.
"""

from __future__ import annotations

from hocket.cost.measured_backward import fullest_inputs, fullest_whole, unwidened
from hocket.cost.measured_prices import Job, resident_bytes
from hocket.cost.measured_shares import (
    block_bytes,
    fullest,
    fullest_half,
    gathered_bytes,
    kept_bytes,
    largest_bytes,
    left_bytes,
    share_bytes,
)
from hocket.cost.measured_stage import GRADIENT_BYTES, local, trained, weights
from hocket.spec.model_shape import BlockShape
from hocket.spec.schedule import BACKWARD, FORWARD, INPUT, WEIGHT

SCRATCH = 2**21
"""Bytes of the buffer in which the loss takes its tokens, at most."""

POSTED = 2
"""Messages from each neighbour that have a place before they come (`runtime.pipeline`)."""


def memory_rows(job: Job, *, cuda: bool = False) -> list[dict[str, int]]:
    """Of each rank of the world: `parameters`, `gradients`, `optimizer`, `activations`, `total`.

    Args:
        cuda: on a GPU, where gradient buckets of replicas have memory from the start (a CPU's zeros
            take none until they are written) and what is offloaded takes none.
    """
    found: dict[int, dict[str, int]] = {}
    for index in range(job.layout.pp):
        row = resident_bytes(job, index)
        buckets = cuda and job.layout.dp > 1 and not job.layout.zero
        fullest = made(job, index, buckets=buckets)
        row["activations"] = fullest if buckets else max(0, fullest - row["gradients"])
        if cuda:
            row |= dict.fromkeys(_offloaded(job), 0)
        found[index] = {**row, "total": sum(row.values())}
    return [dict(found[job.layout.coordinate(rank)["pp"]]) for rank in range(job.layout.world_size)]


def _offloaded(job: Job) -> tuple[str, ...]:
    """Kinds that are in the host's memory instead of a GPU's."""
    if job.layout.offloads("params"):
        return "parameters", "gradients", "optimizer"
    return ("optimizer",) if job.layout.offloads("optimizer") else ()


def made(job: Job, index: int, *, buckets: bool = False) -> int:
    """The most bytes at once of what one pipeline rank makes in a step: activations, and gradients,
    but where they are in `buckets` that have memory before it."""
    last = job.schedule.num_stages - 1
    stages = job.schedule.stages_of(index)
    kinds = {stage: job.blocks(stage) for stage in stages}
    held = {stage: job.held_bytes(stage) for stage in stages}
    gradients = {
        stage: GRADIENT_BYTES
        * sum(local(w, job.layout.tp) for w in trained(weights(job.shape, kind)))
        for stage, kind in kinds.items()
        if not buckets
    }
    # Layers that are run again in I leave more for W than they held before.
    put_off = {
        stage: pending_bytes(job, kind)
        if job.again(stage, "full")
        else min(held[stage], pending_bytes(job, kind))
        for stage, kind in kinds.items()
    }
    place = job.schedule.stage_ranks
    neighbours = {s + d for s in stages for d in (-1, 1)} & set(range(last + 1))
    places = min(POSTED, job.microbatches)
    posted = places * job.stream_bytes * sum(place[s] != index for s in neighbours)
    scratch = _scratch(job)
    if job.layout.zero > 1 and job.state_ranks > 1:
        return posted + _made_in_shares(job, index, held, put_off)
    now = most = posted
    for action in job.schedule.ranks[index]:
        for part in action.parts or (action,):
            stage = part.stage
            if part.kind == FORWARD:
                now += held[stage]
                most = max(most, now + (scratch if stage == last else 0))
            if part.kind == BACKWARD:
                most = max(most, now + _backward(job, stage, first=stage in gradients))
            if part.kind == INPUT:
                pending = {kind: pending_bytes(job, [kind]) for kind in kinds[stage]}
                working = backward_bytes(job, kinds[stage])
                most = max(most, now + fullest_inputs(job, stage, working, pending))
                now -= held[stage] - put_off[stage]
            elif part.kind in (BACKWARD, WEIGHT):
                if part.kind == WEIGHT:  # made apart, then added: one at a time
                    largest = largest_bytes(job, stage)
                    most = max(most, now + largest + unwidened(job, largest))
                now += gradients.pop(stage, 0)
                now -= held[stage] if part.kind == BACKWARD else put_off[stage]
                most = max(most, now)
    return most


def _scratch(job: Job) -> int:
    """Bytes of the buffer in which the loss takes its tokens: of this rank's vocabulary rows."""
    shape, head = job.shape, job.shape.blocks["head"]
    split = any(p.split == "vocab" for p in head.products)
    rows = -(-shape.vocab // job.layout.tp) if split else shape.vocab
    return min(SCRATCH, job.microbatch.tokens * rows * 4)


def _made_in_shares(job: Job, index: int, held: dict[int, int], put_off: dict[int, int]) -> int:
    """The same under ZeRO-2 and -3, where a stage's gradients are never whole at once, but while a
    backward in two halves waits for the weights' half."""
    now = most = 0
    last = job.schedule.num_stages - 1
    reduced: set[int] = set()
    halves: dict[int, int] = {}
    left: dict[int, int] = {}
    for action in job.schedule.ranks[index]:
        for part in action.parts or (action,):
            stage = part.stage
            whole = sum(block_bytes(job, stage))
            now -= left.pop(stage, 0)
            if part.kind == FORWARD:
                now += held[stage]
                kept = kept_bytes(job, stage)
                values = max(gathered_bytes(job, stage), kept)
                values = max(values, _scratch(job) + kept) if stage == last else values
                most = max(most, now + values)
            if part.kind in (BACKWARD, INPUT):
                working = backward_bytes(job, job.blocks(stage))
                if part.kind == INPUT:
                    pending = {kind: pending_bytes(job, [kind]) for kind in job.blocks(stage)}
                    made = whole if halves.get(stage) else 0
                    most = max(most, now + fullest_half(job, stage, working, pending, made))
                else:
                    most = max(most, now + fullest(job, stage, working, first=stage not in reduced))
            if part.kind == INPUT:
                now -= held[stage] - put_off[stage]
                now += whole if not halves.get(stage) else 0
                halves[stage] = halves.get(stage, 0) + 1
            elif part.kind in (BACKWARD, WEIGHT):
                if stage not in reduced:
                    now += share_bytes(job, stage)
                    reduced.add(stage)
                if part.kind == WEIGHT:  # a gradient that is made apart is copied, and then again
                    most = max(most, now + 2 * largest_bytes(job, stage))
                now -= held[stage] if part.kind == BACKWARD else put_off[stage]
                if part.kind == WEIGHT:
                    halves[stage] -= 1
                    now -= whole if not halves[stage] else 0
                left[stage] = left_bytes(job, stage)
                now += left[stage]
                most = max(most, now)
    return most


def pending_bytes(job: Job, kinds: list[str]) -> int:
    """What is kept from I to W: inputs of products (once, where several read them), and the
    gradients of their outputs."""
    elements = 0.0
    for kind in kinds:
        inputs: dict[str, float] = {}
        for p in job.shape.blocks[kind].products:
            if p.frozen:
                continue
            split_in = job.layout.tp if p.split == "row" else job.microbatch.ranks("outside")
            split_out = job.layout.tp if p.split in ("column", "vocab") else 1
            if p.split == "outside":
                split_out = job.microbatch.ranks("outside")
            inputs[p.input or p.name] = p.k * p.count / split_in
            elements += p.n * p.count / split_out
        elements += sum(inputs.values())
    return round(elements * job.microbatch.tokens * job.element_bytes)


def _backward(job: Job, stage: int, *, first: bool) -> int:
    """The most bytes of a whole backward beside what lives before it begins."""
    working = backward_bytes(job, job.blocks(stage))
    if job.layout.zero == 1 and job.state_ranks > 1 and job.microbatches == 1:
        return fullest(job, stage, working, first=True)
    return fullest_whole(job, stage, working, first=first)


def backward_bytes(job: Job, kinds: list[str]) -> int:
    """What the backward of a layer makes beside what is held: of the last of these that is one."""
    layers = [kind for kind in kinds if kind != "head"]
    widest = _widest(job, job.shape.blocks[layers[-1]]) if layers else 0
    return job.hidden_bytes + widest


def _widest(job: Job, block: BlockShape) -> int:
    """Gradients of the widest inner tensors at once: of two (gate and up), or of what an activation
    gave and of what it was given."""
    rows = [p for p in block.products if p.split in ("row", "outside")]
    if not rows or block.kind == "embedding":
        return 0
    down = max(rows, key=lambda p: p.k * p.count)
    tp = job.layout.tp if down.split == "row" else 1
    elements = 2 * down.k * down.count / tp
    return round(elements * job.microbatch.tokens * job.element_bytes)
