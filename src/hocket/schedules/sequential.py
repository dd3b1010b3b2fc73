"""Plain layer-wise model parallelism: one microbatch at a time, so one rank works at a time.

    rank 0   F0 .. .. B0 F1 .. .. B1
    rank 1   .. F0 B0 .. .. F1 B1 ..

The idle GPU of the textbook: the bubble is 1 - 1/p for any number of microbatches.
"""

from __future__ import annotations

from hocket.spec.schedule import BACKWARD, FORWARD, Action


def sequential(
    pp: int, virtual_stages: int, num_microbatches: int
) -> tuple[tuple[Action, ...], ...]:
    """Compute actions per rank; stage s lies on rank s mod pp."""
    ranks = []
    for rank in range(pp):
        stages = range(rank, pp * virtual_stages, pp)
        line = []
        for microbatch in range(num_microbatches):
            line += [Action(s, FORWARD, microbatch) for s in stages]
            line += [Action(s, BACKWARD, microbatch) for s in reversed(stages)]
        ranks.append(tuple(line))
    return tuple(ranks)
