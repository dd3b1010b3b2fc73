"""The matrix of `hocket check --matrix`, as it grows: a line a type, and what it comes to."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hocket.cli.terminal import printable

if TYPE_CHECKING:
    from hocket.spec.matrix import Matrix, TypeRow

MARKS = {"equal": "=", "rejected": "-", "different": "X", "crashed": "!"}


def run_matrix(
    types: Sequence[str], layouts: Sequence[str], *, quick: bool, served: bool, as_json: bool
) -> int:
    """Run the matrix of training, or of serving. Returns 0 where nothing is different and nothing
    crashed, else 1."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from hocket.jobs.matrix import check_matrix
    from hocket.jobs.serving.check_matrix import served_matrix
    from hocket.spec.matrix import LAYOUTS, QUICK, SERVED_LAYOUTS

    chosen = tuple(layouts) or (SERVED_LAYOUTS if served else QUICK if quick else LAYOUTS)
    from hocket.cli.progress import note, silent

    screen = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"), BarColumn(24), MofNCompleteColumn(), TimeElapsedColumn(),
    )  # fmt: skip
    if not as_json:
        print("\n".join(legend(chosen)), flush=True)
    with Progress(*columns, console=screen, disable=silent() or not screen.is_terminal) as bar:
        task = bar.add_task("starting", total=None)

        def show(row: TypeRow) -> None:
            print(row.to_json() if as_json else _type_line(row), flush=True)

        def tell(event: dict[str, Any]) -> None:
            bar.update(task, description=event["name"], completed=event["done"], total=event["of"])
            if not screen.is_terminal:
                note(f"{event['name']} ({event['done']} of {event['of']})")

        found = (served_matrix if served else check_matrix)(
            types, chosen, on_row=show, on_event=tell
        )
    if not as_json:
        print("\n".join(_matrix_summary(found) if not served else _reasons(found)))
    return 0 if found.ok else 1


def legend(layouts: Sequence[str]) -> list[str]:
    """What the columns and the marks are."""
    marks = ", ".join(f"{mark} {outcome}" for outcome, mark in MARKS.items())
    numbered = [f"  {_column(i)}  {layout}" for i, layout in enumerate(layouts)]
    head = "".join(_column(i) for i in range(len(layouts)))
    return ["layouts:", *numbered, f"cells: {marks}", "", f"{'type':<26}{head}"]


def _type_line(row: TypeRow) -> str:
    """One type."""
    marks = "".join(MARKS[cell.outcome] for cell in row.cells)
    ratios = [cell.ratio for cell in row.cells if cell.ratio is not None]
    worst = f"  {max(ratios):.2g} of what is allowed" if ratios else ""
    return f"{row.kind:<26}{marks}{worst}"


def _matrix_summary(found: Matrix) -> list[str]:
    """The reasons, the counts, and how many types train."""
    pipelined = len(found.train_under("dp", "pp", "zero"))
    split = len(found.train_under("dp", "pp", "tp", "zero"))
    return [
        *_reasons(found),
        f"{pipelined} train under pipeline, data and ZeRO, {split} also under tensor parallel",
    ]


def _reasons(found: Matrix) -> list[str]:
    """The reasons, each with whom it concerns, and the counts."""
    by_reason: dict[tuple[str, str], dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for row in found.rows:
        for index, cell in enumerate(row.cells):
            if cell.outcome != "equal":
                by_reason[cell.outcome, cell.reason][row.kind].append(_column(index))
    text = [""]
    for (outcome, reason), kinds in sorted(by_reason.items()):
        who = ", ".join(f"{kind} ({''.join(columns)})" for kind, columns in kinds.items())
        text += [f"{outcome}: {who}", f"    {printable(reason)}"]
    counts = ", ".join(f"{count} {outcome}" for outcome, count in found.outcomes().items())
    return [
        *text,
        "",
        f"{len(found.rows)} types at {len(found.layouts)} layouts: {counts}",
    ]


def _column(index: int) -> str:
    return "abcdefghijklmnopqrstuvwxyz"[index]
