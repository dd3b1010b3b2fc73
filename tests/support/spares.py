"""Spare fork servers, told from the ranks next to them."""

from __future__ import annotations

import contextlib
from pathlib import Path

from hocket.launch import spare


def is_spare(pid: int) -> bool:
    """Whether a process is a spare that waits."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip() == spare.NAME
    return False
