"""BackgroundLoad: the processor time that programs which are not ours took during a run (Linux).

What all processors did, less what this process and its children did, those that have ended among
them. A run with background load of a quarter of a core is marked in the ledger: its forecast
assumed an idle machine.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


class BackgroundLoad:
    """Counts from its making on."""

    def __init__(self) -> None:
        from hocket.probing.host import clock

        self._clock, self._own = clock(), own_seconds()

    def cores(self) -> float:
        """Cores' worth of others' time since then, on average."""
        from hocket.probing.host import clock, load_between

        found = load_between(self._clock, clock(), own_seconds() - self._own)
        return float(f"{found:.3g}")


def own_seconds() -> float:
    """Processor seconds of this process and of all that descend from it; 0 without /proc."""
    return sum(_seconds(pid) for pid in _family(os.getpid()))


def _family(pid: int) -> Iterator[int]:
    yield pid
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = file.read_text().split()
        except OSError:  # it has just ended
            continue
        for child in children:
            yield from _family(int(child))


def _seconds(pid: int) -> float:
    """Its own and those of its children that it has buried."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
