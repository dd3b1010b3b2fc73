"""Matrix: every model type in every layout, and whether one process computes the same.

    Cell       one type at one layout: equal, rejected, different or crashed
    TypeRow    one type: its tiny configuration's size, and a cell for each layout
    Matrix     the rows, and what they come to

Each has a JSON form with an exact inverse.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping

from hocket.spec.files import parse_json
from hocket.spec.layout import Layout

EQUAL, REJECTED, DIFFERENT, CRASHED = OUTCOMES = ("equal", "rejected", "different", "crashed")

LAYOUTS = (
    "dp2",
    "tp2",
    "pp2:microbatches=2",
    "dp2:zero=1",
    "dp2:microbatches=2,zero=2",
    "dp2.tp2",
    "dp2.pp2:microbatches=2",
    "pp2.tp2:microbatches=2",
    "dp2.tp2:zero=1",
    "dp2.pp2:microbatches=2,zero=2",
    "dp2.pp2.tp2:microbatches=2",
    "dp2.pp2.tp2:microbatches=2,zero=2",
    "dp2:zero=3",
    "tp2:sequence_parallel=true",
    "dp2.pp2.tp2:microbatches=2,zero=3,sequence_parallel=true",
    "cp2",
    "cp4",
    "pp2.cp2.tp2:microbatches=2",
    "dp2.ep2",
    "dp2.tp2.ep4.etp1",
    "dp2.pp2.ep2:microbatches=2",
)
"""Each axis alone and together with others, with and without ZeRO and slices of sequences."""

QUICK = ("tp2", "dp2.pp2:microbatches=2,zero=2")
"""Every axis once, in two small worlds."""


SERVED_LAYOUTS = ("dp1", "tp2", "pp2", "cp2", "cp4", "cp2.tp2", "dp2.ep2", "tp2.ep2.etp1")
"""Layouts of the serving matrix, as `Layout` writes them: one process, each axis that splits a
replica alone, four context ranks, context ranks with tensor ranks, and experts over data ranks and
over tensor ranks."""


SWITCHED = "+"
"""At the end of a type's name: its second configuration, with its switches reversed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """One model type at one layout.

    Attributes:
        layout: its text.
        outcome: `equal`; `rejected` before or by its ranks, for the `reason`; `different`: the
            reason holds the numbers; `crashed`: a rank died, hung or raised, the reason says how.
        ratio: the largest difference relative to what is allowed; None where nothing was compared.
        seconds: that it took.
    """

    layout: str
    outcome: str
    reason: str = ""
    ratio: float | None = None
    seconds: float = 0.0

    def __post_init__(self) -> None:
        assert self.outcome in OUTCOMES, self.outcome


@dataclasses.dataclass(frozen=True, kw_only=True)
class TypeRow:
    """One model type.

    Attributes:
        kind: its `model_type`.
        architecture: the class of its causal language model.
        num_parameters: of the tiny model; 0 where none could be made.
        note: blocks that tensor parallelism replicates, and why.
        inferred: its tensor plan was inferred from its structure.
        switches: optional switches that differ from the defaults of its class, with their values.
        cells: in the order of the layouts.
    """

    kind: str
    architecture: str
    num_parameters: int = 0
    note: str = ""
    inferred: bool = False
    switches: str = ""
    cells: tuple[Cell, ...] = ()

    def to_json(self) -> str:
        """One line."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> TypeRow:
        """The inverse of `to_json`."""
        data = parse_json(text)
        return cls(**{**data, "cells": tuple(Cell(**cell) for cell in data["cells"])})

    def cell(self, layout: str) -> Cell | None:
        """The cell of one layout; None where it was not tried."""
        return next((cell for cell in self.cells if cell.layout == layout), None)

    def trains_under(self, *axes: str) -> bool:
        """Whether every layout tried that splits along no other axes is equal, and each of
        `axes` (`dp`, `pp`, `tp`, `cp`, `ep`, `zero`, `sequence`) is among them.
        """
        seen: set[str] = set()
        for cell in self.cells:
            used = axes_of(Layout.parse(cell.layout))
            if used <= set(axes):
                if cell.outcome != EQUAL:
                    return False
                seen |= used
        return seen == set(axes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Matrix:
    """The rows by type, and what made them.

    Attributes:
        layouts: the columns.
        rows: one for each type.
        versions: of what was run, by package.
    """

    layouts: tuple[str, ...]
    rows: tuple[TypeRow, ...]
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether nothing is different and nothing crashed; refusals are answers."""
        found = self.outcomes()
        return bool(self.rows) and not found[DIFFERENT] and not found[CRASHED]

    def outcomes(self) -> dict[str, int]:
        """Outcome to the number of cells."""
        counts = dict.fromkeys(OUTCOMES, 0)
        for row in self.rows:
            for cell in row.cells:
                counts[cell.outcome] += 1
        return counts

    def train_under(self, *axes: str) -> list[str]:
        """The types that train under all of these axes, alone and together."""
        return [row.kind for row in self.rows if row.trains_under(*axes)]


def axes_of(layout: Layout) -> set[str]:
    """What a layout splits along: axes of its mesh, `zero`, and `sequence` for its slices."""
    found = {axis for axis in ("dp", "pp", "tp", "cp", "ep") if getattr(layout, axis) > 1}
    found |= {"zero"} if layout.zero else set()
    return found | ({"sequence"} if layout.sequence_parallel else set())
