"""`hocket config` and `--config`: options by flag name in a file, for every verb.

A file is TOML or YAML by its suffix. Tables only group options: `[training]` may hold `lr`.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro

from hocket.cli import spelling
from hocket.cli.flags import explicit, parse_flags
from hocket.spec import renamed
from hocket.spec.errors import OptionError, unknown
from hocket.spec.options_file import toml
from hocket.spec.run import TrainOptions, Workload
from hocket.spec.synonyms import EXPLAINED, nearest_option

OWN = ("train",)
"""Verbs that read the file themselves: a layout in it and flags are merged field by field."""

_PLAIN = re.compile(r"[\w-]+")

_NUMBER = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+")

NOT_OPTIONS = frozenset({"config", "json", "dry_run", "push_to_hub", "resume"})
"""Flags about one call, which a file of options does not hold."""

FLAGS_OF_OTHERS = True
"""The arguments are those of another verb, and are read as that verb reads them."""

Words = Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="show VERB ...")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConfigFlags:
    """Print every option of a command, from flags, file and defaults together, as TOML.

    The output is a file for `--config`: hocket config show train MODEL --lr 1e-4 > run.toml

    Attributes:
        words: `show`, a verb and its arguments.
    """

    words: Words = ()


def main(arguments: Sequence[str]) -> int:
    """Print. Returns 0."""
    from hocket.cli.main import VERBS

    if arguments and arguments[0] in VERBS:
        raise OptionError(
            f"hocket config has no command {arguments[0]!r}",
            hint=shlex.join(["hocket", "config", "show", *arguments]),
        )
    if not arguments or arguments[0] != "show":
        parse_flags(ConfigFlags, "config", arguments, ConfigFlags())
    match tuple(arguments):
        case ("show", verb, *rest) if verb in VERBS and verb not in ("config", "completion"):
            print(toml(resolved(verb, rest)), end="")
            return 0
        case ("show", verb, *_):
            message, hint = unknown("verb", verb, VERBS)
            raise OptionError(message, hint=hint)
    raise OptionError("config shows the options of a command", hint="hocket config show train")


def resolved(verb: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Every option of a command by name: as given, else its default. None: decided when it runs."""
    from hocket.jobs.request import AUTO, LAYOUT_FIELDS, layout_of

    module = importlib.import_module(f"hocket.cli.{verb}")
    known = spelling.flags_of(module)
    rest = _expanded_settings(verb, spelling.current(verb, list(arguments), known), known)
    kind = spelling.flags_class(module)
    if verb == "train":
        flags, given = module.read_train_flags(rest)
        found = {**_flat(flags), **given}
        if found["layout"] != AUTO:  # one text, however it was given
            parts = {n: found.pop(n) for n in LAYOUT_FIELDS if n in found}
            given = {n: v for n, v in parts.items() if v is not None and v is not False}
            found["layout"] = str(layout_of({**given, "layout": found["layout"]}))
    else:
        found = _flat(parse_flags(kind, verb, rest, kind()))
    return {name: value for name, value in found.items() if name not in NOT_OPTIONS}


