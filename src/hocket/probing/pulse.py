"""The rank's entry of a pulse: how fast the machine is now, in half a second.

As many ranks as a run has, or as there are cores, do the same small work as the probe did beside
each of its parts, all at once: what neighbours of a virtual machine, heat or a battery have made of
its speed since then.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from hocket.probing.beat import Beat
from hocket.probing.sizes import sizes
from hocket.runtime.heap import keep_freed_memory
from hocket.spec.measured import to_rows

if TYPE_CHECKING:
    from hocket.launch import RankContext


def main(context: RankContext, payload: dict[str, Any]) -> None:
    """Emit this rank's pulse.

    Args:
        context: of one CPU rank; no rank waits for another.
        payload: `seconds` that it may take; `quick`, the form of the probe it is held against.
    """
    keep_freed_memory()
    beat = Beat(torch.device("cpu"), sizes("cpu", payload["quick"]).streams[-1])
    end = time.perf_counter() + payload["seconds"]
    beat.take()
    while time.perf_counter() < end:
        beat.take()
    found = beat.told("")
    context.emit({"event": "pulse", "rows": to_rows("pulses", found)})
