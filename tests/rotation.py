"""Rotation: of many similar cases a part, chosen by the hash of the commit.

One commit always runs the same part, and successive commits run different ones. The part is printed
at the end of a run; `HOCKET_TESTS=N` replays part N, `HOCKET_TESTS=all` runs every case.
"""

from __future__ import annotations

import functools
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

Case = TypeVar("Case")


@functools.cache
def seed() -> int:
    """What chooses the part: HOCKET_TESTS if it is a number, else the hash of the commit."""
    given = os.environ.get("HOCKET_TESTS", "")
    if given.isdigit():
        return int(given)
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return int(head.stdout.strip()[:8] or "0", 16)  # no repository: always the same part


def part(cases: Sequence[Case], share: int) -> list[Case]:
    """Every `share`-th case, from a first one that `seed` chooses."""
    if os.environ.get("HOCKET_TESTS") == "all":
        return list(cases)
    return list(cases[seed() % share :: share])
