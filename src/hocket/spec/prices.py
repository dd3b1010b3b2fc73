"""Prices: what every action of a schedule costs, in seconds and bytes.

Predicted by `cost`, or measured: the medians of a `Timeline`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping

from hocket.spec.errors import OptionError, unknown
from hocket.spec.files import parse_json
from hocket.spec.schedule import BACKWARD, INPUT, KINDS, WEIGHT


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prices:
    """Seconds and bytes of actions, by stage.

    Attributes:
        seconds: letter (`F`, `B`, `SEND_F` ...) to seconds per stage. A send's price is that of
            the message's journey; a receive costs only its wait. A letter that is absent costs
            nothing, except that B is I and W together, and I and W are half of B each.
        activation_bytes: per stage, what a microbatch holds from its forward to its backward.
        resident_bytes: per stage, parameters, gradients and optimizer state.
    """

    seconds: Mapping[str, tuple[float, ...]]
    activation_bytes: tuple[int, ...] = ()
    resident_bytes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for kind, values in self.seconds.items():
            if kind not in KINDS:
                message, hint = unknown("action", kind, KINDS)
                raise OptionError(message, hint=hint)
            if any(value < 0 for value in values):
                raise OptionError(f"the price of {kind} is negative: {values}")

    @classmethod
    def uniform(
        cls, num_stages: int, *, forward: float = 1.0, backward: float = 2.0, send: float = 0.0
    ) -> Prices:
        """Equal stages. A backward takes two forwards: it computes two products for each one."""
        kinds = {"F": forward, "B": backward, "SEND_F": send, "SEND_B": send}
        return cls(seconds={kind: (value,) * num_stages for kind, value in kinds.items()})

    def of(self, kind: str, stage: int) -> float:
        """Seconds of one action."""
        if kind in self.seconds:
            return self.seconds[kind][stage]
        if kind == BACKWARD:
            return sum(self.seconds[k][stage] for k in (INPUT, WEIGHT) if k in self.seconds)
        if kind in (INPUT, WEIGHT) and BACKWARD in self.seconds:
            return self.seconds[BACKWARD][stage] / 2
        return 0.0

    def to_json(self) -> str:
        """A JSON form with an exact inverse."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Prices:
        """The inverse of `to_json`."""
        data = parse_json(text)
        return cls(
            seconds={kind: tuple(values) for kind, values in data["seconds"].items()},
            activation_bytes=tuple(data["activation_bytes"]),
            resident_bytes=tuple(data["resident_bytes"]),
        )
