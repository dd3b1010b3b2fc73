"""ReportCard: the outcome of every GPU check on one machine, as `hocket doctor` writes it.

    CardLine     one check: pass, fail or cannot, with its figures and the command that repeats it
    ReportCard   the lines, and the machine and versions that they were taken on

The JSON form is versioned and has an exact inverse.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from hocket.spec.errors import DataError
from hocket.spec.files import parse_json

VERSION = 1

PASS, FAIL, CANNOT = STATUSES = ("pass", "fail", "cannot")
"""Cannot: the check was not executed as meant, for the reason that its line gives."""

GROUPS = (
    "environment",
    "kernels",
    "equality",
    "speed",
    "memory",
    "checkpoint",
    "faults",
    "prediction",
    "multi-gpu",
)

Value = float | int | str | bool
"""A figure of a line; its unit is the end of its name (`seconds`, `bytes_per_second`)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CardLine:
    """One check.

    Attributes:
        id: name of the check; `group` one of `GROUPS`.
        what: what the check does; `criterion`: when it passes, with the numbers.
        status: one of `STATUSES`.
        reason: why it failed or could not be executed; empty where it passed.
        values: what was measured, by name.
        predicted: predictions of the same figures, by the same names.
        rehearsals: outcome by form (`cpu`, `fake`) of the rehearsals that were executed: `ok`, or
            the error.
        seconds: that the check took, without the start of its process.
        limit: seconds after which it was to be ended.
        command: repeats this check alone.
    """

    id: str
    group: str
    what: str
    criterion: str
    status: str
    command: str
    reason: str = ""
    values: Mapping[str, Value] = dataclasses.field(default_factory=dict)
    predicted: Mapping[str, Value] = dataclasses.field(default_factory=dict)
    rehearsals: Mapping[str, str] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0
    limit: float = 0.0

    def __post_init__(self) -> None:
        assert self.status in STATUSES, self.status
        assert self.group in GROUPS, self.group

    @property
    def rehearsed(self) -> bool | None:
        """Whether every rehearsal ended well; None where there was none."""
        return all(text == "ok" for text in self.rehearsals.values()) if self.rehearsals else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReportCard:
    """All lines of one run of `hocket doctor`.

    Attributes:
        date: UTC, ISO 8601.
        machine: host and devices by name (`gpus`, `gpu_0`, `cpu`, `cores`, `memory_bytes`, ...).
        versions: of packages, driver and libraries.
        executed_on_gpu: whether a GPU executed the checks; False: they were rehearsed.
        seconds: that the whole run took.
    """

    date: str
    lines: tuple[CardLine, ...]
    machine: Mapping[str, Value] = dataclasses.field(default_factory=dict)
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    executed_on_gpu: bool = False
    seconds: float = 0.0
    version: int = VERSION

    @property
    def counts(self) -> dict[str, int]:
        """Number of lines by status."""
        return {status: sum(line.status == status for line in self.lines) for status in STATUSES}

    @property
    def rehearsed(self) -> int:
        """Lines that could not be executed and whose rehearsals all ended well."""
        return sum(line.status == CANNOT and line.rehearsed is True for line in self.lines)

    @property
    def ok(self) -> bool:
        """Whether no line failed."""
        return not self.counts[FAIL]

    def to_json(self) -> str:
        """Indented, so that two cards can be compared with diff."""
        return json.dumps(dataclasses.asdict(self), indent=1, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> ReportCard:
        """The inverse of `to_json`.

        Raises:
            DataError: the text is not a report card, or one of a newer version.
        """
        try:
            data: dict[str, Any] = parse_json(text)
            version = data["version"]
            if version != VERSION:
                raise DataError(
                    f"the report card has version {version}, this hocket reads {VERSION}",
                    hint="pip install --upgrade hocket",
                )
            lines = tuple(CardLine(**line) for line in data["lines"])
            return cls(**{**data, "lines": lines})
        except (ValueError, KeyError, TypeError, AssertionError) as error:
            raise DataError(f"not a report card: {type(error).__name__}: {error}") from None
