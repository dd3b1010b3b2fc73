"""A replica without a model: its next token is a hash of all tokens its cache says came before.

`TokenMachine` computes plans as workers do, from their binary form, and checks every one against
the rules by which plans are made. Since it reads the tokens before a position out of the blocks of
the slot's table, a block that is lost, shared too early or written by two comes out as a wrong
token, too.

    machine = TokenMachine(limits)
    result = machine.run(plan)             # or the two halves, to keep several plans in flight:
    machine.receive(plan); ...; result = machine.finish()

`continuation(prompt, sampling)` is what any request must be answered with.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import deque
from collections.abc import Sequence

from hocket.serving.request import SamplingParams, TokenLogprobs
from hocket.serving.scheduling.limits import SchedulerLimits
from hocket.serving.scheduling.step import (
    ALL,
    LAST,
    NONE,
    UNKNOWN,
    Admission,
    StepPlan,
    StepResult,
)

VOCABULARY = 97


def following(tokens: Sequence[int], seed: int = 0, index: int = 0) -> int:
    """The token after these."""
    digest = hashlib.blake2b(array("q", [seed, index, *tokens]).tobytes(), digest_size=4).digest()
    return int.from_bytes(digest, "little") % VOCABULARY


def logprob(tokens: Sequence[int], token: int) -> float:
    """The log-probability that the machine tells of a token after these."""
    digest = hashlib.blake2b(array("q", [*tokens, token]).tobytes(), digest_size=2).digest()
    return -int.from_bytes(digest, "little") / 256.0


def continuation(
    prompt: Sequence[int], sampling: SamplingParams, longest: int, index: int = 0
) -> tuple[list[int], str]:
    """The tokens that answer a request, and why they end."""
    tokens = list(prompt)
    for _ in range(min(sampling.max_new_tokens, longest - len(prompt))):
        token = following(tokens, sampling.seed or 0, index)
        generated = len(tokens) - len(prompt)
        if token in sampling.ends and generated >= sampling.min_new_tokens:
            return tokens[len(prompt) :], "stop"
        tokens.append(token)
    return tokens[len(prompt) :], "length"


class TokenMachine:
    """Workers of one replica.

    Args:
        limits: those of the scheduler.

    Attributes:
        largest: most tokens, rows and logits that a plan had.
        unknown: tokens that a plan took from the plan before it.
    """

    def __init__(self, limits: SchedulerLimits) -> None:
        self.limits = limits
        self.largest = {"tokens": 0, "rows": 0, "logits": 0}
        self.plans = 0
        self.unknown = 0
        self._cells: dict[int, list[int | None]] = {}
        self._tables: dict[int, list[int]] = {}
        self._held: dict[int, int] = {}
        self._admitted: dict[int, Admission] = {}
        self._writers: dict[int, int] = {}
        self._last: dict[int, int] = {}
        self._ready: deque[StepResult] = deque()

    @property
    def tables(self) -> dict[int, list[int]]:
        """Slot to its blocks, of those that workers know."""
        return self._tables

    def run(self, plan: StepPlan) -> StepResult:
        assert not self._ready
        self.receive(plan)
        return self.finish()

    def finish(self) -> StepResult:
        """The result of the oldest plan received."""
        return StepResult.decode(self._ready.popleft().encode())

    def receive(self, given: StepPlan) -> None:
        """Compute a plan; `finish` tells its result."""
        plan = StepPlan.decode(given.encode())
        assert plan == given
        self._check(plan)
        self._tell(plan)
        result = StepResult(plan.number, [])
        size, at = self.limits.block_size, 0
        for row in plan.rows:  # all keys and values of a step are written before any is read
            table = self._tables[row.slot]
            for k, token in enumerate(plan.tokens[at : at + row.count], start=row.start):
                self._write(row.slot, table[k // size], k % size, token)
            self._held[row.slot] = row.start + row.count
            at += row.count
        for number, row in enumerate(plan.rows):
            if row.logits == NONE:
                continue
            admission, end = self._admitted[row.slot], row.start + row.count
            before = self._read(row.slot, end)
            if row.logits == ALL:
                next_tokens = before[row.start + 1 :] + (
                    [] if row.next_token < 0 else [row.next_token]
                )
                result.prompt_logprobs[number] = [
                    TokenLogprobs(token, logprob(before[: row.start + 1 + k], token))
                    for k, token in enumerate(next_tokens)
                ]
            if row.samples:
                if admission.sampling.logprobs is not None:
                    token = following(before, admission.seed, admission.index)
                    result.logprobs[len(result.tokens)] = TokenLogprobs(
                        token, logprob(before, token), ((token, -1.5),)
                    )
                result.tokens.append(following(before, admission.seed, admission.index))
                self._last[row.slot] = result.tokens[-1]
        self._ready.append(result)

    def _tell(self, plan: StepPlan) -> None:
        """Put what was sampled last where a plan did not know it yet."""
        at = 0
        for row in plan.rows:
            if plan.tokens[at] == UNKNOWN:
                assert self.limits.lookahead
                assert row.count == 1
                assert self._ready, "the plan that samples it is still in flight"
                assert self._admitted[row.slot].sampling.structure is None
                plan.tokens[at] = self._last[row.slot]
                self.unknown += 1
            at += row.count

    def _check(self, plan: StepPlan) -> None:
        limits = self.limits
        assert plan.number == self.plans, "plans are numbered in their order"
        self.plans += 1
        assert len(self._ready) < limits.depth, "no more plans are in flight than agreed"
        for slot in plan.released:
            del self._tables[slot], self._admitted[slot]
            self._held.pop(slot, None)
        for one in plan.admitted:
            assert 0 <= one.slot < limits.max_num_seqs
            assert one.slot not in self._tables, "a slot is released before it is given again"
            self._tables[one.slot] = []
            self._admitted[one.slot] = one
        slots = [row.slot for row in plan.rows]
        assert len(set(slots)) == len(slots), "one row per slot"
        assert slots, "no plan is empty"
        assert {one.slot for one in plan.admitted} <= set(slots)
        counts = [row.count for row in plan.rows]
        assert min(counts) >= 1
        assert sum(counts) == len(plan.tokens) <= limits.max_num_batched_tokens
        assert len(plan.rows) <= limits.max_num_seqs
        singles = [count == 1 for count in counts]
        assert singles == sorted(singles, reverse=True), "rows of one token come first"
        every = sum(row.count for row in plan.rows if row.logits == ALL)
        assert every <= limits.max_logit_rows
        if limits.vocab_size is not None:
            assert max(plan.tokens) < limits.vocab_size
        for row in plan.rows:
            table = self._tables[row.slot]
            table += row.new_blocks
            assert len(table) >= limits.blocks_for(row.start + row.count), "the table covers a row"
            assert len(set(table)) == len(table)
            assert all(0 <= block < limits.num_blocks for block in table)
            held = self._held.get(row.slot)
            if held is None:  # what the prefix cache lent: whole blocks that others have written
                assert row.start % limits.block_size == 0
                assert all(
                    None not in self._cells.get(block, [None])
                    for block in table[: row.start // limits.block_size]
                )
            else:
                assert row.start == held, "a row begins where the one before it ended"
            assert row.start + row.count <= limits.max_model_len
            assert row.next_token < 0 or row.logits == ALL
            if row.logits == LAST:
                assert self._admitted[row.slot].seed is not None
        for key, value in (("tokens", len(plan.tokens)), ("rows", len(slots)),
                           ("logits", plan.num_logits)):  # fmt: skip
            self.largest[key] = max(self.largest[key], value)

    def _write(self, slot: int, block: int, offset: int, token: int) -> None:
        holders = [other for other, table in self._tables.items() if block in table]
        assert holders == [slot], "only a block that nobody shares is written"
        if offset == 0:
            self._cells[block] = [None] * self.limits.block_size
        cells = self._cells[block]
        assert offset == 0 or cells[offset - 1] is not None
        cells[offset] = token

    def _read(self, slot: int, count: int) -> list[int]:
        size, table = self.limits.block_size, self._tables[slot]
        found: list[int] = []
        for k in range(0, count, size):
            for token in self._cells[table[k // size]][: count - k]:
                assert token is not None
                found.append(token)
        return found
