"""Rows of a CSV file of published runs: text by column, and its numbers; errors of predictions."""

from __future__ import annotations

import csv
import dataclasses
import math
import re
import shlex
import statistics
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from hocket.spec.errors import HocketError, OptionError, nearest

Row = TypeVar("Row")
Scores = TypeVar("Scores")

LARGEST = 1e12
"""Of a column: more than any model, cluster or time has."""

LARGEST_FILE = 64 * 2**20
"""Bytes of a table: a million rows."""


def read_csv(
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
        raise OptionError(f"there is no file {path}", hint=f"ls {path.parent}")
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
                    hint=_with_columns(path, names, missing, {*required, *optional}),
                )
            return [{k: v or "" for k, v in row.items() if k is not None} for row in reader]
    except UnicodeDecodeError:
        raise OptionError(f"{path} is not UTF-8 text", hint="save it as UTF-8") from None
    except csv.Error as error:
        raise OptionError(f"{path} is not a CSV file: {error}") from None


def _with_columns(path: Path, names: Sequence[str], missing: Sequence[str], known: set[str]) -> str:
    """The command that names misspelt columns rightly and adds the others to the first line."""
    # A stranger's file may have any text as a name, and no part of it becomes a command.
    free = [name for name in names if re.fullmatch(r"\w+", name or "") and name not in known]
    edits, added = [], []
    for name in missing:
        near = nearest(name, free, cutoff=0.7)
        if near is None:
            added.append(name)
        else:
            free.remove(near)
            edits.append(f"1s/\\b{near}\\b/{name}/")
    if added:
        edits.append(f"1s/\\r\\?$/,{','.join(added)}/")
    hint = f"sed -i {shlex.quote('; '.join(edits))} {shlex.quote(str(path))}"
    then = f"\n        then a value of {', '.join(added)} in each row" if added else ""
    return f"{hint}{then}"


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


def or_reason(parse: Callable[[Mapping[str, str]], Row], row: Mapping[str, str]) -> Row | str:
    """What a row describes, or why it cannot be predicted."""
    try:
        return parse(row)
    except LeftOut as reason:
        return str(reason)
    except HocketError as error:
        return error.message


def parsed_rows(
    table: Iterable[Mapping[str, str]], parse: Callable[[Mapping[str, str]], Row | str]
) -> tuple[list[Row], dict[str, str]]:
    """The rows that can be predicted, and of the others why not, by id."""
    found: list[Row] = []
    left_out: dict[str, str] = {}
    for line in table:
        row = parse(line)
        if isinstance(row, str):
            left_out[line["id"]] = row
        else:
            found.append(row)
    return found, left_out


def medians(runs: Iterable[tuple[Hashable, float | None]]) -> dict[Any, float]:
    """Of the figures of equal runs, by their key; what was not measured is left out."""
    figures: dict[Hashable, list[float]] = {}
    for key, value in runs:
        if value is not None:
            figures.setdefault(key, []).append(value)
    return {key: statistics.median(values) for key, values in figures.items()}


def percent(how: Callable[[list[float]], float], values: list[float]) -> float | None:
    """A statistic of relative errors in percent; None of no errors."""
    return round(100 * how(values), 4) if values else None


def mean_scores(kind: type[Scores], groups: Sequence[Scores], left_out: int) -> Scores:
    """Scores whose figures are averaged over groups and whose counts are summed."""
    values: dict[str, Any] = {}
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        known = [v for one in groups if (v := getattr(one, field.name)) is not None]
        if field.type == "int":
            values[field.name] = sum(known)
        else:
            values[field.name] = round(statistics.fmean(known), 4) if known else None
    return kind(**(values | {"rows_left_out": left_out}))


def write_table(path: str | Path, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """A CSV file; a row that is short is filled up in front of its last column."""
    with Path(path).open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        for first, *rest in rows:
            writer.writerow((first, *[""] * (len(columns) - 1 - len(rest)), *rest))
