"""Rotation: of many like cases a part, another one every day, so that all are run within days.

`HOCKET_TESTS=all` runs all of them.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Sequence
from typing import TypeVar

Case = TypeVar("Case")


def part(cases: Sequence[Case], share: int) -> list[Case]:
    """Every `share`-th case, beginning with another one every day."""
    if os.environ.get("HOCKET_TESTS") == "all":
        return list(cases)
    return list(cases[datetime.date.today().toordinal() % share :: share])
