"""Figures: turns reduced to medians, spreads and paired ratios, and printed as tables."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.serve.contenders import Contender
from benchmarks.serve.processes import Turn
from benchmarks.serve.workload import Load

TIES = {"fp32": 1e-5, "bf16": 1.0}
"""By dtype, logits by which a token may lie below the most probable of the fp32 reference:
rounding decides between the two. With the larger model in bf16, transformers' own tokens were 0.57
below in the worst of 16 requests; its logits have a deviation of 1.7."""


@dataclasses.dataclass
class Measured:
    """One contender's figures: its turns by load, or why there are none."""

    contender: Contender
    turns: dict[Load, list[Turn]] = dataclasses.field(default_factory=dict)
    ready_seconds: float = 0.0
    absent: str = ""
    failed: str = ""
    compared: int = 0
    different: int = 0
    gap: float = 0.0

    @property
    def agrees(self) -> bool:
        """Whether every answer was the reference's, or as likely at each token."""
        return self.gap <= TIES[self.contender.dtype]

    def rates(self, load: Load) -> list[float]:
        """Generated tokens per second of each turn, prompts' time included."""
        return [sum(map(len, t.tokens)) / t.seconds for t in self.turns.get(load, [])]

    def row(self, load: Load) -> dict[str, Any]:
        """A JSON object of one load's figures; seconds and tokens per second."""
        turns, rates = self.turns[load], self.rates(load)
        first = [x for t in turns for x in t.first]
        each = [x for t in turns for x in t.per_token]
        made = sum(len(m) for t in turns for m in t.tokens)
        return {
            **dataclasses.asdict(load),
            "tokens_per_second": statistics.median(rates),
            "spread": spread(rates),
            "rates": rates,
            "first_token": statistics.median(first) if first else None,
            "first_token_95": percentile(first, 0.95) if first else None,
            "per_token": statistics.median(each) if each else None,
            "per_token_95": percentile(each, 0.95) if each else None,
            "processor_seconds_per_1000_tokens": 1e3
            * sum(t.processor_seconds for t in turns)
            / made,
            "others": statistics.median(t.others for t in turns),
            "requests": sum(len(t.tokens) for t in turns),
        }

    def report(self) -> dict[str, Any]:
        """A JSON object of everything."""
        status = "not installed" if self.absent else "failed" if self.failed else "measured"
        if status == "measured" and not self.agrees:
            status = "computes something else"
        return {
            **dataclasses.asdict(self.contender),
            "status": status,
            "why": self.absent or self.failed,
            "ready_seconds": self.ready_seconds,
            "answers_compared": self.compared,
            "answers_different": self.different,
            "largest_gap": self.gap,
            "loads": [self.row(load) for load in self.turns if self.turns[load]],
        }


def spread(values: Sequence[float]) -> float:
    """Half the distance between the quartiles, as a share of the median."""
    if len(values) < 2:
        return 0.0
    quartiles = statistics.quantiles(values, n=4, method="inclusive")
    return (quartiles[2] - quartiles[0]) / 2 / statistics.median(values)


def percentile(values: Sequence[float], share: float) -> float:
    """The value that `share` of all do not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def ratio(one: Sequence[float], other: Sequence[float]) -> tuple[float, float] | None:
    """Median and spread of one contender's figure over another's, turn by turn; None: none."""
    pairs = [a / b for a, b in zip(one, other, strict=False)]
    return (statistics.median(pairs), spread(pairs)) if pairs else None


def tables(measured: Sequence[Measured], loads: Sequence[Load], title: str) -> str:
    """Throughput, time to first token and time per output token: contenders by loads."""
    kinds = (
        ("generated tokens/s", "tokens_per_second", 1.0, "{:.0f}"),
        ("time to first token, ms (median)", "first_token", 1e3, "{:.0f}"),
        ("time per output token, ms (median)", "per_token", 1e3, "{:.2f}"),
        ("processor seconds per 1000 tokens", "processor_seconds_per_1000_tokens", 1.0, "{:.2f}"),
    )
    text = []
    for what, key, scale, form in kinds:
        lines = [[what, *(load.label for load in loads), ""]]
        for m in measured:
            note = m.absent or m.failed.strip().splitlines()[-1][:70] if not m.turns else ""
            if not m.agrees:
                note = f"NOT THE SAME TOKENS (off by {m.gap:.2g})"
            cells = [cell(m, load, key, scale, form) for load in loads]
            if any(cells) or note:
                lines.append([m.contender.name, *cells, note])
        text.append(grid(lines))
    return f"{title}\n\n" + "\n\n".join(text)


def cell(m: Measured, load: Load, key: str, scale: float, form: str) -> str:
    if not m.turns.get(load):
        return ""
    row = m.row(load)
    if row[key] is None:
        return ""
    number = form.format(row[key] * scale)
    return f"{number} ±{row['spread'] * 100:.0f}%" if key == "tokens_per_second" else number


def grid(lines: Sequence[Sequence[str]]) -> str:
    """Columns under each other, the first to the left."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join(
        "  ".join(
            [line[0].ljust(widths[0])]
            + [c.rjust(w) for c, w in zip(line[1:-1], widths[1:-1], strict=True)]
            + [line[-1]]
        ).rstrip()
        for line in lines
    )
