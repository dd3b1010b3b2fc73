"""Spelling of flags: old names, names of other tools and unknown names, before verbs read them."""

from __future__ import annotations

import dataclasses
import inspect
import re
import shlex
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hocket.cli.help import attributes
from hocket.cli.help import flag as help_form
from hocket.spec import renamed
from hocket.spec.errors import OptionError, nearest, unknown
from hocket.spec.layout import TERMS
from hocket.spec.run import TrainOptions
from hocket.spec.synonyms import ALIAS, EXPLAINED, SYNONYMS, VALUES, implied, meant, nearest_option

COMMON = frozenset({"help", "config", "set"})
"""Flags of every verb that take part in its options; `main` takes --quiet out before."""

BARE = {"recompute": "full"}
"""What a flag that other tools have without a value means there."""


@dataclasses.dataclass(frozen=True)
class Flag:
    """One flag.

    Attributes:
        name: with underscores. switch: takes no value. positional: written without its name.
        many: takes several values. number: the type of its values, if
            they are numbers. choices: the values that it takes; empty: any.
        metavar, text: as help prints them; full: the text and the default.
        aliases: other spellings, as typed.
    """

    name: str
    switch: bool = False
    positional: bool = False
    many: bool = False
    number: type[int] | type[float] | None = None
    choices: tuple[str, ...] = ()
    metavar: str = ""
    text: str = ""
    full: str = ""
    aliases: tuple[str, ...] = ()


def flags_class(module: types.ModuleType) -> Any:
    """The dataclass of a verb's flags: the only one that its module defines."""
    (kind,) = (
        kind
        for _, kind in inspect.getmembers(module, inspect.isclass)
        if dataclasses.is_dataclass(kind) and kind.__module__ == module.__name__
    )
    return kind


def flags_of(module: types.ModuleType) -> dict[str, Flag]:
    """The flags of a verb, by each of their names with underscores; texts that its class lacks are
    those of `TrainOptions`."""
    return _flags(flags_class(module))


def _flags(kind: Any) -> dict[str, Flag]:
    import tyro

    found: dict[str, Flag] = {}
    texts = attributes(TrainOptions) | attributes(kind)
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
        text, choices = help_form(texts[field.name], None)
        words = str in _types(plain)  # 500, or 30m
        number = next((k for k in (int, float) if k in _types(plain) and not words), None)
        metavar = next((form.metavar for form in forms if form.metavar), "")
        if choices:
            metavar = f"{{{','.join(choices)}}}"
        flag = Flag(
            name=name.replace("-", "_"),
            switch=plain is bool,
            positional=positional,
            many=typing.get_origin(plain) is tuple,
            number=number,
            choices=choices,
            text=text,
            full=help_form(texts[field.name], field.default, True)[0],
            metavar=metavar or (number.__name__.upper() if number else "TEXT"),
            aliases=tuple(alias for form in forms for alias in form.aliases or ()),
        )
        for other in (flag.name, *flag.aliases):
            if not other.startswith("-") or other.startswith("--"):
                found[other.removeprefix("--").replace("-", "_")] = flag
    return found


def _types(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)


def checked_arguments(verb: str, arguments: Sequence[str], known: Mapping[str, Flag]) -> list[str]:
    """The arguments, the values of flags compared with their types and choices, and number formats
    by the names here.

    Raises:
        OptionError: a value that is missing, is not a number, or is not one of the choices.
    """
    arguments = list(arguments)
    for index, argument in enumerate(arguments):
        if argument == "--":
            break
        if not argument.startswith("--"):
            continue
        written, equals, value = argument.partition("=")
        flag = known.get(written[2:].replace("-", "_"))
        if flag is None or flag.switch:
            continue
        if not equals:
            after = arguments[index + 1] if index + 1 < len(arguments) else "--"
            if after.startswith("--"):
                kinds = f"; it is one of {', '.join(flag.choices)}" if flag.choices else ""
                value = flag.choices[-1] if flag.choices else BARE.get(flag.name, flag.metavar)
                raise OptionError(f"{written} has no value{kinds}", hint=f"{written} {value}")
            value = after
        if flag.number is not None and not flag.many:
            try:
                flag.number(value)
            except ValueError:
                noun = "a whole number" if flag.number is int else "a number"
                raise OptionError(
                    f"{written} is {value!r}; it must be {noun}",
                    hint=f"hocket {verb} --help {flag.name.replace('_', '-')}",
                ) from None
        if flag.choices and ALIAS.get(value) in flag.choices:
            value = ALIAS[value]
            place = index if equals else index + 1
            arguments[place] = f"{written}={value}" if equals else value
        if flag.choices and value.lower() not in flag.choices:
            option = flag.name.replace("_", "-")
            message, _ = unknown(option, value, flag.choices)
            near = nearest(value, flag.choices)
            help_of = EXPLAINED.get(option, f"hocket {verb} --help {option}")
            raise OptionError(message, hint=help_of if near is None else f"{written} {near}")
    return arguments


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
        if argument == "--":  # options of another command
            found += arguments[index:]
            break
        if not argument.startswith("--"):
            (found if waiting is None else waiting).append(argument)
            waiting = None
            continue
        waiting = None
        written, equals, value = argument[2:].partition("=")
        name = written.replace("-", "_")
        if name in names or name in COMMON:
            found.append(f"--{written.replace('_', '-')}{equals}{value}")
            continue
        (new,) = renamed.present_options({name: None}, names, spelled=spelled)
        new = meant(new, known)
        if new in names:
            found.append(spelled(new) + equals + value)
        elif new in known:  # positional: its value goes to the front
            waiting = front
            if equals:
                front.append(value)
                waiting = None
        elif name in renamed.SWITCHES and renamed.SWITCHES[name][0] in names and not equals:
            option, choice = renamed.SWITCHES[name]
            renamed.warn(spelled(name), f"{spelled(option)} {choice}")
            found += [spelled(option), choice]
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
    axis = SYNONYMS.get(name, name)
    if axis in TERMS and "layout" in known:
        return OptionError(
            f"unknown option {written} of hocket {verb}",
            hint=f"hocket {verb} {shlex.join(_with_layout(arguments))}",
        )
    if name in EXPLAINED:
        return OptionError(f"unknown option {written} of hocket {verb}", hint=EXPLAINED[name])
    near = nearest_option(name, {n for n, flag in known.items() if not flag.positional})
    if near is None:
        return OptionError(
            f"unknown option {written} of hocket {verb}", hint=f"hocket {verb} --help all"
        )
    mended = [*arguments]
    mended[index] = arguments[index].replace(written, spelled(near), 1)
    message = f"unknown option {written} of hocket {verb}; the nearest is {spelled(near)}"
    try:
        current(verb, mended, known)
    except OptionError as error:  # of another unknown flag
        return OptionError(f"{message}; {error.message}", hint=error.hint)
    return OptionError(message, hint=f"hocket {verb} {shlex.join(mended)}")


