"""Validation as a job: prices of a table's runs beside what was measured, and how it is printed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hocket.planning.validate import Report, Scores


def accuracy(table: str | Path, *, rows: str | Path | None = None) -> Report:
    """Price every run of a table; with `rows`, write each row's prediction there.

    Raises:
        OptionError: a file that is missing or lacks columns that are needed.
    """
    from hocket.planning.validate import validate, write_rows

    report = validate(table)
    if rows is not None:
        write_rows(report, rows)
    return report


def text(report: Report) -> str:
    """The figures of each group, the overall ones, and why rows were left out."""
    width = max([*(len(name) for name in report.groups), 24])
    head = f"{'':{width}}  rows   out    mean  median  memory  unfit     tau  regret"
    lines = [head]
    lines += [_line(name, scores, width) for name, scores in report.groups.items()]
    lines += ["", _line("overall (averaged over sources)", report.overall, width)]
    reasons: dict[str, int] = {}
    for reason in report.left_out.values():
        reasons[reason] = reasons.get(reason, 0) + 1
    if reasons:
        lines += ["", "left out:"]
        ordered = sorted(reasons.items(), key=lambda item: -item[1])
        lines += [f"{count:6d}  {reason}" for reason, count in ordered]
    lines += [
        "",
        "mean, median: error of step time in %; memory: median error of peak memory in %;",
    ]
    lines += [
        "regret: of the picked layout over the best, in %; unfit: measured, called not fitting"
    ]
    return "\n".join(lines) + "\n"


def _line(name: str, scores: Scores, width: int) -> str:
    def number(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    return (
        f"{name:{width}} {scores.rows_used:5d} {scores.rows_left_out:5d} "
        f"{number(scores.step_time_mape, '.1f'):>7} "
        f"{number(scores.step_time_median_ape, '.1f'):>7} "
        f"{number(scores.memory_median_ape, '.1f'):>7} {scores.false_fits:6d} "
        f"{number(scores.kendall_tau, '.2f'):>7} {number(scores.mean_regret, '.1f'):>7}"
    ).rstrip()
