"""Forecast: what a run will take on the very machine it runs on, said before it starts.

forecast.json             this, or why there is none
timeline.predicted.json   the Timeline of one step
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from typing import Any, Self

from hocket.spec.errors import OptionError, RunFolderError
from hocket.spec.files import parse_json
from hocket.spec.rows import LARGEST, require_types

KINDS = ("parameters", "gradients", "optimizer", "activations")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Alternative:
    """A layout that was considered, the chosen one among them.

    Attributes:
        layout: text form. step_seconds: of a step. memory: bytes of the peak rank.
        bubble: as `Timeline.bubble`. fits: whether `memory` is what a rank may hold.
        chosen: whether it is the one that runs. reason: why it cannot be, where it cannot.
    """

    layout: str
    step_seconds: float = 0.0
    memory: int = 0
    bubble: float = 0.0
    fits: bool = True
    chosen: bool = False
    reason: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prediction:
    """What forecasts of runs and of servers share.

    Attributes:
        layout: text form.
        why: empty, or why nothing could be predicted; then the numbers are 0 and the rest empty.
        memory: for each rank, bytes by kind and their `total`.
        capacity: bytes that a rank may hold; 0 if unknown.
        cluster: what it is for; measured: when it was probed, and how; empty: it was not, and the
            catalogue's constants stand for it.
        notes: what had to be assumed.
    """

    layout: str
    why: str = ""
    tokens_per_second: float = 0.0
    memory: tuple[dict[str, int], ...] = ()
    capacity: int = 0
    cluster: str = ""
    measured: str = ""
    notes: tuple[str, ...] = ()

    @property
    def known(self) -> bool:
        """Whether anything was predicted."""
        return not self.why

    @property
    def basis(self) -> str:
        """The machine, and what the figures are based on."""
        how = f"measured {self.measured}" if self.measured else "by the catalogue's constants"
        return f"{self.cluster}, {how}"

    @classmethod
    def none(cls, layout: str, why: str) -> Self:
        """No forecast, and why."""
        return cls(layout=layout, why=why)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Forecast(Prediction):
    """What one layout is expected to give.

    Attributes:
        layout: with its microbatches.
        step_seconds: of a step among others. tokens_per_second: of all ranks.
        step_range: seconds between which 80% of such steps are, by the residuals of runs that were
            predicted before; empty where there are none.
        bubble, idle: as those of `Timeline`.
        memory: by `parameters`, `gradients`, `optimizer`, `activations`.
        peak_bytes: the totals alone.
        exposed: axis to seconds of exposed communication, of an average
            rank and step.
        compute, communication: seconds of a step that an average rank spends in either.
        collectives: of all ranks in one step: rows of name, axis, phase, count, bytes.
        alternatives: what else was considered, best first, where there were several.
        links: axis to what it runs over.
    """

    step_seconds: float = 0.0
    step_range: tuple[float, ...] = ()
    bubble: float = 0.0
    idle: float = 0.0
    exposed: dict[str, float] = dataclasses.field(default_factory=dict)
    compute: float = 0.0
    communication: float = 0.0
    collectives: tuple[dict[str, Any], ...] = ()
    alternatives: tuple[Alternative, ...] = ()
    links: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def peak_bytes(self) -> tuple[int, ...]:
        """Bytes at the worst moment, by rank."""
        return tuple(row["total"] for row in self.memory)

    def among(self, others: Iterable[Alternative], *, fits: bool, shown: int) -> Forecast:
        """With the best of what else was considered, and itself: what fits first, then the fastest.

        Args:
            fits: whether it does. shown: how many rows.
        """
        own = Alternative(
            layout=self.layout,
            step_seconds=self.step_seconds,
            memory=max(self.peak_bytes),
            bubble=self.bubble,
            fits=fits,
            chosen=True,
        )
        rows = sorted([own, *others], key=lambda one: (not one.fits, one.step_seconds))[:shown]
        if own not in rows:
            rows[-1] = own
        return dataclasses.replace(self, alternatives=tuple(rows))

    def to_json(self) -> str:
        """A JSON form with an exact inverse; `peak_bytes` is written for readers."""
        data = dataclasses.asdict(self)
        return json.dumps({**data, "peak_bytes": list(self.peak_bytes)}, indent=1, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Forecast:
        """The inverse of `to_json`. Raises RunFolderError for what is no forecast."""
        try:
            data = parse_json(text)
            data.pop("peak_bytes", None)
            _finite(data)
            for one in data["alternatives"]:
                require_types(Alternative, one)
            data["alternatives"] = tuple(Alternative(**one) for one in data["alternatives"])
            for name in ("memory", "collectives", "notes", "step_range"):
                data[name] = tuple(data.get(name, ()))
            require_types(cls, data)
            if len(data["step_range"]) not in (0, 2):
                raise ValueError("step_range is not a pair of seconds")
            found = cls(**data)
            sizes = [row["total"] for row in found.memory]
            sizes += [row.get(name, 0) for row in found.collectives for name in ("count", "bytes")]
            if not all(isinstance(size, int) for size in sizes):
                raise ValueError("a number of bytes or of collectives is not an integer")
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise RunFolderError(f"forecast.json cannot be read: {error}") from None
        except OptionError as error:
            raise RunFolderError(f"forecast.json cannot be read: {error.message}") from None
        return found


def _finite(value: Any) -> None:
    """Raise ValueError where a number anywhere in it is none, endless or beyond a float."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for one in value:
            _finite(one)
    elif isinstance(value, int | float) and not abs(value) <= LARGEST:
        raise ValueError(f"a number is {value if isinstance(value, float) else 'too large'}")
