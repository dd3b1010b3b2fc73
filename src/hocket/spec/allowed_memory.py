"""Allowed: bytes that a job may hold, as the parent and the process that predicts know it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

MOST_RANKS = 16
"""Ranks up to which layouts that fit are looked for."""


@dataclasses.dataclass(frozen=True)
class Allowed:
    """Bytes that a job may hold: each rank, or all of them together; `gpu`: a rank's GPU."""

    bytes: int
    together: bool = False
    gpu: bool = False

    def need(self, ranks: Sequence[int]) -> int:
        """What counts of the ranks' peaks."""
        return sum(ranks) if self.together else max(ranks)
