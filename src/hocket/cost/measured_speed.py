"""The speed of a measured machine: the parts of a probe brought to one.

A machine that others share, or that a battery or heat slows, is not as fast at every moment: a
virtual one moved by up to a third within seconds. The probe measures the same small work next to
each of its parts (`Pulse`), and each part is brought to the mean speed of the whole probe.

A pulse just before a run was tried, and made forecasts no better: of what 0.6 s of such work showed
on a virtual machine, half was left in the 2 to 5 s that began a second later, a fifth after 15 s.
"""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any, TypeVar

from hocket.spec.measured import MachineMeasurements

WORK = {
    "products": ("product",),
    "streams": ("stream",),
    "dispatch": ("dispatch",),
    # Attention and the loss multiply and move memory.
    "kernels": ("product", "stream"),
    "updates": ("stream",),
}
"""Part of a probe to the pulses that tell its speed."""

Row = TypeVar("Row")


def at_speed(measured: MachineMeasurements) -> MachineMeasurements:
    """What was measured, all of it at the probe's mean speed.

    Without pulses (an older file, a GPU) nothing is changed.
    """
    changed: dict[str, Any] = {}
    for part, operations in WORK.items():
        ratio = 1.0
        for operation in operations:
            mean, near = _mean(measured, operation), _of(measured, part, operation)
            if mean is not None and near is not None:
                ratio *= (mean / near) ** (1 / len(operations))
        changed[part] = tuple(_slower(row, ratio) for row in getattr(measured, part))
    return dataclasses.replace(measured, **changed)


_SECONDS = ("seconds", "forward", "recorded", "backward")


def _slower(row: Row, ratio: float) -> Row:
    names = {field.name for field in dataclasses.fields(row)} & set(_SECONDS)  # type: ignore[arg-type]
    return dataclasses.replace(row, **{n: getattr(row, n) * ratio for n in names})  # type: ignore[type-var]


def _of(measured: MachineMeasurements, part: str, operation: str) -> float | None:
    found = [p.seconds for p in measured.pulses if (p.part, p.operation) == (part, operation)]
    return statistics.geometric_mean(found) if found else None


def _mean(measured: MachineMeasurements, operation: str) -> float | None:
    """Over all parts of the probe."""
    found = [p.seconds for p in measured.pulses if p.operation == operation]
    return statistics.geometric_mean(found) if found else None
