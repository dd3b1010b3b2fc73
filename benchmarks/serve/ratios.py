"""Ratios: one contender over another, turn by turn, with the goal that was set for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from benchmarks.serve.figures import Measured, grid, ratio
from benchmarks.serve.workload import Load


@dataclasses.dataclass(frozen=True)
class Goal:
    """What is compared: names' beginnings, the figure ("rate" or "per_token"), the least that is
    wanted, and the numbers of clients it is wanted at (none: all)."""

    title: str
    one: str
    other: str
    figure: str
    least: float
    clients: tuple[int, ...] = ()


ONE_RANK = "hocket serve dp1, 1 thread a rank"
HALF = "bf16: "
"""Before the names of those whose weights are in bfloat16."""
_GOALS = (
    Goal("hocket serve / vLLM serve", "hocket serve dp1", "vLLM serve", "rate", 1.0),
    Goal("hocket serve, best layout / vLLM serve", "hocket serve", "vLLM serve", "rate", 1.0),
    Goal("hocket.LLM / vLLM offline", "hocket.LLM", "vLLM offline", "rate", 1.0),
    Goal("hocket.LLM / generate_batch", "hocket.LLM", "generate_batch", "rate", 4.0, (32,)),
    Goal("hocket serve / transformers serve", "hocket serve dp1", "transformers serve", "rate", 1),
    Goal("hocket.LLM / generate", "hocket.LLM", "generate,", "rate", 1.0),
    Goal("tp2 / one rank, decode", "hocket serve tp2", ONE_RANK, "per_token", 1.5, (1,)),
    Goal("tp2 / one rank, throughput", "hocket serve tp2", ONE_RANK, "rate", 1.0),
    Goal("pp2 / one rank, throughput", "hocket serve pp2", ONE_RANK, "rate", 1.7, (32, 64)),
    Goal("dp2 / one rank, throughput", "hocket serve dp2", ONE_RANK, "rate", 1.7, (32, 64)),
)
GOALS = (
    *_GOALS,
    *(
        dataclasses.replace(
            goal, title=f"{HALF}{goal.title}", one=HALF + goal.one, other=HALF + goal.other
        )
        for goal in _GOALS
        if goal.one.startswith("hocket serve")
        and goal.other.startswith(("hocket serve", "vLLM serve"))
    ),
)


@dataclasses.dataclass
class Ratios:
    """Every ratio of a run whose two sides were measured."""

    rows: list[dict[str, Any]]

    def text(self) -> str:
        """One line a ratio and load."""
        if not self.rows:
            return "ratios: none, for want of one of the two sides"
        lines = [["ratio of medians, turn by turn", "clients", "ratio", "+-", "goal", ""]]
        for row in self.rows:
            goal = "" if row["least"] is None else f"{row['least']:g}"
            met = "" if row["least"] is None else "met" if row["met"] else "NOT MET"
            values = (row["load"], f"{row['ratio']:.2f}", f"{row['spread'] * 100:.0f}%", goal)
            lines.append([f"{row['one']} / {row['other']} ({row['what']})", *values, met])
        return grid(lines)


def ratios(measured: Sequence[Measured], loads: Sequence[Load]) -> Ratios:
    """Each goal at each load: the best of the contenders that carry its names, on either side."""
    rows = []
    for goal in GOALS:
        for load in loads:
            one = best(measured, goal.one, load)
            other = best(measured, goal.other, load)
            if one is None or other is None:
                continue
            found = ratio(*_sides(goal, one, other, load))
            if found is None:
                continue
            wanted = not goal.clients or load.clients in goal.clients
            rows.append(
                {
                    "title": goal.title,
                    "what": "decode" if goal.figure == "per_token" else "tokens/s",
                    "one": one.contender.name,
                    "other": other.contender.name,
                    "load": load.label,
                    "ratio": found[0],
                    "spread": found[1],
                    "least": goal.least if wanted else None,
                    "met": wanted and found[0] >= goal.least,
                }
            )
    return Ratios(rows)


def best(measured: Sequence[Measured], name: str, load: Load) -> Measured | None:
    """The fastest at this load of those whose name begins so and who computed the same."""
    able = [
        m for m in measured if m.contender.name.startswith(name) and m.turns.get(load) and m.agrees
    ]
    return max(able, key=lambda m: float(m.row(load)["tokens_per_second"]), default=None)


def _sides(
    goal: Goal, one: Measured, other: Measured, load: Load
) -> tuple[list[float], list[float]]:
    if goal.figure == "rate":
        return one.rates(load), other.rates(load)
    # Seconds per token turned over: tokens per second of one request while it decodes.
    return tuple(  # type: ignore[return-value]
        [len(t.per_token) / sum(t.per_token) for t in m.turns[load] if t.per_token]
        for m in (one, other)
    )
