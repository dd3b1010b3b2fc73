"""Validation: how far the prices are from what was measured, row by row, source by source.

    error       |predicted / measured - 1| of step time; rows that are the same run in every column
                are compared with their median
    ranking     groups of at least two runs that differ only in layout: Kendall's tau between
                predicted and measured order, and the regret of the layout that the prediction
                picks: its measured time over the best measured time, less 1
    memory      of what the source counted: tensors, or all that the device shows
    false fits  runs that were measured and are called not fitting, by the rule that `hocket plan`
                has (`planning.fit`)

What a row does not state of its layout is resolved as `hocket plan` chooses it, and listed
(`planning.unstated`).

`overall` is of the mainstream (dense models in 16 bits on A100 and H100) and averages its sources,
so that no single large one decides; everything else is reported in groups of its own.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hocket.cost.constants import Constants
from hocket.cost.memory import peak_memory
from hocket.planning import csv_rows
from hocket.planning.fit import fits_memory
from hocket.planning.pricing import RowBatch, by_structure, row_batch
from hocket.planning.table import MAINSTREAM, PublishedRow, read_training_table, training_rows

FIELDS = (
    "rows_used",
    "rows_left_out",
    "step_time_mape",
    "step_time_median_ape",
    "memory_median_ape",
    "false_fits",
    "kendall_tau",
    "mean_regret",
)

ROW_COLUMNS = ("id", "predicted_iter_s", "predicted_mem_gb", "fits", "resolved", "left_out")
"""Of the file that `write_training_predictions` writes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ValidatedRow:
    """One row with its prediction: seconds, bytes as its source counts them, whether it fits."""

    row: PublishedRow
    step: float
    memory: float
    fits: bool
    target: float | None
    """Median of the runs that are the same in every column, seconds."""

    @property
    def error(self) -> float | None:
        """Of step time, relative and signed."""
        return None if self.target is None else self.step / self.target - 1

    @property
    def memory_error(self) -> float | None:
        """Of peak memory, relative and signed."""
        return None if self.row.memory is None else self.memory / self.row.memory - 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class ValidationScores:
    """Figures of a group of rows; None where nothing was measured. Errors in percent."""

    rows_used: int
    rows_left_out: int
    step_time_mape: float | None
    step_time_median_ape: float | None
    memory_median_ape: float | None
    false_fits: int
    kendall_tau: float | None
    mean_regret: float | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ValidationReport:
    """What `hocket validate` found. `groups`: by source, others than the mainstream by kind.

    Attributes:
        ids: of every row, in the table's order. keys: the same, an id that comes again with its
            number behind it; `left_out` and each estimated row go by these.
    """

    overall: ValidationScores
    groups: dict[str, ValidationScores]
    predicted_rows: tuple[ValidatedRow, ...]
    left_out: dict[str, str]
    ids: tuple[str, ...]
    keys: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """`overall` and `groups`, each with the fields of Scores."""
        return {
            "overall": dataclasses.asdict(self.overall),
            "groups": {name: dataclasses.asdict(s) for name, s in self.groups.items()},
        }


def validate_training(path: str | Path) -> ValidationReport:
    """Price every row of a table.

    Raises:
        OptionError: the file is missing or lacks columns that are needed.
    """
    return training_report(read_training_table(path))


def training_report(table: Sequence[Mapping[str, str]]) -> ValidationReport:
    """Price every row of a table that has been read."""
    ids = tuple(line["id"] for line in table)
    keys = _distinct_ids(ids)
    table = [{**line, "id": key} for line, key in zip(table, keys, strict=True)]
    found, left_out = training_rows(table)
    predicted_rows = price_training_rows(found)
    source = {line["id"]: line["source"] for line in table}
    names: dict[str, list[ValidatedRow]] = {}
    for one in predicted_rows:
        names.setdefault(training_group(one.row), []).append(one)
    missing = Counter(source[name] for name in left_out)
    groups = {
        name: training_scores(members, missing.pop(name, 0) if not name.startswith("other:") else 0)
        for name, members in names.items()
    }
    main = [s for name, s in groups.items() if not name.startswith("other:")]
    for name, count in missing.items():  # sources of which no row could be estimated
        groups[name] = dataclasses.replace(training_scores([], count))
    return ValidationReport(
        overall=average_training_scores(main, len(left_out)),
        groups=groups,
        predicted_rows=tuple(predicted_rows),
        left_out=left_out,
        ids=ids,
        keys=keys,
    )


