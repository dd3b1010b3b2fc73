"""Zero bubble, its form ZB-H1 (Qi et al. 2023): what nobody waits for fills the rests.

    rank 0   F0 F1 .. I0 W0 F2 I1 W1 F3 I2 W2 I3 W3
    rank 1   .. F0 I0 F1 I1 W0 F2 I2 W1 F3 I3 W2 W3

Backward is halved: the stage before waits for the gradient of the input (I), nobody waits for the
weights' (W). The bubble of 1F1B, (p - 1)(F + I + W), becomes (p - 1)(F + I - W), and no rank
holds more activations than 1F1B's first one.

Made by simulating it: at each tick a rank does the first of F, I, W that it may.
"""

from __future__ import annotations

from hocket.spec.errors import ScheduleError
from hocket.spec.schedule import FORWARD, INPUT, WEIGHT, Action


def zero_bubble(
    pp: int, virtual_stages: int, num_microbatches: int
) -> tuple[tuple[Action, ...], ...]:
    """Compute actions per rank; stage s lies on rank s.

    Raises:
        ScheduleError: several stages on a rank.
    """
    if virtual_stages > 1:
        raise ScheduleError(
            f"the zero-bubble schedule has one stage on a rank; virtual_stages is {virtual_stages}",
            hint="virtual_stages=1, or schedule=interleaved",
        )
    lines: list[list[Action]] = [[] for _ in range(pp)]
    done = [{FORWARD: 0, INPUT: 0, WEIGHT: 0} for _ in range(pp)]
    while any(count[WEIGHT] < num_microbatches for count in done):
        # What each rank may begin is what the others had finished when the tick began.
        before = [dict(count) for count in done]
        for rank, count in enumerate(done):
            kind = _choice(before, rank, num_microbatches)
            if kind is not None:
                lines[rank].append(Action(rank, kind, count[kind]))
                count[kind] += 1
    return tuple(map(tuple, lines))


def _choice(done: list[dict[str, int]], rank: int, num_microbatches: int) -> str | None:
    """What `rank` does in this tick; None is a rest."""
    pp, mine = len(done), done[rank]
    forward, backward, weight = mine[FORWARD], mine[INPUT], mine[WEIGHT]
    arrived = num_microbatches if rank == 0 else done[rank - 1][FORWARD]
    # As in 1F1B, rank r runs ahead of its backwards by p - r forwards; and never holds more than p.
    if forward < arrived and forward - backward < pp - rank and forward - weight < pp:
        return FORWARD
    returned = forward if rank == pp - 1 else done[rank + 1][INPUT]
    if backward < min(forward, returned):
        return INPUT
    return WEIGHT if weight < backward else None
