"""Pricing rows of a table together: one column per run, whatever its sizes, machine and stack."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from hocket.cost.constants import Constants
from hocket.cost.layout_batch import Layouts
from hocket.cost.machine import ClusterNumbers, stack_machines
from hocket.cost.step import StepTimes, step_times
from hocket.cost.terms import Floats, Terms, stack_terms, structure, terms
from hocket.planning.table import PublishedRow


@dataclasses.dataclass(frozen=True)
class RowBatch:
    """Rows as columns; `constants` holds arrays."""

    model: Terms
    layouts: Layouts
    seq_len: Floats
    machine: ClusterNumbers
    constants: Constants

    def times(self, constants: Constants | None = None) -> StepTimes:
        """Seconds of every row, under its own constants or those given."""
        return step_times(
            self.model,
            self.layouts,
            self.seq_len,
            self.machine,
            self.constants if constants is None else constants,
        )


def by_structure(rows: Sequence[PublishedRow]) -> list[list[int]]:
    """Places of rows whose models have one structure: each list makes a batch."""
    keys: dict[int, Any] = {}
    found: dict[Any, list[int]] = {}
    for place, row in enumerate(rows):
        if id(row.shape) not in keys:
            keys[id(row.shape)] = structure(terms(row.shape))
        found.setdefault(keys[id(row.shape)], []).append(place)
    return list(found.values())


def row_batch(rows: Sequence[PublishedRow]) -> RowBatch:
    """Rows of one structure of model as one batch."""
    known: dict[int, Terms] = {}
    for row in rows:
        if id(row.shape) not in known:
            known[id(row.shape)] = terms(row.shape)
    names = [f.name for f in dataclasses.fields(Layouts)]
    return RowBatch(
        model=stack_terms([known[id(row.shape)] for row in rows]),
        layouts=Layouts(**{n: np.array([row.layout[n] for row in rows]) for n in names}),
        seq_len=np.array([row.seq_len for row in rows]),
        machine=stack_machines([row.machine for row in rows]),
        constants=_constants([row.constants for row in rows]),
    )


def _constants(parts: Sequence[Constants]) -> Constants:
    names = [f.name for f in dataclasses.fields(Constants)]
    values: dict[str, Any] = {n: np.array([float(getattr(p, n)) for p in parts]) for n in names}
    return Constants(**values)
