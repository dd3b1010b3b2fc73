"""The text of a flag in help, its choices and its default, from docstrings; how tyro reads it."""

from __future__ import annotations

import dataclasses
import inspect
import re
import typing
from typing import Any

from tyro.constructors import (
    ConstructorRegistry,
    StructConstructorSpec,
    StructFieldSpec,
    StructTypeInfo,
)

REGISTRY = ConstructorRegistry()
"""How the flags of a verb are read: as tyro reads a dataclass; `help_page` prints their help."""

_CHOICES = re.compile(r" ?One of: ([\w., -]+)\.$")


def attributes(kind: type) -> dict[str, str]:
    """The texts under `Attributes:` in the docstring of a class, by name, each on one line."""
    text = inspect.cleandoc(kind.__doc__ or "").partition("\nAttributes:\n")[2]
    found = re.findall(r"^    (\w+): (.*(?:\n     .*)*)", text, re.MULTILINE)
    return {name: re.sub(r"\s+", " ", said) for name, said in found}


def flag(text: str, default: Any, depends: bool = False) -> tuple[str, tuple[str, ...]]:
    """The help of one flag, and its choices.

    `One of: a, b.` at the end of the text becomes the choices. A default that is a value is
    appended; a flag without one states in its text what leaving it out does, and so does one whose
    default depends on the task (`depends`).
    """
    listed = _CHOICES.search(text)
    choices = tuple(listed[1].split(", ")) if listed else ()
    text = _CHOICES.sub("", text).removesuffix(".")
    if re.match(r"[a-z]+\b(?![=:.(,])", text):
        text = text[0].upper() + text[1:]
    if default is None or default is False or default in ("", ()):
        return text, choices
    if depends and "(default: " in text:
        return text, choices
    text = re.sub(r" \(default: [^)]*\)$", "", text)
    return f"{text} (default: {default})", choices


@REGISTRY.struct_rule
def _dataclass(info: StructTypeInfo) -> StructConstructorSpec | None:
    """A dataclass of flags; `info.default` is an instance of it."""
    kind = info.type
    if not dataclasses.is_dataclass(kind):
        return None
    hints = typing.get_type_hints(kind, include_extras=True)
    fields = (
        StructFieldSpec(field.name, hints[field.name], getattr(info.default, field.name), "")
        for field in dataclasses.fields(kind)
    )
    return StructConstructorSpec(instantiate=kind, fields=tuple(fields))
