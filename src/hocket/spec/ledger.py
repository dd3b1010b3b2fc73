"""Ledger entry: what one run was predicted to take and what it took, as one line of JSON.

A figure that was not predicted, or not measured, is None. The bubble is that of `Timeline`.
"""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

from hocket.spec.layout import DEGREES, Layout

FIGURES = ("step_seconds", "memory", "bubble")
"""What predictions are judged by: seconds, bytes of the fullest rank, share of the pipeline."""

DISTURBED = 0.25
"""Cores' worth of other programs from which a run counts as disturbed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figures:
    """Of one run, predicted or measured: seconds of a step, bytes of the fullest rank, bubble.

    Seconds and bytes of a line that is read are above zero.
    """

    step_seconds: float | None = None
    memory: float | None = None
    bubble: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """One run.

    Attributes:
        date: when it ended, ISO 8601 in UTC. version: of hocket.
        run: its folder. command: `train` or `demo`.
        model: as it was named. layout: text form.
        machine: its processors and devices in words. fingerprint: of those words, so that equal
            machines stand together.
        steps: taken. ranks: processes. seq_len, global_batch, dtype: of the workload.
        predicted: before it began; None where nothing was. measured: afterwards.
        others: cores' worth of time that other programs took meanwhile.
    """

    date: str
    version: str
    run: str
    model: str
    layout: str
    machine: str
    fingerprint: str
    measured: Figures
    predicted: Figures | None = None
    command: str = "train"
    steps: int = 0
    ranks: int = 1
    seq_len: int = 0
    global_batch: int = 0
    dtype: str = ""
    others: float = 0.0

    @property
    def disturbed(self) -> bool:
        """Whether others took so much of the machine that no forecast could hold."""
        return self.others > DISTURBED

    @property
    def axes(self) -> tuple[str, ...]:
        """Axes that the layout splits over; `none` alone for one rank."""
        layout = Layout.parse(self.layout)
        return tuple(axis for axis in DEGREES if getattr(layout, axis) > 1) or ("none",)

    def error(self, figure: str) -> float | None:
        """Predicted over measured, less one; for the bubble the difference itself. None: unknown.

        A bubble of 0.2 that was predicted as 0.23 is off by 0.03, whatever its size.
        """
        then = None if self.predicted is None else getattr(self.predicted, figure)
        now = getattr(self.measured, figure)
        if then is None or now is None:
            return None
        if figure == "bubble":
            return float(then - now)
        return float(then / now - 1) if now > 0 else None

    def to_json(self) -> str:
        """One line."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Entry:
        """The inverse of `to_json`; what a later version has added is passed over.

        Raises:
            ValueError, TypeError, KeyError: the line is no entry.
            LayoutError: its layout cannot be read.
        """
        data = json.loads(text)
        names = {field.name for field in dataclasses.fields(cls)}
        known = {key: value for key, value in data.items() if key in names}
        known["measured"] = _figures(data["measured"])
        if known.get("predicted") is not None:
            known["predicted"] = _figures(data["predicted"])
        for field in dataclasses.fields(cls):
            value = known.get(field.name, field.default)
            wanted = {"str": str, "int": int}.get(str(field.type))
            if wanted is not None and not isinstance(value, wanted):
                raise TypeError(f"{field.name} is {value!r}")
        others = known.get("others", 0.0)
        if isinstance(others, bool) or not isinstance(others, int | float):
            raise TypeError(f"others is {others!r}")
        entry = cls(**known)
        Layout.parse(entry.layout)
        return entry


def _figures(data: Any) -> Figures:
    found: dict[str, float] = {}
    for name in FIGURES:
        value = data.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TypeError(f"{name} is {value!r}")
        if value <= 0 and name != "bubble":
            raise ValueError(f"{name} is {value!r}")
        if math.isfinite(value):
            found[name] = float(value)
    return Figures(**found)