def _with_layout(arguments: Sequence[str]) -> list[str]:
    """The command with the degrees that flags of other tools set as one `--layout`."""
    kept: list[str] = []
    degrees: list[str] = []
    words = list(arguments)
    while words:
        written, _, value = (word := words.pop(0)).partition("=")
        axis = SYNONYMS.get(name := written[2:].replace("-", "_"), name)
        if not written.startswith("--") or axis not in TERMS:
            kept.append(word)
            continue
        if not value and words and words[0].isdecimal():
            value = words.pop(0)
        degrees.append(f"{axis}{value if value.isdecimal() else 2}")
    return [*_without(kept, "--layout"), "--layout", ".".join(degrees)]


def pasted(arguments: Sequence[str], hint: str) -> str:
    """A hint with its flags as a whole command to paste; what follows them is a line of its own."""
    flags, rest = hint, ""
    clause = re.search(r"(, or |[,;] | or (?=--)| to | is | \()", hint)
    if mended(arguments, hint) is None and clause is not None:
        flags, rest = (
            hint[: clause.start()],
            hint[clause.start() :].lstrip(" ,;").removeprefix("is "),
        )
    command = mended(arguments, flags)
    if command is None:
        return hint
    return f"{command}\n        {rest}" if rest else command


_OF_SEVERAL = ("--data", "--eval-data")
"""Flags with several values."""


def mended(arguments: Sequence[str], hint: str) -> str | None:
    """The whole command with the flags of a hint in place of those typed, or without a flag that it
    leaves out; None where the hint has other words than flags and their values."""
    if superfluous := re.fullmatch(r"leave (--[a-z-]+) out", hint):
        command = _without(arguments, superfluous[1])
        return None if command == list(arguments) else f"hocket {shlex.join(command)}"
    try:
        parts = shlex.split(hint)
    except ValueError:
        return None
    flags: list[list[str]] = []
    for part in parts:
        if part.startswith("--"):
            flags.append([part])
        elif (
            flags
            and (len(flags[-1]) == 1 or flags[-1][0] in _OF_SEVERAL)
            and not flags[-1][0].endswith((",", ";"))
        ):
            flags[-1].append(part)
        else:
            return None
    if any(value.endswith((",", ";")) for flag in flags for value in flag):
        return None
    command = list(arguments)
    for flag in flags:
        for name in (flag[0], *_contradicting(flag)):
            command = _without(command, name)
        in_text = re.compile(rf"([:,]){flag[0][2:].replace('-', '_')}=[^,\s]+(,|$)")
        command = [in_text.sub(lambda part: part[1] if part[2] else "", one) for one in command]
        command += flag
    return f"hocket {shlex.join(command)}"


def _contradicting(flag: list[str]) -> Iterator[str]:
    """The flags that repeat or contradict a hint's: the same number by another name; of a layout
    its degrees and options."""
    if flag[0] == "--microbatches":
        yield "--gradient-accumulation-steps"
    if flag[0] == "--layout" and len(flag) == 2:
        yield from (spelled(axis) for axis in TERMS)
        for option in flag[1].partition(":")[2].split(","):
            name = option.partition("=")[0]
            yield spelled(name)
            if name == "microbatches":
                yield "--gradient-accumulation-steps"


def _without(arguments: Sequence[str], flag: str) -> list[str]:
    """The arguments without a flag and the values after it."""
    found: list[str] = []
    dropped = False
    for argument in arguments:
        if re.match(r"--?[A-Za-z]", argument):  # -1 is a value
            name = argument.partition("=")[0][2:].replace("-", "_")
            new = renamed.OPTIONS.get(name, name)
            dropped = flag in map(spelled, (name, *implied(new)))
        if not dropped:
            found.append(argument)
    return found


def spelled(name: str) -> str:
    """An option as a flag."""
    return "--" + name.replace("_", "-")
