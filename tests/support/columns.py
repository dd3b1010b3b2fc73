"""Layouts as the columns that costs are computed of."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from hocket.cost.layout_batch import Layouts, schedule_number
from hocket.planning.enumeration import legal_parts
from hocket.planning.layouts import concatenate
from hocket.spec import recompute
from hocket.spec.layout import OFFLOAD, Layout


def layout_columns(layouts: Sequence[Layout], global_batch: int) -> Layouts:
    """Layouts as columns. Microbatches that are left open are one sample each.

    Raises:
        OptionError: a schedule that has no price, as one in a file.
    """
    rows: list[tuple[float, ...]] = []
    for layout in layouts:
        count = layout.microbatches or max(1, global_batch // layout.dp)
        rows.append(
            (
                layout.dp,
                layout.tp,
                layout.pp,
                layout.cp,
                layout.ep,
                layout.expert_tp,
                layout.virtual_stages,
                global_batch / (layout.dp * count),
                count,
                layout.zero,
                layout.shard or layout.dp,
                recompute.code(layout.recompute),
                layout.sequence_parallel,
                schedule_number(layout),
                layout.pipeline_split == "light-ends",
                OFFLOAD.index(layout.offload),
            )
        )
    names = [f.name for f in dataclasses.fields(Layouts)]
    values = np.array(rows, dtype=np.float64).reshape(-1, len(names))
    return Layouts(**{name: np.ascontiguousarray(values[:, i]) for i, name in enumerate(names)})


def legal_layouts(*job: Any, **limits: Any) -> Layouts:
    """All of `planning.enumeration.legal_parts`; empty if there is none."""
    return concatenate(list(legal_parts(*job, **limits)))
