"""GPipe (Huang et al. 2019, figure 2c): every forward, then every backward, newest first.

    rank 0   F0 F1 F2 .. .. B2 B1 B0
    rank 1   .. F0 F1 F2 B2 B1 B0 ..

The bubble is (p - 1) / (m + p - 1); every stage holds the activations of all m microbatches.
With several stages on a rank the microbatches pass through one stage after the other.
"""

from __future__ import annotations

from hocket.spec.schedule import BACKWARD, FORWARD, Action


def gpipe(pp: int, virtual_stages: int, num_microbatches: int) -> tuple[tuple[Action, ...], ...]:
    """Compute actions per rank; stage s lies on rank s mod pp."""
    ranks = []
    for rank in range(pp):
        stages = range(rank, pp * virtual_stages, pp)
        order = range(num_microbatches)
        line = [Action(s, FORWARD, m) for s in stages for m in order]
        line += [Action(s, BACKWARD, m) for s in reversed(stages) for m in reversed(order)]
        ranks.append(tuple(line))
    return tuple(ranks)
