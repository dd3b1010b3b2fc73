"""Rows: frozen dataclasses as plain lists and tables, read back with every number checked.

A field's annotation says what its value may be, by these names:

    Seconds, Rate     above zero and finite      Share    zero or more, finite
    Count             whole, at least one        Index    whole, at least zero
    str, bool         as they are                tuple[X, ...]  of any of these

Fields may be added at the end, with a default: older rows are then shorter.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

from hocket.spec.errors import OptionError, unknown

Seconds: TypeAlias = float
Rate: TypeAlias = float
Share: TypeAlias = float
Count: TypeAlias = int
Index: TypeAlias = int

Kind = TypeVar("Kind")

LARGEST = 1e18
"""No figure of a machine reaches it: bytes, bytes/s, operations/s of one device, seconds."""


def to_row(value: Any) -> list[Any]:
    """The values of a dataclass in the order of its fields, tuples as lists."""
    return [_plain(getattr(value, field.name)) for field in dataclasses.fields(value)]


def to_table(value: Any) -> dict[str, Any]:
    """The same by name."""
    return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}


def from_row(kind: type[Kind], row: Any, what: str) -> Kind:
    """The inverse of `to_row`.

    Raises:
        OptionError: no list, too short or too long, or a value that cannot be; `what` names it.
    """
    fields = dataclasses.fields(kind)  # type: ignore[arg-type]
    if not isinstance(row, Sequence) or isinstance(row, str):
        raise OptionError(f"{what} is {_short(row)}; it must be a list")
    if len(row) > len(fields):
        raise OptionError(
            f"{what} has {len(row)} values, not {len(fields)}: " + ", ".join(f.name for f in fields)
        )
    names = [field.name for field in fields]
    return from_table(kind, dict(zip(names, row, strict=False)), what)


def from_table(kind: type[Kind], table: Any, what: str) -> Kind:
    """The inverse of `to_table`. Raises OptionError as `from_row`, and for unknown keys."""
    if not isinstance(table, Mapping):
        raise OptionError(f"{what} is {_short(table)}; it must be a table")
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    for key in table:
        if key not in fields:
            message, hint = unknown(f"key of {what}", key, fields)
            raise OptionError(message, hint=hint)
    missing = [
        name for name, field in fields.items()
        if name not in table and field.default is dataclasses.MISSING
    ]  # fmt: skip
    if missing:
        raise OptionError(f"{what} has no {', '.join(missing)}")
    values = {
        name: checked_value(str(fields[name].type), value, f"{name} of {what}")
        for name, value in table.items()
    }
    return kind(**values)


def checked_value(annotation: str, value: Any, what: str) -> Any:
    """`value` as the annotation wants it. Raises OptionError."""
    if annotation.startswith("tuple["):
        inside = annotation[len("tuple[") : -1].removesuffix(", ...")
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise OptionError(f"{what} is {_short(value)}; it must be a list")
        return tuple(checked_value(inside, one, what) for one in value)
    return _KINDS[annotation](value, what)


def require_types(kind: type, values: Mapping[str, Any]) -> None:
    """Reject a value that is not of its field's type, where that is a plain one or holds such.

    Plain are `int`, `float` (a whole number will do), `str`, `bool`, and any of these or None;
    `dict[str, X]` and `tuple[X, ...]` of a plain X hold them.

    Raises:
        OptionError: the first such value, with its field.
    """
    for field in dataclasses.fields(kind):
        wanted = str(field.type)
        if field.name in values and not _is_of(wanted, values[field.name]):
            raise OptionError(
                f"{field.name} is {_short(values[field.name])}; it must be of type {wanted}"
            )


def _is_of(wanted: str, value: Any) -> bool:
    """Whether a value is of a type, of which only the plain ones and what holds them are looked at;
    numbers too large for a float are of none."""
    if wanted.startswith("dict[str, ") and wanted.endswith("]"):
        inside = wanted.removeprefix("dict[str, ")[:-1]
        return isinstance(value, Mapping) and all(_is_of(inside, one) for one in value.values())
    if wanted.startswith("tuple[") and wanted.endswith(", ...]"):
        inside = wanted.removeprefix("tuple[").removesuffix(", ...]")
        return isinstance(value, list | tuple) and all(_is_of(inside, one) for one in value)
    names = wanted.split(" | ")
    if not set(names) <= set(_PLAIN):
        return True
    kinds = tuple(one for name in names for one in _PLAIN[name])
    if not isinstance(value, kinds) or (isinstance(value, bool) and "bool" not in names):
        return False
    return not isinstance(value, int) or abs(value) <= LARGEST


_PLAIN: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "str": (str,),
    "bool": (bool,),
    "None": (type(None),),
}


def _number(least: float, whole: bool, strict: bool) -> Callable[[Any, str], float]:
    words = "a whole number" if whole else "a number"
    words += f" above {least:g}" if strict else f" of at least {least:g}"

    def check(value: Any, what: str) -> float:
        right = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
        if right and LARGEST < value < math.inf:
            raise OptionError(f"{what} is {_short(value)}; no machine has that much")
        if not right or not least <= value < math.inf or (strict and value == least):
            raise OptionError(f"{what} is {_short(value)}; it must be {words}")
        return int(value) if whole else float(value)

    return check


def _of(kind: type, words: str) -> Callable[[Any, str], Any]:
    def check(value: Any, what: str) -> Any:
        if not isinstance(value, kind):
            raise OptionError(f"{what} is {_short(value)}; it must be {words}")
        return value

    return check


_KINDS: dict[str, Callable[[Any, str], Any]] = {
    "Seconds": _number(0, whole=False, strict=True),
    "Rate": _number(0, whole=False, strict=True),
    "Share": _number(0, whole=False, strict=False),
    "Count": _number(1, whole=True, strict=False),
    "Index": _number(0, whole=True, strict=False),
    "str": _of(str, "a text"),
    "bool": _of(bool, "true or false"),
}


def _plain(value: Any) -> Any:
    return [_plain(one) for one in value] if isinstance(value, tuple) else value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
