"""1F1B (PipeDream-Flush, Narayanan et al. 2021a), and its interleaved form.

    rank 0   F0 F1 .. B0 F2 B1 .. B2
    rank 1   .. F0 B0 F1 B1 F2 B2 ..

The bubble is GPipe's, (p - 1) / (m + p - 1), but rank r holds the activations of only p - r
microbatches. With v stages on a rank (interleaved, Narayanan et al. 2021b, section 2.2) the
bubble shrinks to (p - 1) / (v m + p - 1), paid for with v times the messages.
"""

from __future__ import annotations

from hocket.spec import legality
from hocket.spec.errors import ScheduleError
from hocket.spec.layout import divisors
from hocket.spec.schedule import BACKWARD, FORWARD, Action


def one_f_one_b(
    pp: int, virtual_stages: int, num_microbatches: int
) -> tuple[tuple[Action, ...], ...]:
    """Compute actions per rank; stage s lies on rank s mod pp.

    Raises:
        ScheduleError: several stages on a rank and microbatches that do not fall into equal
            rounds of at least pp.
    """
    if virtual_stages > 1:
        return _interleaved(pp, virtual_stages, num_microbatches)
    ranks = []
    for rank in range(pp):
        warm_up = min(num_microbatches, pp - rank - 1)
        forwards = [Action(rank, FORWARD, m) for m in range(num_microbatches)]
        backwards = [Action(rank, BACKWARD, m) for m in range(num_microbatches)]
        ranks.append(_one_and_one(forwards, backwards, warm_up))
    return tuple(ranks)


def interleaved(
    pp: int, virtual_stages: int, num_microbatches: int
) -> tuple[tuple[Action, ...], ...]:
    """`one_f_one_b` where several stages on a rank are meant.

    Raises:
        ScheduleError: one stage on a rank, or as `one_f_one_b`.
    """
    if virtual_stages == 1 and pp > 1:
        raise ScheduleError(
            "the interleaved schedule needs several stages on a rank; virtual_stages is 1",
            hint="--virtual-stages 2, or --schedule 1f1b",
        )
    return one_f_one_b(pp, virtual_stages, num_microbatches)


def _interleaved(
    pp: int, virtual_stages: int, num_microbatches: int
) -> tuple[tuple[Action, ...], ...]:
    # Microbatches go in rounds: a round passes a rank's first stage, then its second, and so on.
    rounds = max(1, num_microbatches // pp)
    if not legality.interleaved_rounds(num_microbatches, pp):
        fits = [
            n for n in range(1, 2 * num_microbatches + pp) if legality.interleaved_rounds(n, pp)
        ]
        near = sorted(fits, key=lambda n: abs(n - num_microbatches))[:3]
        raise ScheduleError(
            f"{num_microbatches} microbatches do not divide into {rounds} equal groups "
            f"over pp {pp}; the interleaved schedule needs that",
            hint="microbatches=" + " or ".join(map(str, sorted(near))),
        )
    size = num_microbatches // rounds
    assert size in divisors(num_microbatches)
    total = num_microbatches * virtual_stages
    ranks = []
    for rank in range(pp):

        def at(index: int, rank: int = rank) -> tuple[int, int]:
            """(local stage, microbatch) of the index-th forward of this rank."""
            lap, within = divmod(index, size * virtual_stages)
            return within // size, lap * size + within % size

        forwards, backwards = [], []
        for index in range(total):
            local, microbatch = at(index)
            forwards.append(Action(local * pp + rank, FORWARD, microbatch))
            mirrored = (virtual_stages - 1 - local) * pp + rank
            backwards.append(Action(mirrored, BACKWARD, microbatch))
        warm_up = min(total, (virtual_stages - 1) * size + 2 * (pp - 1 - rank))
        ranks.append(_one_and_one(forwards, backwards, warm_up))
    return tuple(ranks)


def _one_and_one(
    forwards: list[Action], backwards: list[Action], warm_up: int
) -> tuple[Action, ...]:
    """`warm_up` forwards, then one forward and one backward in turn, then what is left."""
    line = forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        line += [forward, backward]
    return tuple(line + backwards[len(forwards) - warm_up :])
