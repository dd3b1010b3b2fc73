"""Table: rows of words and numbers, aligned for a terminal of any kind."""

from __future__ import annotations

import unicodedata
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
        max(text_width(text) for text in (headers[i], *(row[i] for row in cells)))
        for i in range(len(headers))
    ]

    def line(values: Sequence[str]) -> str:
        return "  ".join(
            _blank(value, width) + value if right else value + _blank(value, width)
            for value, width, right in zip(values, widths, numeric, strict=True)
        ).rstrip()

    rule = "  ".join("-" * width for width in widths)
    return "\n".join([line(headers), rule, *(line(row) for row in cells)])


def text_width(text: str) -> int:
    """Columns that a text takes in a terminal: an ideograph or a Hangul syllable two; none what is
    drawn onto the character before it, as the vowels of a syllable that is spelled out are."""
    return sum(map(_columns, text))


def _columns(character: str) -> int:
    if unicodedata.east_asian_width(character) in "WF":
        return 2
    over = (
        unicodedata.category(character) in ("Mn", "Me", "Cf") or "\u1160" <= character <= "\u11ff"
    )
    return 0 if over else 1


def _blank(text: str, width: int) -> str:
    return " " * (width - text_width(text))


def _cell(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)