def _distinct_ids(ids: Sequence[str]) -> tuple[str, ...]:
    seen: dict[str, int] = {}
    keys = []
    for name in ids:
        seen[name] = seen.get(name, 0) + 1
        keys.append(name if seen[name] == 1 else f"{name} #{seen[name]}")
    return tuple(keys)


def training_group(row: PublishedRow) -> str:
    return row.source if row.kind == MAINSTREAM else f"other: {row.kind}"


def price_training_rows(
    found: Sequence[PublishedRow],
    change: Callable[[RowBatch], Constants] | None = None,
) -> list[ValidatedRow]:
    """Predictions of rows; `change` gives other constants than the rows' own (fitting)."""
    medians = csv_rows.medians((row.key, row.measured) for row in found)
    predicted_rows: dict[int, ValidatedRow] = {}
    for places in by_structure(found):
        same_change = [found[place] for place in places]
        predicted_rows |= zip(places, _price(same_change, medians, change), strict=True)
    return [predicted_rows[place] for place in range(len(found))]


def _price(
    found: Sequence[PublishedRow],
    medians: Mapping[tuple[str, ...], float],
    change: Callable[[RowBatch], Constants] | None,
) -> list[ValidatedRow]:
    together = row_batch(found)
    values = together.constants if change is None else change(together)
    times = together.times(values)
    held = peak_memory(together.model, together.layouts, together.seq_len, values)
    usable = np.array([row.cluster.node.gpu.usable for row in found])
    enough = fits_memory(held, usable)
    result = []
    for i, row in enumerate(found):
        result.append(
            ValidatedRow(
                row=row,
                step=float(times.step[i]),
                memory=float(getattr(held, row.memory_counted)[i]),
                fits=bool(enough[i]),
                target=None if row.measured is None else medians[row.key],
            )
        )
    return result


def training_scores(members: Sequence[ValidatedRow], left_out: int = 0) -> ValidationScores:
    """The figures of one group."""
    errors = [abs(p.error) for p in members if p.error is not None]
    held = [abs(p.memory_error) for p in members if p.memory_error is not None]
    taus, regrets = ranking(members)
    return ValidationScores(
        rows_used=len(members),
        rows_left_out=left_out,
        step_time_mape=csv_rows.percent(statistics.fmean, errors),
        step_time_median_ape=csv_rows.percent(statistics.median, errors),
        memory_median_ape=csv_rows.percent(statistics.median, held),
        false_fits=sum(1 for p in members if not p.fits),
        kendall_tau=round(statistics.fmean(taus), 4) if taus else None,
        mean_regret=csv_rows.percent(statistics.fmean, regrets),
    )


def average_training_scores(groups: Sequence[ValidationScores], left_out: int) -> ValidationScores:
    """Figures averaged over groups; counts are summed."""
    return csv_rows.mean_scores(ValidationScores, groups, left_out)


def ranking(members: Sequence[ValidatedRow]) -> tuple[list[float], list[float]]:
    """Tau and regret of every group of layouts, in order of appearance."""
    groups: dict[tuple[str, ...], dict[tuple[str, ...], ValidatedRow]] = {}
    for one in members:
        if one.target is not None:
            groups.setdefault(one.row.group, {}).setdefault(one.row.key, one)
    taus, regrets = [], []
    for group in groups.values():
        runs = list(group.values())
        if len(runs) < 2:
            continue
        measured = np.array([p.target for p in runs], dtype=np.float64)
        predicted = np.array([p.step for p in runs])
        pairs = list(itertools.combinations(range(len(runs)), 2))
        agree = [
            np.sign(measured[i] - measured[j]) * np.sign(predicted[i] - predicted[j])
            for i, j in pairs
        ]
        taus.append(float(np.mean(agree)))
        regrets.append(float(measured[predicted.argmin()] / measured.min() - 1))
    return taus, regrets


def write_training_predictions(report: ValidationReport, path: str | Path) -> None:
    """`id`, `predicted_iter_s`, `predicted_mem_gb` (in the unit and the way of counting of the
    row's source), `fits`, `resolved` (`micro_batch=2, sp=1`) and `left_out` of every row, in the
    table's order."""
    known = {p.row.id: p for p in report.predicted_rows}

    def line(name: str, key: str) -> tuple[str, ...]:
        one = known.get(key)
        if one is None:
            return name, report.left_out.get(key, "")
        held = f"{one.memory / one.row.memory_unit:.3f}"
        chosen = ", ".join(f"{knob}={value}" for knob, value in one.row.resolved.items())
        return name, f"{one.step:.6g}", held, str(one.fits).lower(), chosen, ""

    csv_rows.write_table(path, ROW_COLUMNS, map(line, report.ids, report.keys))
