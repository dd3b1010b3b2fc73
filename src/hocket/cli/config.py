"""The configuration file: TOML whose keys are the names of the flags."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hocket.spec.errors import OptionError


def find(arguments: Sequence[str]) -> str | None:
    """The value of `--config` among the arguments, found before they are parsed."""
    for at, argument in enumerate(arguments):
        if argument == "--config" and at + 1 < len(arguments):
            return arguments[at + 1]
        if argument.startswith("--config="):
            return argument.removeprefix("--config=")
    return None


def read(path: str) -> dict[str, Any]:
    """The options of a file, by name, each of the type it must have.

    Raises:
        OptionError: a file that cannot be read, an unknown key (the nearest one is suggested), or
            a value of another type.
    """
    import tomllib

    from hocket.jobs.request import typed

    try:
        data = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise OptionError(f"there is no file {path}") from None
    except IsADirectoryError:
        raise OptionError(f"{path} is a folder; options belong in a TOML file") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise OptionError(f"{path} cannot be read: {error}") from None
    tables = [key for key, value in data.items() if isinstance(value, dict)]
    if tables:
        raise OptionError(
            f"{path} contains the table [{tables[0]}]; options belong at the top "
            f"level, by their flags' names"
        )
    try:
        return typed({key.replace("-", "_"): value for key, value in data.items()})
    except OptionError as error:
        raise OptionError(f"{path}: {error.message}", hint=error.hint) from None
