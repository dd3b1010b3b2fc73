"""Table: rows of words and numbers, aligned for a terminal of any kind."""

from __future__ import annotations

from collections.abc import Sequence


def table_text(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns two spaces apart under a rule; a column of numbers alone is aligned right.

    Whole numbers get thousands separators; text is printed as it is.
    """
    cells = [[_cell(value) for value in row] for row in rows]
    numeric = [
        bool(rows) and all(isinstance(row[i], int | float) for row in rows)
        for i in range(len(headers))
    ]
    widths = [
        max(len(headers[i]), *(len(row[i]) for row in cells), 0) if cells else len(headers[i])
        for i in range(len(headers))
    ]

    def line(values: Sequence[str]) -> str:
        return "  ".join(
            value.rjust(width) if right else value.ljust(width)
            for value, width, right in zip(values, widths, numeric, strict=True)
        ).rstrip()

    rule = "  ".join("-" * width for width in widths)
    return "\n".join([line(headers), rule, *(line(row) for row in cells)])


def _cell(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)
