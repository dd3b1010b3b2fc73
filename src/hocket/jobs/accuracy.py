"""Validation as a job: a table's runs, predicted compared with measured, and how it is printed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hocket.planning.validate import ValidationReport, ValidationScores
    from hocket.planning.validate_serving import ServingValidationReport as ServingReport
    from hocket.planning.validate_serving import ServingValidationScores as ServingScores


TRAINING_LEGEND = """\
rows: runs that were predicted; out: runs left out, for the reasons above
mean, median: of the absolute error of step time, in % of the measured time
memory: median of the absolute error of peak memory, in % of the measured bytes
unfit: runs that were measured, and are predicted not to fit the memory
tau: Kendall's rank correlation of predicted and measured step times, among runs that differ \
only in layout: 1 where both have the same order, 0 without relation, -1 in reverse
regret: how much slower than the fastest measured layout the one predicted as fastest is, in %
-: cannot be computed: not reported, or a single run"""
"""The meaning of the columns of training runs."""

SERVING_LEGEND = """\
rows: measurements that were predicted; out: left out, for the reasons above
TPOT, TTFT, tokens/s: mean and median of the absolute error, in % of the measured value
unfit: measured, and predicted not to fit the memory"""
"""The meaning of the columns of serving runs."""


def accuracy(table: str | Path, *, rows: str | Path | None = None) -> ValidationReport:
    """Price every run of a table; with `rows`, write each row's prediction there.

    Raises:
        OptionError: a file that is missing or lacks columns that are needed.
    """
    from hocket.planning.validate import validate_training, write_training_predictions

    report = validate_training(table)
    if rows is not None:
        write_training_predictions(report, rows)
    return report


def serving_accuracy(table: str | Path, *, rows: str | Path | None = None) -> ServingReport:
    """As `accuracy`, of a table of serving runs.

    Raises:
        OptionError: a file that is missing or lacks columns that are needed.
    """
    from hocket.planning.validate_serving import validate_serving, write_serving_predictions

    report = validate_serving(table)
    if rows is not None:
        write_serving_predictions(report, rows)
    return report


def serving_text(report: ServingReport) -> str:
    """The figures by group and by GPU, the overall ones, and why rows were left out."""
    from hocket.reporting import table_text

    rows = [
        *((name, *_serving_cells(scores)) for name, scores in report.groups.items()),
        *((f"GPU {name}", *_serving_cells(scores)) for name, scores in report.families.items()),
        ("overall (A100, H100, H200)", *_serving_cells(report.overall)),
        ("averaged over the groups", *_serving_cells(report.averaged)),
        ("dense models alone", *_serving_cells(report.dense)),
    ]
    lines = [table_text(("", "rows", "out", "unfit", "TPOT", "TTFT", "tokens/s"), rows)]
    lines += _listed("assumed", (one.row.assumed for one in report.predicted_rows))
    lines += _reasons(report.left_out)
    lines += ["", SERVING_LEGEND]
    return "\n".join(lines) + "\n"


def _serving_cells(scores: ServingScores) -> tuple[object, ...]:
    figures = (
        (scores.tpot_mape, scores.tpot_median_ape),
        (scores.ttft_mape, scores.ttft_median_ape),
        (scores.throughput_mape, scores.throughput_median_ape),
    )
    errors = (f"{_number(mean, '.1f')}, {_number(median, '.1f')}" for mean, median in figures)
    return scores.rows_used, scores.rows_left_out, scores.unfit, *errors


def accuracy_text(report: ValidationReport) -> str:
    """The figures of each group, the overall ones, and why rows were left out."""
    from hocket.reporting import table_text

    rows = [(name, *_cells(scores)) for name, scores in report.groups.items()]
    rows.append(("overall (averaged over sources)", *_cells(report.overall)))
    heads = ("", "rows", "out", "mean", "median", "memory", "unfit", "tau", "regret")
    lines = [table_text(heads, rows)]
    lines += _listed("resolved", (one.row.resolved for one in report.predicted_rows))
    lines += _reasons(report.left_out)
    lines += ["", TRAINING_LEGEND]
    return "\n".join(lines) + "\n"


def _listed(word: str, values: Iterable[Mapping[str, str]]) -> list[str]:
    """What rows do not state, with the value that it has here and how many rows that is."""
    counts: dict[str, int] = {}
    for one in values:
        for knob, value in one.items():
            text = f"{knob}={value}"
            counts[text] = counts.get(text, 0) + 1
    if not counts:
        return []
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    chosen = ", ".join(f"{text} ({count})" for text, count in ordered)
    return ["", f"{word}, since rows do not state it: {chosen}"]


def _reasons(left_out: dict[str, str]) -> list[str]:
    reasons: dict[str, int] = {}
    for reason in left_out.values():
        reasons[reason] = reasons.get(reason, 0) + 1
    ordered = sorted(reasons.items(), key=lambda item: -item[1])
    found = [f"- {reason} ({count})" for reason, count in ordered]
    return ["", "left out:", *found] if found else []


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _cells(scores: ValidationScores) -> tuple[object, ...]:
    return (
        scores.rows_used,
        scores.rows_left_out,
        _number(scores.step_time_mape, ".1f"),
        _number(scores.step_time_median_ape, ".1f"),
        _number(scores.memory_median_ape, ".1f"),
        scores.false_fits,
        _number(scores.kendall_tau, ".2f"),
        _number(scores.mean_regret, ".1f"),
    )
