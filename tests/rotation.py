"""Rotation: of many similar cases a part, chosen by the commit and the module of the tests.

One commit always runs the same part, and successive commits run different ones, in each module its
own. The commit's number is printed at the end of a run; `HOCKET_TESTS=N` replays that of N, and
`HOCKET_TESTS=all` runs every case.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import zlib
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
    """Every `share`-th case, from a first one that `seed` and the calling module choose."""
    if os.environ.get("HOCKET_TESTS") == "all":
        return list(cases)
    caller = sys._getframe(1).f_globals["__name__"].rpartition(".")[2]
    return list(cases[zlib.crc32(f"{seed()} {caller}".encode()) % share :: share])
