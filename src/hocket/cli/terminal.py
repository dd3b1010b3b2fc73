"""What stdout can show."""

from __future__ import annotations

import os
import shutil
import sys

WIDTH = 100
"""Columns where there is no terminal to ask."""


def terminal() -> tuple[bool, int]:
    """(whether colours help, columns) of stdout."""
    if not sys.stdout.isatty():
        return False, WIDTH
    color = "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
    return color, shutil.get_terminal_size((WIDTH, 24)).columns


def draws() -> bool:
    """Whether stdout's encoding can show the letters that pictures are made of."""
    try:
        "░█·▁".encode(_encoding())
    except UnicodeEncodeError:
        return False
    return True


def printable(words: str) -> str:
    """The words as stdout can show them: what its encoding lacks is written out."""
    encoding = _encoding()
    return words.encode(encoding, "backslashreplace").decode(encoding)


def _encoding() -> str:
    return sys.stdout.encoding or "ascii"
