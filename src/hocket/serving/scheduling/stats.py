"""Stats: what a scheduler has done and holds, in numbers that add up over replicas."""

from __future__ import annotations

import dataclasses
import math
from typing import Any


@dataclasses.dataclass(kw_only=True, slots=True)
class Stats:
    """Figures of one scheduler; those of the first group are of this moment, the others only grow.

    Attributes:
        running: requests with a slot.
        waiting: requests that wait, preempted ones too.
        waiting_tokens: their prompt tokens.
        users: with requests that run or wait.
        in_flight: plans in flight.
        blocks_total, blocks_used, blocks_cached: of the cache: all, held by requests, and free
            but kept for prompts with the same beginning.
        steps: plans made.
        rows: rows of those plans; rows / steps is the mean batch.
        prompt_tokens: tokens computed in chunks of prompts, those after a preemption too.
        recomputed_tokens: of those, tokens that had been computed before a preemption.
        decode_tokens: tokens computed one at a time.
        generated_tokens: tokens that were sent.
        admitted: requests that were started, each once.
        waited_seconds: from arrival to start, summed over `admitted`.
        preempted: times that a request's blocks were taken from it.
        prefix_queries, prefix_hits: prompt tokens looked for in the prefix cache, and found there.
        finished: requests that ended; `finished_by`: why.
        refused: requests that were not taken; `refused_by`: why.
    """

    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    users: int = 0
    in_flight: int = 0
    blocks_total: int = 0
    blocks_used: int = 0
    blocks_cached: int = 0

    steps: int = 0
    rows: int = 0
    prompt_tokens: int = 0
    recomputed_tokens: int = 0
    decode_tokens: int = 0
    generated_tokens: int = 0
    admitted: int = 0
    waited_seconds: float = 0.0
    preempted: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    finished: int = 0
    finished_by: dict[str, int] = dataclasses.field(default_factory=dict)
    refused: int = 0
    refused_by: dict[str, int] = dataclasses.field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


class Pace:
    """How fast requests leave the queue, forgetting what is long past.

    Args:
        memory: seconds after which an event counts 1/e.
    """

    def __init__(self, memory: float = 20.0) -> None:
        self._memory = memory
        self._begun: float | None = None
        self._at = 0.0
        self._requests = 0.0
        self._tokens = 0.0

    def add(self, tokens: int, now: float) -> None:
        """A request of so many prompt tokens left the queue."""
        if self._begun is None:
            self._begun = self._at = now
        self._decay(now)
        self._requests += 1
        self._tokens += tokens

    def seconds(self, requests: float, tokens: float, now: float) -> float:
        """Until so many requests, with so many tokens, have left: from 1 to 600."""
        if self._begun is None:
            return 1.0
        self._decay(now)
        # What a steady rate r leaves in a decaying sum: r * memory * (1 - exp(-age / memory)).
        window = self._memory * -math.expm1(-max(now - self._begun, 0.1) / self._memory)
        least = 1e-9
        wanted = max(
            requests * window / max(self._requests, least),
            tokens * window / max(self._tokens, least),
        )
        return min(max(wanted, 1.0), 600.0)

    def _decay(self, now: float) -> None:
        if now > self._at:
            kept = math.exp((self._at - now) / self._memory)
            self._requests *= kept
            self._tokens *= kept
            self._at = now
