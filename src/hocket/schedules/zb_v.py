"""ZB-V (Qi et al. 2023, section 6): two stages on a rank, placed in a V, and no bubble inside.

    rank 0   0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 ..
    rank 1   ..  1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 ..

Rank r holds stage r on the way down and stage 2p - 1 - r on the way up, so the first and the last
stage share rank 0, and gradients take the same way back. With F = I = W a step takes 6 m + p - 1 of
them where m >= 2p - 1: what is left is the time until the last rank first hears of anything. A rank
holds 2p half-stages of activations at most, as 1F1B's first rank does.

    phase      rank r does, d being its stage on the way down and u that on the way up
    fill       dF   2 (p - r) - 1 times
    turn       uF dF   r times, then   uF uI uW   p - r times
    steady     dF dI dW uF uI uW   until every dF is done, then without dF until every uF is
    drain      dI uI   r times, then   dI dW   p - r times, then uW and dW   r times each
"""

from __future__ import annotations

from collections import defaultdict

from hocket.spec.errors import ScheduleError
from hocket.spec.schedule import FORWARD, INPUT, WEIGHT, Action

F, I, W = FORWARD, INPUT, WEIGHT  # noqa: E741  the schedule's own letters


def zb_v(pp: int, virtual_stages: int, num_microbatches: int) -> tuple[tuple[Action, ...], ...]:
    """Compute actions per rank; stage s lies on rank s, or 2 pp - 1 - s on the way up.

    Raises:
        ScheduleError: any other number of stages on a rank than two.
    """
    if virtual_stages != 2:
        raise ScheduleError(
            f"the zb-v schedule has two stages on a rank; virtual_stages is {virtual_stages}",
            hint="virtual_stages=2, or schedule=zero-bubble",
        )
    return tuple(_line(pp, rank, num_microbatches) for rank in range(pp))


def v_shape(pp: int, virtual_stages: int) -> tuple[int, ...]:
    """Stage to rank: down and up again."""
    assert virtual_stages == 2, virtual_stages
    return (*range(pp), *reversed(range(pp)))


def _line(pp: int, rank: int, num_microbatches: int) -> tuple[Action, ...]:
    down, up = rank, 2 * pp - 1 - rank
    # A short step is a long one's without the microbatches that it does not have.
    count = max(num_microbatches, 2 * pp - 1)
    below = pp - rank
    words = [(down, F)] * (2 * below - 1)
    words += [(up, F), (down, F)] * rank
    words += [(up, F), (up, I), (up, W)] * below
    round_up = [(down, I), (down, W), (up, F), (up, I), (up, W)]
    words += [(down, F), *round_up] * (count - (2 * pp - 1 - rank))
    words += round_up * (below - 1)
    words += [(down, I), (up, I)] * rank
    words += [(down, I), (down, W)] * below
    words += [(up, W)] * rank + [(down, W)] * rank
    numbers: dict[tuple[int, str], int] = defaultdict(int)
    line = []
    for word in words:
        line.append(Action(*word, numbers[word]))
        numbers[word] += 1
    return tuple(action for action in line if (action.microbatch or 0) < num_microbatches)
