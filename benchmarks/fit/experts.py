"""How well predictions of mixtures of experts carry over to families of models not seen.

    python -m benchmarks.fit.experts TABLE.csv [TABLE.csv ...]

The rows that state how tokens are dispatched have four constants of their own
(`planning.expert_rows`). For every family of models they are chosen from a grid without its rows
(least mean error over sources), and its rows are predicted with them. Printed are errors by
source and by family, the ranking of layouts, and the 80% interval of measured over predicted: of
all left-out rows, and how many rows of a source lie inside the interval of the other sources.
"""

from __future__ import annotations

import argparse
import itertools
import math
import re
import statistics
from collections.abc import Mapping, Sequence

import numpy as np

from hocket.planning import expert_rows
from hocket.planning.table import read_training_table, training_rows
from hocket.planning.validate import ValidatedRow, price_training_rows, ranking

FAMILIES = ("grok", "deepseek", "qwen", "gpt.?oss", "moonlight", "kimi", "mixtral", "llama.?4", "")
"""Of models, by name (first match); the last one is any other."""

GRID: dict[str, tuple[float, ...]] = {
    "EXPERT_TIME": (0.6e-3, 0.9e-3, 1.2e-3, 1.6e-3, 2.0e-3),
    "EXPERT_PASSES": (4.0, 8.0, 12.0),
    "OVERLAPPED": (0.1, 0.2, 0.35, 0.5),
    "GRAPHED": (0.25, 0.5, 0.75, 1.0),
}
"""Values of each constant of `planning.expert_rows` that are tried."""

ALL = "none"
"""What is left out where the constants are chosen from all rows."""

LOW, HIGH = 0.1, 0.9

Table = Sequence[Mapping[str, str]]

Errors = dict[str, float]
"""Logarithm of predicted over measured by row."""


def family(model: str) -> str:
    """The family of a model's name."""
    return next(name for name in FAMILIES if re.search(name, model, re.I)) or "other"


def predictions(table: Table, values: Mapping[str, float]) -> list[ValidatedRow]:
    """The rows of a table with other constants of dispatch."""
    known = {name: getattr(expert_rows, name) for name in values}
    try:
        for name, value in values.items():
            setattr(expert_rows, name, value)
        return price_training_rows(training_rows(table)[0])
    finally:
        for name, value in known.items():
            setattr(expert_rows, name, value)


def errors(found: Sequence[ValidatedRow]) -> Errors:
    """Of the rows whose step time was measured."""
    return {one.row.id: math.log(one.step / one.target) for one in found if one.target}


def mean_over_sources(found: Errors, sources: Mapping[str, str]) -> float:
    """Mean absolute error of step time, each source as much as any other."""
    each: dict[str, list[float]] = {}
    for name, error in found.items():
        each.setdefault(sources[name], []).append(abs(math.expm1(error)))
    return statistics.fmean(statistics.fmean(values) for values in each.values())


def left_out(
    table: Table, families: Mapping[str, str], sources: Mapping[str, str]
) -> tuple[Errors, dict[str, dict[str, float]], list[ValidatedRow]]:
    """Errors of every row with the constants chosen without its family; and those constants."""
    grid = [dict(zip(GRID, values, strict=True)) for values in itertools.product(*GRID.values())]
    predicted_rows = [predictions(table, values) for values in grid]
    tried = [errors(found) for found in predicted_rows]
    left_out_errors: Errors = {}
    chosen: dict[str, dict[str, float]] = {}
    rows_found: list[ValidatedRow] = []
    for name in sorted(set(families.values())):
        own = {row for row in tried[0] if families[row] == name}
        if not own:
            continue
        scores = [
            mean_over_sources({row: e for row, e in one.items() if row not in own}, sources)
            for one in tried
        ]
        best = int(np.argmin(scores))
        chosen[name] = grid[best]
        left_out_errors |= {row: tried[best][row] for row in own}
        rows_found += [one for one in predicted_rows[best] if one.row.id in own]
    whole = [mean_over_sources(one, sources) for one in tried]
    chosen[ALL] = grid[int(np.argmin(whole))]
    return left_out_errors, chosen, rows_found


def interval(found: Sequence[float]) -> tuple[float, float]:
    """Measured over predicted at the 10th and 90th percentile, of logarithms of the inverse."""
    low, high = np.quantile(np.exp(-np.array(found)), [LOW, HIGH])
    return float(low), float(high)


def inside(left_out_errors: Errors, sources: Mapping[str, str]) -> float:
    """Fraction of the rows inside the interval of the other sources."""
    hits = 0
    for name, error in left_out_errors.items():
        others = [e for other, e in left_out_errors.items() if sources[other] != sources[name]]
        low, high = interval(others)
        hits += low <= math.exp(-error) <= high
    return hits / len(left_out_errors)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("tables", nargs="+")
    options = parser.parse_args()
    lines = [line for path in options.tables for line in read_training_table(path)]
    table = [line for line in lines if line.get("dispatcher", "").strip()]
    families = {line["id"]: family(line["model"]) for line in table}
    sources = {line["id"]: line["source"] for line in table}
    present = errors(predictions(table, {}))
    left_out_errors, chosen, found = left_out(table, families, sources)
    print("error in percent: with the present constants (in-sample); family left out")
    for kind, of in (("source", sources), ("family", families)):
        for name in dict.fromkeys(of[row] for row in left_out_errors):
            both = [
                100 * mean_over_sources({r: e for r, e in one.items() if of[r] == name}, of)
                for one in (present, left_out_errors)
            ]
            count = sum(of[row] == name for row in left_out_errors)
            print(f"  {kind} {name[:60]:60} {count:3} {both[0]:6.1f} {both[1]:6.1f}")
    for title, one in (("in-sample", present), ("family left out", left_out_errors)):
        print(f"averaged over sources, {title}: {100 * mean_over_sources(one, sources):.1f}")
    taus, regrets = ranking(found)
    if taus:
        print(
            f"ranking of layouts, family left out: tau {statistics.fmean(taus):.2f}, "
            f"regret {100 * statistics.fmean(regrets):.1f}%"
        )
    low, high = interval(list(left_out_errors.values()))
    print(
        f"80% interval of measured over predicted, family left out: {low:.4f} to {high:.4f}; "
        f"{100 * inside(left_out_errors, sources):.0f}% of rows inside that of the other sources"
    )
    for name, values in chosen.items():
        print(f"  without {name}: " + ", ".join(f"{k} {v:g}" for k, v in values.items()))


if __name__ == "__main__":
    main()