def _flat(group: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for field in dataclasses.fields(group):
        value = getattr(group, field.name)
        found |= _flat(value) if dataclasses.is_dataclass(value) else {field.name: value}
    return found


def config_path(arguments: Sequence[str]) -> str | None:
    """The value of `--config` among the arguments, found before they are parsed."""
    for at, argument in enumerate(arguments):
        if argument == "--config" and at + 1 < len(arguments):
            return arguments[at + 1]
        if argument.startswith("--config="):
            return argument.removeprefix("--config=")
    return None


def _expanded_settings(
    verb: str, arguments: Sequence[str], known: Mapping[str, spelling.Flag]
) -> list[str]:
    """The arguments with each `--set NAME=VALUE` as its flag, and with the options of `--config`
    before them, of which flags override those of the same name.

    Raises:
        OptionError: a file that cannot be read, or a name that the verb does not have.
    """
    rest = _set(verb, arguments, known)
    path = config_path(rest)
    if path is None or verb in OWN:
        return rest
    at = next(i for i, a in enumerate(rest) if a.startswith("--config"))
    rest = rest[:at] + rest[at + 1 + (rest[at] == "--config") :]
    names = {flag.name for flag in known.values()}
    options = renamed.present_options(_options(path, verb), names)
    written = explicit(rest)
    positional = bool(rest) and not rest[0].startswith("-")
    found: list[str] = []
    for name, value in options.items():
        flag = known.get(name)
        if flag is None:
            near = nearest_option(name, names)
            raise OptionError(
                f"{path}: unknown option {name!r} of hocket {verb}",
                hint=_renamed(path, name, near) if near else _listed(verb),
            )
        if name in written or (flag.positional and positional):
            continue
        values = [str(v) for v in value] if isinstance(value, list) else [_text(value)]
        if flag.positional:
            found = [*values, *found]
        elif flag.switch:
            found += [spelling.spelled(name)] * bool(value)
        elif flag.many:
            found += [spelling.spelled(name), *values]
        else:
            joined = "-".join(values)
            found.append(f"{spelling.spelled(name)}={joined}")
    return [*found, *rest] if not positional else [rest[0], *found, *rest[1:]]


def _listed(verb: str) -> str:
    return f"hocket {verb} --help all lists every option"


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _set(verb: str, arguments: Sequence[str], known: Mapping[str, spelling.Flag]) -> list[str]:
    found: list[str] = []
    waiting = False
    for argument in arguments:
        if argument == "--set" or argument.startswith("--set="):
            waiting = argument == "--set"
            if waiting:
                continue
            argument = argument.removeprefix("--set=")
        elif not waiting:
            found.append(argument)
            continue
        waiting = False
        name, equals, value = argument.partition("=")
        name = name.rpartition(".")[2].replace("-", "_")
        if not equals:
            raise OptionError(f"--set {argument} has no value", hint=f"--set {argument}=VALUE")
        flag = spelling.spelled(name)
        try:
            (flag,) = spelling.current(verb, [flag], known) or [flag]
        except OptionError as error:
            near = nearest_option(name, known)
            group = argument.partition("=")[0].rpartition(".")[0]
            mended = f"{group}.{near}={value}" if group else f"{near}={value}"
            words = [
                word.replace(argument, mended) if word.endswith(argument) else word
                for word in arguments
            ]
            hint = _listed(verb) if near is None else shlex.join(["hocket", verb, *words])
            raise OptionError(
                f"--set {argument}: hocket {verb} has no option {name!r}",
                hint=error.hint if name in EXPLAINED else hint,
            ) from error
        option = known[flag[2:].replace("-", "_")]
        if not option.switch:
            found.append(f"{flag}={value}")
        elif value.lower() in ("true", "1", "yes"):
            found.append(flag)
    return found


def read_config(path: str) -> dict[str, Any]:
    """The options of a file for training, by name, each of the type it must have.

    Raises:
        OptionError: a file that cannot be read, an unknown key (the nearest one is suggested), or
            a value of another type.
    """
    from hocket.jobs.request import typed_options

    try:
        return typed_options(_options(path))
    except OptionError as error:
        where = "" if path in error.message else f"{path}: "
        raise OptionError(f"{where}{error.message}", hint=_mended(path, error)) from None


def _mended(path: str, error: OptionError) -> str | None:
    """The command that repairs a file: another name, or the default in place of a value that cannot
    be; else the hint that there is."""
    if unknown := re.match(r"unknown option '(\w+)'", error.message):
        near = re.fullmatch(r"did you mean '(\w+)'\?", error.hint or "")
        return _renamed(path, unknown[1], near[1]) if near else error.hint
    named = re.match(r"(\w+) is .*", error.message)
    if error.hint is not None or named is None:
        return error.hint
    default = getattr(TrainOptions(), named[1], getattr(Workload(), named[1], None))
    line = rf"^( *{_written(path, named[1])} *[=:]).*"
    edit = rf"s/{line}/\1 {json.dumps(default)}/" if default is not None else rf"/{line}/d"
    return f"sed -Ei {shlex.quote(edit)} {shlex.quote(path)}\n        for the default"


def _renamed(path: str, name: str, near: str) -> str:
    """The command that gives an option of a file its right name. A stranger's file may have any
    text as a name, and no part of it becomes a command."""
    if not _PLAIN.fullmatch(name):
        return f"did you mean {near!r}?"
    edit = rf"s/\b{_written(path, name)}\b/{near}/"
    return f"sed -i {shlex.quote(edit)} {shlex.quote(path)}"


def _written(path: str, name: str) -> str:
    """A name as a file has it, with underscores or hyphens."""
    dashed = name.replace("_", "-")
    return dashed if dashed in Path(path).read_text(encoding="utf-8") else name


def _options(path: str, verb: str = "train") -> dict[str, Any]:
    """The options of a file, those of its tables among the others."""
    import tomllib

    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8")
        data = _yaml(text, path, verb) if file.suffix in (".yaml", ".yml") else tomllib.loads(text)
    except FileNotFoundError:
        written = shlex.quote(str(file.with_suffix(".toml")))
        then = "" if file.suffix == ".toml" else f"\n        then --config {written}"
        raise OptionError(
            f"there is no file {path}", hint=f"hocket config show {verb} > {written}{then}"
        ) from None
    except IsADirectoryError:
        raise OptionError(
            f"{path} is a folder; options belong in a TOML or YAML file",
            hint=f"--config {file / 'run.toml'}",
        ) from None
    except (OSError, ValueError, RecursionError) as error:  # of long numbers, of deep arrays
        suffix = "; YAML has the suffix .yaml" if isinstance(error, tomllib.TOMLDecodeError) else ""
        raise OptionError(
            f"{path} cannot be read as TOML: {error}{suffix}",
            hint=f"hocket config show {verb}\n        prints such a file",
        ) from None
    found: dict[str, Any] = {}
    for name, value in data.items():
        for key, item in value.items() if isinstance(value, dict) else ((name, value),):
            if not isinstance(key, str) or isinstance(item, dict):
                raise OptionError(
                    f"{path}: {name}.{key} is a table in a table; tables only group options",
                    hint=f"sed -i 's/^ *\\[{name}[.].*/[{name}]/' {shlex.quote(path)}"
                    if _PLAIN.fullmatch(name)
                    else f"hocket config show {verb}\n        prints such a file",
                )
            if key.replace("-", "_") in found:
                lines = [n for n, one in enumerate(text.splitlines(), 1) if key in one]
                raise OptionError(
                    f"{path} gives {key} twice",
                    hint=f"sed -i {lines[-1]}d {shlex.quote(path)}\n        to keep the first",
                )
            found[key.replace("-", "_")] = item
    return found


def _yaml(text: str, path: str, verb: str) -> dict[str, Any]:
    import yaml

    try:
        data = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = "" if mark is None else f" (at line {mark.line + 1}, column {mark.column + 1})"
        raise OptionError(
            f"cannot be read as YAML: {getattr(error, 'problem', error)}{where}",
            hint=f"hocket config show {verb}\n        prints such a file",
        ) from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise OptionError(
            f"{path} is a {type(data).__name__}; options are names with values",
            hint=f"hocket config show {verb}\n        prints such a file",
        )
    return {name: _number(value) for name, value in data.items()}


def _number(value: Any) -> Any:
    """YAML 1.1 reads 1e-4 as a text: a number needs its point there."""
    if isinstance(value, dict):
        return {name: _number(one) for name, one in value.items()}
    return float(value) if isinstance(value, str) and _NUMBER.fullmatch(value) else value
