"""A scheduler of a few lines, for checks of one rank's part of the serving engine."""

from __future__ import annotations

import random
from typing import Any

from hocket.serving.request import SamplingParams
from hocket.serving.scheduling.admission import Admission
from hocket.serving.scheduling.step import ALL, LAST, NONE, BatchRow, StepPlan


class ToyScheduler:
    """Plans over sequences that grow: random chunks, scattered blocks, shared beginnings.

    Every rank of a test makes the same plans, from the seed.
    """

    def __init__(
        self, sequences: list[list[int]], *, block_size: int, num_blocks: int, seed: int = 0,
        chunks: tuple[int, ...] = (1, 3, 7), every_logit: bool = False,
    ) -> None:  # fmt: skip
        self.sequences = [list(tokens) for tokens in sequences]
        self.block_size, self.chunks = block_size, chunks
        self.logits = ALL if every_logit else LAST
        self.draw = random.Random(seed)
        self.free = list(range(num_blocks))
        self.draw.shuffle(self.free)
        self.done = [0] * len(sequences)
        self.blocks: list[list[int]] = [[] for _ in sequences]
        self._news: dict[int, list[int]] = {}
        self._admitted = set(range(len(sequences)))
        self._released: list[int] = []
        self._number = 0

    def share(self, lender: int, borrower: int, blocks: int) -> None:
        """Lend the first computed blocks of one sequence to another that has not begun."""
        assert self.done[lender] >= blocks * self.block_size
        assert not self.blocks[borrower]
        lent = self.blocks[lender][:blocks]
        self.blocks[borrower] = list(lent)
        self._news[borrower] = list(lent)
        self.done[borrower] = blocks * self.block_size

    def preempt(self, slot: int) -> None:
        """Take a sequence's blocks; it begins again."""
        self.free += self.blocks[slot]
        self.blocks[slot], self.done[slot] = [], 0
        self._news.pop(slot, None)
        self._released.append(slot)
        self._admitted.add(slot)

    def plan(self, only: set[int] | None = None) -> StepPlan | None:
        """The next step; None when every token of every sequence is in the cache."""
        counts = {
            slot: min(self.draw.choice(self.chunks), len(tokens) - self.done[slot])
            for slot, tokens in enumerate(self.sequences)
            if len(tokens) > self.done[slot] and (only is None or slot in only)
        }
        if not counts:
            return None
        rows: list[BatchRow] = []
        tokens: list[int] = []
        for slot in sorted(counts, key=lambda s: (counts[s] != 1, s)):
            count, done = counts[slot], self.done[slot]
            need = -(-(done + count) // self.block_size) - len(self.blocks[slot])
            new = [self.free.pop() for _ in range(need)]
            self.blocks[slot] += new
            end = done + count == len(self.sequences[slot])
            logits = self.logits if end or self.logits == ALL else NONE
            rows.append(BatchRow(slot, done, count, logits, self._news.pop(slot, []) + new))
            tokens += self.sequences[slot][done : done + count]
            self.done[slot] += count
        admitted = [self._admission(s) for s in sorted(self._admitted & set(counts))]
        self._admitted -= set(counts)
        released, self._released = self._released, []
        self._number += 1
        return StepPlan(self._number - 1, rows, tokens, admitted, released)

    def _admission(self, slot: int) -> Admission:
        length = len(self.sequences[slot])
        return Admission(
            slot=slot, sampling=SamplingParams(max_new_tokens=1, seed=0), prompt_length=length
        )


def compare_pages(
    scheduler: ToyScheduler, run: Any, expected: list[Any], only: Any = None
) -> float:
    """Run all that is left; the largest difference from the expected logits [S, V] by sequence."""
    worst = 0.0
    while (plan := scheduler.plan(only)) is not None:
        logits = run(plan)
        at = 0
        for row in plan.rows:
            end = row.start + row.count
            want = expected[row.slot][end - row.num_logits : end]
            worst = max(worst, _difference(want, logits[at : at + row.num_logits]))
            at += row.num_logits
        assert at == logits.shape[0]
    return worst


def _difference(want: Any, found: Any) -> float:
    if not want.numel():
        return 0.0
    return float((want - found).abs().max().nan_to_num(nan=float("inf")))
