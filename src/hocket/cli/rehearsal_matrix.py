"""The matrix of `hocket rehearse --matrix`, as it grows: a line a job, and what it comes to."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hocket.cli.terminal import printable

if TYPE_CHECKING:
    from hocket.spec.rehearsal_matrix import RehearsalCell, RehearsalMatrix


def run_rehearsal_matrix(
    models: Sequence[str], schedules: Sequence[str], options: Sequence[str], *, as_json: bool
) -> int:
    """Rehearse the matrix, or a part of it. Returns 0 where every cell is ok or rejected, else 1.

    With `as_json` stdout is one JSON object a cell, and a last one with versions, date and seconds.

    Raises:
        OptionError: a name that the matrix does not have, a choice without a job, or no C++
            compiler.
    """
    from hocket.jobs.rehearsal_matrix import chosen_cases, rehearse_matrix
    from hocket.spec.errors import OptionError

    cases = chosen_cases(models, schedules, options)
    if not cases:
        raise OptionError(
            "no job of the matrix has these models, schedules and options together",
            hint="leave one of them out",
        )
    done = 0

    def show(cell: RehearsalCell) -> None:
        nonlocal done
        done += 1
        print(
            cell.to_json() if as_json else f"{done:>3}/{len(cases)}  {_cell_line(cell)}", flush=True
        )

    found = rehearse_matrix(cases, on_cell=show)
    print(found.to_json() if as_json else "\n".join(_rehearsal_summary(found)))
    return 0 if found.ok else 1


def _cell_line(cell: RehearsalCell) -> str:
    """One cell."""
    case = cell.case
    error = "" if cell.memory is None else f"{cell.memory:+.1%}"
    job = " ".join(filter(None, (case.layout, case.schedule)))
    return f"{case.model:<13}{job:<54}{case.option:<21}{cell.outcome:<10}{error:>7}"


def _rehearsal_summary(found: RehearsalMatrix) -> list[str]:
    """The reasons, each with the commands of its jobs, and the counts."""
    reasons: dict[tuple[str, str], list[str]] = defaultdict(list)
    for cell in found.cells:
        if cell.reason:
            reasons[cell.outcome, cell.reason].append(cell.case.command())
    text = [""]
    for (outcome, reason), commands in sorted(reasons.items()):
        text += [f"{outcome}: {printable(reason)}", *(f"    {command}" for command in commands)]
    counts = ", ".join(f"{count} {outcome}" for outcome, count in found.outcomes().items())
    return [*text, "", f"{len(found.cells)} jobs in {found.seconds:.0f} s: {counts}"]
