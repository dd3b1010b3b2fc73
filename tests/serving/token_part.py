"""A replica without a model: tokens that follow from the tokens before, through a paged cache.

`TokenPart` stands for one rank's part of every step. What it samples is a hash of all tokens that
the slot's blocks hold up to there, so that any mistake with blocks, order or slots shows.
"""

from __future__ import annotations

import queue
import threading
import zlib
from collections.abc import Callable, Sequence
from typing import Any

from hocket.serving.request import TokenLogprobs
from hocket.serving.scheduling.step import ALL, UNKNOWN, StepPlan, StepResult

VOCABULARY = 211


def following(tokens: Sequence[int]) -> int:
    """The token after these."""
    return zlib.crc32(bytes(str(list(tokens)), "ascii")) % VOCABULARY


def answer(prompt: Sequence[int], count: int, stop: Sequence[int] = ()) -> list[int]:
    """What a request is answered with."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(following(tokens))
        if tokens[-1] in stop:
            return tokens[len(prompt) : -1]
    return tokens[len(prompt) :]


class TokenPart:
    """One rank's part.

    Args:
        block_size: of the cache.
        samples: whether this rank tells results.
        taken, given: where the "hidden state" comes from and goes to: the plan's number.
        before: called with each plan as it is run.
        later: whether results are collected, as on a device.
    """

    expert_imbalance: tuple[float, float] | None = None

    def __init__(
        self,
        block_size: int,
        *,
        samples: bool = True,
        taken: queue.Queue[int] | None = None,
        given: queue.Queue[int] | None = None,
        before: Callable[[StepPlan], None] = lambda plan: None,
        later: bool = False,
    ) -> None:
        self.later = later
        self.launched: list[StepResult] = []
        self.most_launched = 0
        self.last: dict[int, int] = {}
        self.block_size = block_size
        self.samples = samples
        self.taken, self.given, self.before = taken, given, before
        self.tables: dict[int, list[int]] = {}
        self.memory: dict[tuple[int, int], int] = {}
        self.plans: list[int] = []
        self.expected: list[int] = []
        self.noted: list[dict[str, Any]] | None = None

    def expect(self, plan: StepPlan) -> None:
        self.expected.append(plan.number)

    def run(self, plan: StepPlan) -> StepResult | None:
        assert self.expected.pop(0) == plan.number
        assert not self.plans or plan.number == self.plans[-1] + 1
        self.plans.append(plan.number)
        self.before(plan)
        if self.taken is not None:
            assert self.taken.get(timeout=60) == plan.number
        for slot in plan.released:
            del self.tables[slot]
        for one in plan.admitted:
            assert one.slot not in self.tables
            self.tables[one.slot] = []
        result = StepResult(plan.number, [])
        at = 0
        for number, row in enumerate(plan.rows):
            table = self.tables[row.slot]
            table += row.new_blocks
            for k, token in enumerate(plan.tokens[at : at + row.count]):
                if token == UNKNOWN:
                    token = self.last[row.slot]
                block, offset = divmod(row.start + k, self.block_size)
                self.memory[table[block], offset] = token
            at += row.count
            context = [
                self.memory[table[k // self.block_size], k % self.block_size]
                for k in range(row.start + row.count)
            ]
            if row.logits == ALL:
                next_tokens = context[row.start + 1 :] + (
                    [] if row.next_token < 0 else [row.next_token]
                )
                result.prompt_logprobs[number] = [
                    TokenLogprobs(token, -float(row.start + k))
                    for k, token in enumerate(next_tokens)
                ]
            if row.samples:
                result.tokens.append(following(context))
                self.last[row.slot] = result.tokens[-1]
        if self.noted is not None:
            self.noted.append({"plan": plan.number, "thread": threading.current_thread().name})
        if self.given is not None:
            self.given.put(plan.number)
        if not self.samples:
            return None
        if not self.later:
            return result
        self.launched.append(result)
        self.most_launched = max(self.most_launched, len(self.launched))
        return None

    @property
    def uncollected(self) -> int:
        return len(self.launched)

    def collect(self) -> StepResult | None:
        return self.launched.pop(0) if self.launched else None

    def settle(self) -> None:
        return None

    def record(self) -> None:
        self.noted = []

    def recorded(self) -> dict[str, Any]:
        noted, self.noted = self.noted, None
        assert noted is not None
        return {"events": noted, "collectives": []}
