"""Rows of a CSV file of published runs: text by column, and its numbers."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from hocket.spec.errors import OptionError

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


def number(row: Mapping[str, str], name: str) -> float | None:
    """A column's number; None where it is empty, or no finite number."""
    try:
        value = float(row.get(name, "").strip())
    except ValueError:
        return None
    return value if math.isfinite(value) else None
