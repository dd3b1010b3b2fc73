"""Stop bound: seconds from a signal to the end of a saved run, predicted from the state's size and
the measured rate of the disk."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hocket.spec.errors import OptionError
from hocket.spec.units import format_bytes, format_seconds
from hocket.training import timeline

if TYPE_CHECKING:
    from hocket.launch import RankContext

PROBE = 16_000_000
"""Bytes that are written to measure the disk."""


def disk_rate(folder: Path) -> float:
    """Bytes per second of one file written and flushed in `folder`."""
    path = folder / f".rate.{os.getpid()}"
    began = time.perf_counter()
    try:
        with path.open("wb") as file:
            file.write(bytes(PROBE))
            file.flush()
            os.fsync(file.fileno())
    finally:
        path.unlink(missing_ok=True)
    return PROBE / max(time.perf_counter() - began, 1e-6)


def bound(num_bytes: int, rate: float, step_seconds: float, steps: int, saves: int = 1) -> float:
    """Seconds: the steps until all ranks agree to stop, a write and a read back of `saves` states
    (the one that is being written may be another), and a second.

    Ranks agree at boundaries a quarter of a second apart (`training.pauses`).
    """
    return max(0.5, steps * step_seconds) + 2 * saves * num_bytes / rate + 1.0


def stop_bound_of(
    context: RankContext,
    folder: Path,
    trained: Any,
    optimizer: Any,
    *,
    step_seconds: float,
    grace: float | None,
    saves: int = 1,
) -> str | None:
    """What rank 0 prints of it, None on the others. Every rank calls it.

    Args:
        folder: where checkpoints are written. trained, optimizer: what they hold.
        step_seconds: of one step. grace: seconds that the system allows, None: not known.
        saves: states that may have to be written: 2 where saves are written in the background.

    Raises:
        OptionError: it takes longer than the system allows.
    """
    held = dict(trained.named_parameters()).values()
    states = optimizer.state_tensors().values()
    tensors = [*held, *(tensor for each in states for tensor in each.values())]
    own = sum(t.numel() * t.element_size() for t in tensors)
    rows = timeline.gather_values(context, "state bytes", own)
    if rows is None:
        return None
    try:
        rate = disk_rate(folder)
    except OSError:  # a save will report it
        return None
    seconds = bound(sum(rows), rate, step_seconds, 6 if context.device_kind == "cuda" else 2, saves)
    size = f"{format_bytes(sum(rows))} at {format_bytes(round(rate))}/s"
    if grace is not None and seconds > grace:
        raise OptionError(
            f"a stop by SIGTERM takes up to {format_seconds(seconds)} ({size}); this system kills "
            f"after {grace:g} s",
            hint=f"--grace-seconds {int(seconds) + 1}, where the system can be set so, or a faster "
            "disk for --run",
        )
    return f"SIGTERM or SIGUSR1 saves and stops within {format_seconds(seconds)} ({size})"
