"""Next commands: at most two lines after a verb's result, each a command to paste."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import TextIO

from hocket.cli.progress import silent

MOST = 2
"""Commands after a verb."""


def show(*commands: Sequence[str], to: TextIO | None = None) -> None:
    """Print each command as a line `next: hocket ...`, unless --quiet."""
    if not silent():
        print("\n" + "\n".join(next_lines(*commands)), file=to or sys.stdout)


def next_lines(*commands: Sequence[str]) -> list[str]:
    """The lines of at most two commands, each given without `hocket`."""
    assert len(commands) <= MOST, commands
    return [f"next: {shlex.join([program(), *words])}" for words in commands]


def option_words(options: Mapping[str, object]) -> list[str]:
    """Options of a command as they are typed; a switch by its name alone."""
    found: list[str] = []
    for name, value in options.items():
        if value is None or value is False:
            continue
        found.append(f"--{name.replace('_', '-')}")
        found += [] if value is True else [str(value)]
    return found


def program() -> str:
    """What to type for `hocket` here: its path where the shell would not find this very one."""
    import shutil
    from pathlib import Path

    own = Path(sys.executable).parent / "hocket"
    found = shutil.which("hocket")
    if not own.exists() or (found is not None and Path(found).samefile(own)):
        return "hocket"
    return str(own.relative_to(Path.cwd()) if own.is_relative_to(Path.cwd()) else own)
