"""Rows of collectives: name, axis and phase with count and bytes, and their sum over ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Row = dict[str, Any]


def total(ranks: Iterable[Sequence[Mapping[str, Any]]]) -> list[Row]:
    """The rows of all ranks added up, in the order of name, axis and phase."""
    sums: dict[tuple[str, str, str], list[int]] = {}
    for row in (row for rows in ranks for row in rows):
        entry = sums.setdefault((row["name"], row["axis"], row["phase"]), [0, 0])
        entry[0] += row["count"]
        entry[1] += row["bytes"]
    return [
        {"name": name, "axis": axis, "phase": phase, "count": count, "bytes": nbytes}
        for (name, axis, phase), (count, nbytes) in sorted(sums.items())
    ]
