"""The speed of a measured machine at one moment: what was measured, as it would have been then.

A machine that others share, or that a battery or heat slows, is not as fast at every moment: a
virtual one moved by up to a third within seconds. The probe measures the same small work beside
each of its parts, and again just before a run (`Pulse`):

    between parts    each part is brought to the mean speed of the whole probe
    before a run     and all of it to the speed that the machine has now

A pulse tells of its moment, and a run lasts longer: of a difference no larger than the pulses of
the probe differ among themselves, little will last; of a large one nearly all will. The share
that is believed is d^2 / (d^2 + s^2), for a difference d and a spread s in logarithms: what is left
of an observation when its noise is known (shrinkage, James and Stein 1961). Of that half is taken:
on a virtual machine watched for 110 s, half of what 0.6 s of such work told was still there in the
2 to 5 s that began a second later, a fifth after 15 s.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from typing import Any, TypeVar

from hocket.spec.measured import PULSES, Measured, Pulse

WORK = {
    "products": ("product",),
    "streams": ("stream",),
    "dispatch": ("dispatch",),
    # Attention and the loss multiply and move memory.
    "kernels": ("product", "stream"),
    "updates": ("stream",),
}
"""Part of a probe to the pulses that tell its speed."""

TALK = ("stream", "dispatch")
"""Pulses that tell the speed of collectives: copies, and the calls around them."""

QUARTILES = 1.349
"""Between the quartiles of a normal distribution, in standard deviations."""

LEAST = 0.05
"""Spread in logarithms that a pulse is never surer than."""

LASTS = 0.5
"""Of a difference that is no chance, what lasts into the run."""

Row = TypeVar("Row")


def factors(measured: Measured, now: Sequence[Pulse]) -> dict[str, float]:
    """How many times longer the machine takes now than on average while it was probed.

    Args:
        measured: with pulses. now: of one or several ranks that computed at once.

    Returns:
        Operation of a pulse to the whole difference, nothing left out for chance; empty where
        either took no pulse.
    """
    found = {}
    for operation in PULSES:
        then = _then(measured, operation)
        seconds = [p.seconds for p in now if p.operation == operation]
        if then is None or not seconds:
            continue
        together = _shared(measured, operation, max(p.ranks for p in now))
        if together is not None:
            found[operation] = statistics.geometric_mean(seconds) / (then * together)
    return found


def believed(measured: Measured, differences: dict[str, float]) -> dict[str, float]:
    """What is expected to last of `factors` while a run lasts."""
    found = {}
    for operation, factor in differences.items():
        far = math.log(factor)
        near = _spread(measured, operation)
        found[operation] = factor ** (LASTS * far**2 / (far**2 + near**2)) if far else 1.0
    return found


def at_speed(measured: Measured, times: dict[str, float] | None = None) -> Measured:
    """What was measured, at the probe's mean speed or, with `times`, so many times slower.

    Without pulses (an older file, a GPU) nothing is changed.
    """
    slower = times or {}
    changed: dict[str, Any] = {}
    for part, operations in WORK.items():
        ratio = 1.0
        for operation in operations:
            then, beside = _then(measured, operation), _of(measured, part, operation)
            if then is not None and beside is not None:
                ratio *= (slower.get(operation, 1.0) * then / beside) ** (1 / len(operations))
        changed[part] = tuple(_slower(row, ratio) for row in getattr(measured, part))
    talk = math.prod(slower.get(operation, 1.0) ** (1 / len(TALK)) for operation in TALK)
    changed["curves"] = tuple(
        dataclasses.replace(
            curve,
            seconds=tuple(seconds * talk for seconds in curve.seconds),
            busy=tuple(seconds * talk for seconds in curve.busy),
        )
        for curve in measured.curves
    )
    return dataclasses.replace(measured, **changed)


_SECONDS = ("seconds", "forward", "recorded", "backward")


def _slower(row: Row, ratio: float) -> Row:
    names = {field.name for field in dataclasses.fields(row)} & set(_SECONDS)  # type: ignore[arg-type]
    return dataclasses.replace(row, **{n: getattr(row, n) * ratio for n in names})  # type: ignore[type-var]


def _of(measured: Measured, part: str, operation: str) -> float | None:
    found = [p.seconds for p in measured.pulses if (p.part, p.operation) == (part, operation)]
    return statistics.geometric_mean(found) if found else None


def _then(measured: Measured, operation: str) -> float | None:
    """One rank's seconds, over all parts of the probe."""
    found = [p.seconds for p in measured.pulses if p.operation == operation and p.ranks == 1]
    return statistics.geometric_mean(found) if found else None


def _shared(measured: Measured, operation: str, ranks: int) -> float | None:
    """How many times longer the pulse of so many ranks at once takes than that of one."""
    if ranks == 1:
        return 1.0
    known = {
        p.ranks: p.seconds
        for p in measured.pulses
        if (p.operation, p.part) == (operation, "sharing")
    }
    if 1 not in known or ranks not in known:
        return None
    return known[ranks] / known[1]


def _spread(measured: Measured, operation: str) -> float:
    """How far a moment's pulse lies from the mean: among parts and within them, in logarithms."""
    known = [p for p in measured.pulses if p.operation == operation and p.ranks == 1]
    inner = [p.spread / QUARTILES for p in known]
    outer = [math.log(p.seconds) for p in known]
    found = [statistics.median(inner), statistics.pstdev(outer)] if known else []
    return max([LEAST, *found])
