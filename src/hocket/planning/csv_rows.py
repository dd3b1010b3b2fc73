"""Rows of a CSV file of published runs: text by column, and its numbers."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from hocket.spec.errors import OptionError

LARGEST = 1e12
"""Of a column: more than any model, cluster or time has."""

LARGEST_FILE = 64 * 2**20
"""Bytes of a table: a million rows."""


def read(
    path: str | Path, required: Sequence[str], optional: Sequence[str]
) -> list[dict[str, str]]:
    """The rows of a CSV file.

    Raises:
        OptionError: no such file, not a CSV file of UTF-8 text, more than `LARGEST_FILE` bytes, or
            columns of `required` are missing; the nearest is named.
    """
    path = Path(path)
    if path.is_dir():
        raise OptionError(f"{path} is a folder; a table is a CSV file")
    if not path.is_file():
        raise OptionError(f"there is no file {path}")
    if path.stat().st_size > LARGEST_FILE:
        raise OptionError(f"{path} has more than {LARGEST_FILE:,} bytes, the most of a table")
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            names = reader.fieldnames or []
            missing = [name for name in required if name not in names]
            if missing:
                raise OptionError(
                    f"{path} has no column {', '.join(missing)}; it has {', '.join(names)}",
                    hint=f"columns: {', '.join((*required, *optional))}",
                )
            return [{k: v or "" for k, v in row.items() if k is not None} for row in reader]
    except UnicodeDecodeError:
        raise OptionError(f"{path} is not UTF-8 text", hint="save it as UTF-8") from None
    except csv.Error as error:
        raise OptionError(f"{path} is not a CSV file: {error}") from None


class LeftOut(Exception):
    """A row that cannot be predicted; its text is the reason."""


def number(row: Mapping[str, str], name: str) -> float | None:
    """A column's number; None where it is empty or `nan`. Raises LeftOut: it is not a number, or
    outside 0 to `LARGEST`."""
    text = row.get(name, "").strip()
    try:
        value = float(text) if text else math.nan
    except ValueError:
        raise LeftOut(f"{name} is {text[:40]!r}, not a number") from None
    if math.isnan(value):
        return None
    if not 0 <= value <= LARGEST:
        raise LeftOut(f"{name} is {value:g}, not between 0 and {LARGEST:g}")
    return value
