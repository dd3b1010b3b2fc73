"""Chunks: how a plan's tokens are shared among the prompts that are being computed.

    first half      by turn: users by what they have had, each user's prompts by arrival
    second half     the prompt with the fewest tokens left first

So a long prompt always moves on with at least half of the tokens when its turn has come, and a
short one waits at most for those that are shorter still, not for the long ones before it.
"""

from __future__ import annotations

from collections.abc import Collection

from hocket.serving.request import MAX_TOKEN
from hocket.serving.scheduling.sequence import Sequence


def shares(
    sequences: Collection[Sequence], budget: int, logit_rows: int
) -> list[tuple[Sequence, int]]:
    """The tokens that each sequence adds to a plan, in order of turn; none of 0.

    Args:
        sequences: with tokens to compute.
        budget: tokens in all.
        logit_rows: of those, positions whose logits may all be made.
    """
    turn = by_turn(sequences)
    given: dict[int, int] = {}
    left = budget
    for order, most in ((turn, budget - budget // 2), (_by_length(sequences), budget)):
        for sequence in order:
            room = min(most, left)
            if room <= 0:
                break
            had = given.get(sequence.serial, 0)
            asked = needs_logits(sequence)
            count = min(row_bound(sequence) - had, room, logit_rows if asked else room)
            if count > 0:
                given[sequence.serial] = had + count
                left -= count
                most -= count
                logit_rows -= count if asked else 0
    return [(one, given[one.serial]) for one in turn if one.serial in given]


def needs_logits(sequence: Sequence) -> bool:
    """Whether the next positions' logits are all wanted, for the prompt's log-probabilities."""
    return sequence.scored <= sequence.computed < sequence.to_score


def row_bound(sequence: Sequence) -> int:
    """Most tokens of its next row: positions whose logits were reported before, and are computed
    again after a preemption, are in rows of their own."""
    if sequence.computed < sequence.scored < sequence.to_score:
        return sequence.scored - sequence.computed
    return sequence.remaining


class Share:
    """What a plan would give to one sequence more, besides those that are started.

    A request that would get nothing keeps no slot and no blocks from others, whose turn may come
    before its own.

    Args:
        started: sequences with tokens to compute.
        budget: tokens of the plan.
    """

    def __init__(self, started: Collection[Sequence], budget: int) -> None:
        lengths = sorted(one.remaining for one in started)
        self._has_rest = sum(lengths) < budget
        self._least = min((one.user.served for one in started), default=0)
        shorter = 0
        self._longest = MAX_TOKEN
        for length in lengths:
            shorter += length
            if shorter >= budget // 2:
                self._longest = length  # those of this length or more stand behind it
                break

    def is_open(self, sequence: Sequence, length: int) -> bool:
        """Whether a request with `length` tokens to compute would get any."""
        return self._has_rest or length < self._longest or sequence.user.served < self._least


def by_turn(sequences: Collection[Sequence]) -> list[Sequence]:
    return sorted(sequences, key=lambda one: (one.user.served, one.serial))


def _by_length(sequences: Collection[Sequence]) -> list[Sequence]:
    return sorted(sequences, key=lambda one: (one.remaining, one.serial))
