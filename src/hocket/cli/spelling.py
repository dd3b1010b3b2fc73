"""Spelling of flags: old names, names of other tools and unknown names, before verbs read them."""

from __future__ import annotations

import dataclasses
import inspect
import shlex
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from hocket.spec import renamed
from hocket.spec.errors import OptionError, nearest
from hocket.spec.synonyms import EXPLAINED, SYNONYMS, VALUES, meant

CUTOFF = 0.7
"""Least similarity of a name that is suggested."""


@dataclasses.dataclass(frozen=True)
class Flag:
    """One flag: its names without dashes, and whether it is a switch or a positional argument."""

    name: str
    switch: bool = False
    positional: bool = False


def kind_of(module: types.ModuleType) -> Any:
    """The dataclass of a verb's flags: the only one that its module defines."""
    (kind,) = (
        kind
        for _, kind in inspect.getmembers(module, inspect.isclass)
        if dataclasses.is_dataclass(kind) and kind.__module__ == module.__name__
    )
    return kind


def flags_of(module: types.ModuleType) -> dict[str, Flag]:
    """The flags of a verb, by each of their names with underscores."""
    return _flags(kind_of(module))


def _flags(kind: Any) -> dict[str, Flag]:
    import tyro

    found: dict[str, Flag] = {}
    hints = typing.get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        marks = getattr(hint, "__metadata__", ())
        plain = typing.get_args(hint)[0] if marks else hint
        if dataclasses.is_dataclass(plain):
            found.update(_flags(plain))
            continue
        forms = [mark for mark in marks if hasattr(mark, "metavar")]
        positional = tyro.conf.Positional[str].__metadata__[0] in marks  # type: ignore[attr-defined]
        name = next((form.name for form in forms if form.name), field.name)
        flag = Flag(name.replace("-", "_"), plain is bool, positional)
        for other in (flag.name, *(a for form in forms for a in form.aliases or ())):
            if not other.startswith("-") or other.startswith("--"):
                found[other.removeprefix("--").replace("-", "_")] = flag
    return found


def current(verb: str, arguments: Sequence[str], known: Mapping[str, Flag]) -> list[str]:
    """The arguments by the flags' present names, with a warning for each old one.

    Raises:
        OptionError: an unknown flag, with the nearest name or with what to use.
    """
    names = {name for name, flag in known.items() if not flag.positional}
    found: list[str] = []
    front: list[str] = []
    waiting: list[str] | None = None
    for index, argument in enumerate(arguments):
        if not argument.startswith("--") or argument == "--":
            (found if waiting is None else waiting).append(argument)
            waiting = None
            continue
        waiting = None
        written, equals, value = argument[2:].partition("=")
        name = written.replace("-", "_")
        if name in names or name == "help" or name.startswith("tyro_"):
            found.append(f"--{written.replace('_', '-')}{equals}{value}")
            continue
        (new,) = renamed.options({name: None}, names, spelled=spelled)
        new = meant(new, known)
        if new in names:
            found.append(spelled(new) + equals + value)
        elif new in known:  # positional: its value goes to the front
            waiting = front
            if equals:
                front.append(value)
                waiting = None
        elif name in VALUES and VALUES[name][0] in names and not equals:
            option, choice = VALUES[name]
            found += [spelled(option), choice]
        else:
            raise unknown_flag(verb, arguments, index, known)
    return [*front, *found]


def unknown_flag(
    verb: str, arguments: Sequence[str], index: int, known: Mapping[str, Flag]
) -> OptionError:
    """The error of an unknown flag: the nearest name in the whole command, or what to use."""
    written = arguments[index].partition("=")[0]
    name = written[2:].replace("-", "_")
    if name in EXPLAINED:
        return OptionError(f"unknown option {written} of hocket {verb}", hint=EXPLAINED[name])
    names = {n: n for n, flag in known.items() if not flag.positional}
    names.update({n: target for n, target in SYNONYMS.items() if target in names})
    near = nearest(name, names, cutoff=CUTOFF)
    near = None if near is None else names[near]
    if near is None:
        return OptionError(f"unknown option {written} of hocket {verb}", hint=f"hocket {verb} -h")
    mended = [*arguments]
    mended[index] = arguments[index].replace(written, spelled(near), 1)
    return OptionError(
        f"unknown option {written} of hocket {verb}; the nearest is {spelled(near)}",
        hint=f"hocket {verb} {shlex.join(mended)}",
    )


def spelled(name: str) -> str:
    """An option as a flag."""
    return "--" + name.replace("_", "-")
