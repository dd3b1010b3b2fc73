"""Flight: a plan while it is made, and then until its result is here."""

from __future__ import annotations

from hocket.serving.scheduling.admission import Admission
from hocket.serving.scheduling.sequence import Sequence
from hocket.serving.scheduling.step import BatchRow, Snapshot


class Flight:
    """A plan that is made, and then in flight.

    `samplers` are its sequences that sample, in row order; `silent` those that do not; `scored`, by
    row, those whose prompt's log-probabilities are reported; `full` those that fill a block.
    """

    __slots__ = (
        "admitted", "full", "number", "rows", "samplers", "scored", "silent", "snapshots", "tokens",
    )  # fmt: skip

    def __init__(self, number: int) -> None:
        self.number = number
        self.rows: list[BatchRow] = []
        self.tokens: list[int] = []
        self.admitted: list[Admission] = []
        self.samplers: list[Sequence] = []
        self.silent: list[Sequence] = []
        self.scored: dict[int, Sequence] = {}
        self.full: list[Sequence] = []
        self.snapshots: list[Snapshot] = []
