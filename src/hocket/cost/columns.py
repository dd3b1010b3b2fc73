"""Layouts as columns: one array per field, so that a million are priced at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from hocket.cost.terms import Floats
from hocket.spec.layout import RECOMPUTE, Layout

SCHEDULES = ("1f1b", "gpipe", "interleaved", "zb-h1", "zb-h2", "zb-v", "sequential")
"""Schedules that have a price; the number in a column is the place in this list."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layouts:
    """Fields of spec.layout.Layout, each [r] floats (degrees are whole numbers).

    Attributes:
        microbatch: samples in a microbatch. microbatches: of one data rank and step.
        recompute: place in RECOMPUTE (0 none, 1 selective, 2 full).
        shard: data ranks that share one ZeRO state; dp where not said.
        schedule: place in SCHEDULES.
    """

    dp: Floats
    tp: Floats
    pp: Floats
    cp: Floats
    ep: Floats
    virtual: Floats
    microbatch: Floats
    microbatches: Floats
    zero: Floats
    shard: Floats
    recompute: Floats
    sequence_parallel: Floats
    schedule: Floats

    def __len__(self) -> int:
        return len(self.dp)

    def take(self, index: np.ndarray) -> Layouts:
        """Some of the rows."""
        fields = dataclasses.fields(self)
        return Layouts(**{f.name: getattr(self, f.name)[index] for f in fields})


def columns(layouts: Sequence[Layout], global_batch: int) -> Layouts:
    """Layouts as columns. Microbatches that are left open are one sample each."""
    rows: list[tuple[float, ...]] = []
    for layout in layouts:
        count = layout.microbatches or max(1, global_batch // layout.dp)
        interleaved = layout.virtual_stages > 1 and layout.schedule == "1f1b"
        name = "interleaved" if interleaved else layout.schedule
        rows.append(
            (
                layout.dp,
                layout.tp,
                layout.pp,
                layout.cp,
                layout.ep,
                layout.virtual_stages,
                global_batch / (layout.dp * count),
                count,
                layout.zero,
                layout.shard or layout.dp,
                RECOMPUTE.index(layout.recompute),
                layout.sequence_parallel,
                SCHEDULES.index(name) if name in SCHEDULES else 0,
            )
        )
    names = [f.name for f in dataclasses.fields(Layouts)]
    values = np.array(rows, dtype=np.float64).reshape(-1, len(names))
    return Layouts(**{name: np.ascontiguousarray(values[:, i]) for i, name in enumerate(names)})
