"""Memory of each rank of a job on CPU, as `training.memory` counts it: tensor bytes by kind.

Activations are what microbatches in flight hold on a rank, at the worst moment of the very
schedule, and what that moment's operation makes besides.
"""

from __future__ import annotations

from hocket.cost.measured_prices import Job, resident_bytes
from hocket.cost.measured_stage import saved_bytes
from hocket.spec.schedule import BACKWARD, FORWARD, INPUT, WEIGHT


def memory_rows(job: Job) -> list[dict[str, int]]:
    """Of each rank of the world: `parameters`, `gradients`, `optimizer`, `activations`, `total`."""
    found: dict[int, dict[str, int]] = {}
    for index in range(job.layout.pp):
        row = resident_bytes(job, index)
        row["activations"] = activations(job, index)
        found[index] = {**row, "total": sum(row.values())}
    return [dict(found[job.layout.coordinate(rank)["pp"]]) for rank in range(job.layout.world_size)]


def activations(job: Job, index: int) -> int:
    """The most bytes of activations that one pipeline rank holds at once."""
    last = job.schedule.num_stages - 1
    held = {
        stage: saved_bytes(job.shape, job.blocks(stage), job.microbatch, job.element_bytes)
        + (0 if stage == last else job.hidden_bytes)
        for stage in job.schedule.stages_of(index)
    }
    now = most = 0
    for action in job.schedule.ranks[index]:
        for part in action.parts or (action,):
            if part.kind == FORWARD:
                now += held[part.stage]
            if part.kind in (FORWARD, BACKWARD, INPUT):
                most = max(most, now)
            if part.kind in (BACKWARD, WEIGHT):
                now -= held[part.stage]
    return most
