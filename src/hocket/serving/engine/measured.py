"""Measured: what a replica's steps took, in the words that a forecast uses.

    decode     rounds of one token for each running request, by how many there were
    prefill    steps of prompts alone, by their tokens

A step's seconds are those from its plan to its result: with several stages, its way through all of
them while other steps are on theirs. With lookahead a step is launched while the one before it
runs: its seconds begin when that one has ended. `busy` is the time in which any step was under way,
so that tokens / busy is the throughput.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from hocket.serving.scheduling.step import StepPlan


@dataclasses.dataclass
class Tally:
    """Steps of one size: how many, and the sums over them."""

    steps: int = 0
    size: float = 0.0
    context: float = 0.0
    seconds: float = 0.0

    def add(self, size: float, context: float, seconds: float) -> None:
        self.steps += 1
        self.size += size
        self.context += context
        self.seconds += seconds


class ReplicaTotals:
    """Sums over all steps of a replica's life.

    Args:
        overlapped: whether a step is launched before the one before it has ended, on one device.
    """

    def __init__(self, *, overlapped: bool = False) -> None:
        self.overlapped = overlapped
        self.decode: dict[int, Tally] = {}
        self.prefill: dict[int, Tally] = {}
        self.decoded = self.prefilled = self.steps = 0
        self.busy = 0.0
        self._until = 0.0

    def add(self, plan: StepPlan, batch: int, begun: float, ended: float) -> None:
        """A step was planned at `begun`, when `batch` rows were in flight with its own, and its
        result applied at `ended`."""
        rows, tokens = len(plan.rows), len(plan.tokens)
        seconds = ended - (max(begun, self._until) if self.overlapped else begun)
        self.steps += 1
        self.busy += ended - max(begun, self._until)
        self._until = ended
        if tokens == rows:
            context = sum(row.start for row in plan.rows) / rows
            self.decode.setdefault(_bucket(batch), Tally()).add(batch, context, seconds)
            self.decoded += rows
            return
        decoding = sum(row.count == 1 for row in plan.rows)
        self.decoded += decoding
        self.prefilled += tokens - decoding
        if not decoding:
            self.prefill.setdefault(_bucket(tokens), Tally()).add(tokens, 0.0, seconds)

    def to_json(self) -> dict[str, Any]:
        """`decode` and `prefill` as rows of `spec.serving_forecast.Decode` and `Prefill`; sums
        `decoded` and `prefilled` in tokens, `steps`, and `busy` in seconds."""
        return {
            "decode": [
                {
                    "batch": one.size / one.steps,
                    "context": one.context / one.steps,
                    "seconds": one.seconds / one.steps,
                    "count": one.steps,
                }
                for _, one in sorted(self.decode.items())
            ],
            "prefill": [
                {
                    "tokens": one.size / one.steps,
                    "seconds": one.seconds / one.steps,
                    "count": one.steps,
                }
                for _, one in sorted(self.prefill.items())
            ],
            "decoded": self.decoded,
            "prefilled": self.prefilled,
            "steps": self.steps,
            "busy": self.busy,
        }


def _bucket(size: int) -> int:
    """Sizes up to 8 by themselves, then four to each doubling: few entries, whatever comes."""
    if size <= 8:
        return size
    step = 1 << (size.bit_length() - 3)
    return size // step * step
