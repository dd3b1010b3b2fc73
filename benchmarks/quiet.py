"""Quiet: how much of the processors others use, so that a disturbed turn is known as one."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path

DISTURBED = 0.25
"""Processors that others may use during a turn before it counts as disturbed."""


class Watch:
    """Counts what others use between two moments (Linux; elsewhere always 0)."""

    def __init__(self, pids: Iterable[int]) -> None:
        self.pids = list(pids)
        self.start = (time.perf_counter(), busy_seconds(), self._own())

    def foreign(self) -> float:
        """Processors used by others, on average since the start."""
        began, busy, own = self.start
        elapsed = time.perf_counter() - began
        if elapsed <= 0:
            return 0.0
        return max(0.0, (busy_seconds() - busy) - (self._own() - own)) / elapsed

    def _own(self) -> float:
        return sum(process_seconds(pid) for pid in self.pids)


def busy_seconds() -> float:
    """Seconds that all processors together were not idle, since the machine started."""
    try:
        fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    except OSError:
        return 0.0
    # user nice system idle iowait irq softirq steal
    idle = sum(int(f) for f in fields[3:5])
    return (sum(int(f) for f in fields[:8]) - idle) / os.sysconf("SC_CLK_TCK")


def process_seconds(pid: int) -> float:
    """Processor seconds of one process, all its threads; 0 if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def wait_until_quiet(seconds: float) -> float:
    """Wait until others leave the processors alone, `seconds` at most; returns the seconds left."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        watch = Watch([])
        time.sleep(0.3)
        if watch.foreign() < DISTURBED:
            break
    return max(0.0, end - time.monotonic())
