"""Validation of serving: how far the prices are from what was measured, row by row.

    error     |predicted / measured - 1| of time per output token, of time to first token and of
              output tokens per second; rows that are the same run in every column are compared with
              their median
    overall   of all rows of A100, H100 and H200, dense models and mixtures of experts, every engine
              and way of running; each row counts once
    averaged  the same rows, averaged over groups, so that no single large source decides
    groups    a source, and each engine apart where a source has several; other GPUs in groups of
              their own

`families` holds the same rows by GPU.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hocket.planning import csv_rows
from hocket.planning.serving_load import answers, load_groups
from hocket.planning.serving_table import ServingTableRow, read_serving_table, serving_rows

FIELDS = ("tpot", "ttft", "throughput")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ValidatedServingRow:
    """One row with its prediction: seconds and tokens/s; `fits`: one request does.

    `targets`: medians of the runs that are the same in every column, by field.
    """

    row: ServingTableRow
    tpot: float
    ttft: float
    throughput: float
    batch: float
    fits: bool
    targets: Mapping[str, float | None]

    def error(self, field: str) -> float | None:
        """Relative and signed, of one of `FIELDS`; None where it was not measured."""
        target = self.targets[field]
        return None if target is None else float(getattr(self, field)) / target - 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServingValidationScores:
    """Figures of a group of rows; None where nothing was measured. Errors in percent.

    `tpot_rows` and the like: rows where it was measured. `unfit`: run, but called not fitting.
    """

    rows_used: int
    rows_left_out: int
    unfit: int
    tpot_rows: int
    tpot_mape: float | None
    tpot_median_ape: float | None
    ttft_rows: int
    ttft_mape: float | None
    ttft_median_ape: float | None
    throughput_rows: int
    throughput_mape: float | None
    throughput_median_ape: float | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServingValidationReport:
    """What `hocket validate --infer` found."""

    overall: ServingValidationScores
    averaged: ServingValidationScores
    dense: ServingValidationScores
    groups: dict[str, ServingValidationScores]
    families: dict[str, ServingValidationScores]
    predicted_rows: tuple[ValidatedServingRow, ...]
    left_out: dict[str, str]
    ids: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """`overall`, `averaged`, `dense`, `groups` and `families`, each with the fields of
        Scores; `left_out`: reasons and how many rows each."""
        return {
            "overall": dataclasses.asdict(self.overall),
            "averaged": dataclasses.asdict(self.averaged),
            "dense": dataclasses.asdict(self.dense),
            "groups": {name: dataclasses.asdict(s) for name, s in self.groups.items()},
            "families": {name: dataclasses.asdict(s) for name, s in self.families.items()},
            "left_out": dict(Counter(self.left_out.values())),
        }


def validate_serving(path: str | Path) -> ServingValidationReport:
    """Price every row of a table.

    Raises:
        OptionError: the file is missing or lacks columns that are needed.
    """
    return serving_report(read_serving_table(path))


def serving_report(table: Sequence[Mapping[str, str]]) -> ServingValidationReport:
    """Price every row of a table that has been read."""
    found, left_out = serving_rows(table)
    predicted_rows = price_serving_rows(found)
    several: dict[str, set[str]] = {}
    for one in predicted_rows:
        if one.row.mainstream:
            several.setdefault(one.row.source, set()).add(one.row.engine)
    names: dict[str, list[ValidatedServingRow]] = {}
    families: dict[str, list[ValidatedServingRow]] = {}
    for one in predicted_rows:
        names.setdefault(serving_group(one.row, several), []).append(one)
        families.setdefault(one.row.gpu, []).append(one)
    source = {line["id"]: line["source"] for line in table}
    figures = {name: serving_scores(members) for name, members in names.items()}
    main = [s for name, s in figures.items() if not name.startswith("other:")]
    for name, count in Counter(source[name] for name in left_out).items():
        key = name if name in figures else f"{name}: left out"
        figures[key] = dataclasses.replace(
            figures.get(key, serving_scores([])), rows_left_out=count
        )
    chosen = [p for p in predicted_rows if p.row.mainstream]
    return ServingValidationReport(
        overall=serving_scores(chosen, len(left_out)),
        averaged=average_serving_scores(main, len(left_out)),
        dense=serving_scores([p for p in chosen if not p.row.experts]),
        groups=figures,
        families={name: serving_scores(members) for name, members in families.items()},
        predicted_rows=tuple(predicted_rows),
        left_out=left_out,
        ids=tuple(line["id"] for line in table),
    )


def serving_group(row: ServingTableRow, several: Mapping[str, set[str]] | None = None) -> str:
    if not row.mainstream:
        return f"other: {row.gpu}"
    engines = (several or {}).get(row.source, set())
    return f"{row.source}: {row.engine}" if len(engines) > 1 else row.source


def price_serving_rows(found: Sequence[ServingTableRow]) -> list[ValidatedServingRow]:
    if not found:
        return []
    answer = answers(load_groups(found), len(found))
    medians = {
        field: csv_rows.medians((row.key, getattr(row, field)) for row in found) for field in FIELDS
    }
    return [
        ValidatedServingRow(
            row=row,
            tpot=float(answer.tpot[i]),
            ttft=float(answer.ttft[i]),
            throughput=float(answer.throughput[i]),
            batch=float(answer.batch[i]),
            fits=bool(answer.fits[i]),
            targets={
                field: None if getattr(row, field) is None else medians[field][row.key]
                for field in FIELDS
            },
        )
        for i, row in enumerate(found)
    ]


def serving_scores(
    members: Sequence[ValidatedServingRow], left_out: int = 0
) -> ServingValidationScores:
    """The figures of one group."""
    values: dict[str, Any] = {}
    for field in FIELDS:
        errors = [abs(e) for p in members if (e := p.error(field)) is not None]
        values[f"{field}_rows"] = len(errors)
        values[f"{field}_mape"] = csv_rows.percent(statistics.fmean, errors)
        values[f"{field}_median_ape"] = csv_rows.percent(statistics.median, errors)
    return ServingValidationScores(
        rows_used=len(members),
        rows_left_out=left_out,
        unfit=sum(1 for p in members if not p.fits),
        **values,
    )


def average_serving_scores(
    groups: Sequence[ServingValidationScores], left_out: int
) -> ServingValidationScores:
    """Errors averaged over groups; counts are summed."""
    return csv_rows.mean_scores(ServingValidationScores, groups, left_out)


def write_serving_predictions(report: ServingValidationReport, path: str | Path) -> None:
    """`id`, `predicted_tpot_ms`, `predicted_ttft_ms`, `predicted_out_tok_s_total`, `assumed`
    (`isl=220 (openorca), tp=2`) and `left_out` of every row, in the table's order."""
    known = {p.row.id: p for p in report.predicted_rows}

    def line(name: str) -> tuple[str, ...]:
        one = known.get(name)
        if one is None:
            return name, report.left_out.get(name, "")
        figures = (1e3 * one.tpot, 1e3 * one.ttft, one.throughput)
        assumed = ", ".join(f"{k}={value}" for k, value in one.row.assumed.items())
        return (name, *(f"{value:.6g}" for value in figures), assumed, "")

    names = ("predicted_tpot_ms", "predicted_ttft_ms", "predicted_out_tok_s_total")
    csv_rows.write_table(path, ("id", *names, "assumed", "left_out"), map(line, report.ids))
