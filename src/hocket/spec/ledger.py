"""Ledger lines: what one run was predicted to take and what it took, as one line of JSON.

    Entry          of a training run
    ServedEntry    of a server; its `command` is `serve`

A figure that was not predicted, or not measured, is None. The bubble is that of `Timeline`.
"""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any, ClassVar, Self

from hocket.spec.files import parse_json
from hocket.spec.layout import DEGREES, Layout

FIGURES = ("step_seconds", "memory", "bubble")
"""What predictions are judged by: seconds, bytes of the peak rank, share of the pipeline."""

SERVED_FIGURES = ("decode_seconds", "prefill_seconds", "tokens_per_second", "cache_tokens")
"""What a server's predictions are judged by."""

DISTURBED = 0.25
"""Cores' worth of other programs from which a run counts as disturbed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figures:
    """Of one run, predicted or measured: seconds of a step, bytes of the peak rank, bubble.

    Seconds and bytes of a line that is read are above zero.
    """

    step_seconds: float | None = None
    memory: float | None = None
    bubble: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServedFigures:
    """Of one server, predicted or measured; all above zero.

    Attributes:
        decode_seconds: of a round, one token for each running request: mean of those measured, and
            predicted for the same numbers of requests and tokens.
        prefill_seconds: of a step of prompts alone, likewise.
        tokens_per_second: of a replica's rounds, at the number of requests at which they were most.
        cache_tokens: that a replica's cache holds.
    """

    decode_seconds: float | None = None
    prefill_seconds: float | None = None
    tokens_per_second: float | None = None
    cache_tokens: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class LedgerLine:
    """What all lines tell.

    Attributes:
        date: when it ended, ISO 8601 in UTC. version: of hocket.
        run: its folder. command: `train`, `demo` or `serve`.
        model: as it was named. layout: text form. ranks: processes. dtype: of the workload.
        machine: its processors and devices in words. fingerprint: of those words, so that equal
            machines stand together.
        predicted: before it began; None where nothing was. measured: afterwards.
        others: cores' worth of time that other programs took meanwhile.
    """

    kind: ClassVar[type]
    """Of `predicted` and `measured`."""

    date: str
    version: str
    run: str
    model: str
    layout: str
    machine: str
    fingerprint: str
    measured: Any
    predicted: Any = None
    command: str = "train"
    ranks: int = 1
    dtype: str = ""
    others: float = 0.0

    @property
    def disturbed(self) -> bool:
        """Whether others took so much of the machine that no forecast could hold."""
        return self.others > DISTURBED

    @property
    def axes(self) -> tuple[str, ...]:
        """Axes that the layout splits over; `none` alone for one rank."""
        layout = Layout.stored(self.layout)
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
    def from_json(cls, text: str) -> Self:
        """The inverse of `to_json`; what a later version has added is passed over.

        Raises:
            ValueError, TypeError, KeyError: the line is no entry of this kind.
            LayoutError: its layout cannot be read.
        """
        data = parse_json(text)
        names = {field.name for field in dataclasses.fields(cls)}
        known = {key: value for key, value in data.items() if key in names}
        known["measured"] = _figures(cls.kind, data["measured"])
        if known.get("predicted") is not None:
            known["predicted"] = _figures(cls.kind, data["predicted"])
        for field in dataclasses.fields(cls):
            value = known.get(field.name, field.default)
            wanted: Any = _KINDS.get(str(field.type))
            if wanted is None:
                continue
            if not isinstance(value, wanted) or isinstance(value, bool):
                raise TypeError(f"{field.name} is {value!r}")
        entry = cls(**known)
        Layout.stored(entry.layout)
        return entry


@dataclasses.dataclass(frozen=True, kw_only=True)
class LedgerEntry(LedgerLine):
    """One training run: also steps taken, and `seq_len` and `global_batch` of the workload."""

    kind: ClassVar[type] = Figures

    measured: Figures
    predicted: Figures | None = None
    steps: int = 0
    seq_len: int = 0
    global_batch: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServedEntry(LedgerLine):
    """One server: also the requests and tokens it answered, and the seconds it was ready for."""

    kind: ClassVar[type] = ServedFigures

    measured: ServedFigures
    predicted: ServedFigures | None = None
    command: str = "serve"
    requests: int = 0
    output_tokens: int = 0
    seconds: float = 0.0


_KINDS = {"str": str, "int": int, "float": (int, float)}


def _figures(kind: type, data: Any) -> Any:
    found: dict[str, float] = {}
    for field in dataclasses.fields(kind):
        value = data.get(field.name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TypeError(f"{field.name} is {value!r}")
        if value <= 0 and field.name != "bubble":
            raise ValueError(f"{field.name} is {value!r}")
        if math.isfinite(value):
            found[field.name] = float(value)
    return kind(**found)
