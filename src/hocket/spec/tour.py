"""Tour: claims about splitting a model, each with what was predicted and what was measured.

A stop holds numbers, not sentences: the words come from one file for each language, so that a
stop is run once and can be shown in any of them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

VERDICTS = ("true", "true_if", "units", "false", "busy")
"""True; true under a condition that the text names; true once the units agree; not seen here; not
to be judged from times taken while other programs used the machine."""

LANGUAGES = ("en", "ko")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stop:
    """One claim, tested.

    Attributes:
        key: its name, and that of its words.
        command: what to type to test it oneself.
        verdict: one of `VERDICTS`, decided by the numbers.
        values: what the sentences leave open, formatted.
        bars: a small picture: a label, a share from 0 to 1, and what to print after it. A label
            may hold {predicted} and {measured}, which are words of the language.
        drawing: a small picture in text, without words of any language.
        seconds: that testing it took.
    """

    key: str
    command: str
    verdict: str
    values: dict[str, Any]
    bars: tuple[tuple[str, float, str], ...] = ()
    drawing: str = ""
    seconds: float = 0.0

    def __post_init__(self) -> None:
        assert self.verdict in VERDICTS, self.verdict

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Stop:
        """The inverse of `to_json`."""
        rows = tuple((label, share, text) for label, share, text in data["bars"])
        return cls(**{**data, "bars": rows})
