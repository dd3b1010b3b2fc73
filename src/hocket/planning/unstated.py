"""Unstated knobs of a published run: what its row leaves out, resolved as `plan` chooses it.

Every value that the software has of what the row leaves out, with what the row states; of these
layouts the fastest that fits (`planning.fit`), or the one of least memory where none does. A run
that was published fitted, so the headroom of a proposal is not asked of it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from hocket.cost.layout_batch import SCHEDULES, Layouts
from hocket.cost.memory import LATE
from hocket.planning.fit import fits_memory
from hocket.planning.problem import Problem
from hocket.planning.search import estimate_layouts, ranked_rows
from hocket.planning.stacks import STACKS
from hocket.planning.tools.limits import ToolLimits
from hocket.spec import legality, recompute
from hocket.spec.errors import OptionError
from hocket.spec.layout import divisors

KNOBS = {
    "micro_batch": "microbatch",
    "recompute": "recompute",
    "zero_stage": "zero",
    "sp": "sequence_parallel",
}
"""Columns that a row may leave empty, and the field of a layout that each one is."""


def resolve_unstated(
    problem: Problem, stated: Mapping[str, float], unstated: Collection[str]
) -> tuple[dict[str, float], dict[str, str]]:
    """The chosen layout, and each unstated column with its value as text.

    Args:
        stated: one number for each field of `cost.layout_batch.Layouts`; those of unstated columns
            do not count.
        unstated: some of `KNOBS`.
    """
    rows = _candidates(problem, stated, {KNOBS[column] for column in unstated})
    if not len(rows):
        raise OptionError("no layout of its degrees is legal for the model and the batch")
    held = problem.memory(rows)
    enough = np.flatnonzero(fits_memory(held, problem.cluster.node.gpu.usable))
    if len(enough):
        at = int(enough[ranked_rows(estimate_layouts(problem, rows.take(enough)), "time")[0]])
    else:
        at = int(held.least.argmin())
    values = {
        "micro_batch": f"{rows.microbatch[at]:g}",
        "recompute": recompute.name(rows.recompute[at]),
        "zero_stage": f"{rows.zero[at]:g}",
        "sp": f"{rows.sequence_parallel[at]:g}",
    }
    fields = {field.name: float(getattr(rows, field.name)[at]) for field in _fields()}
    return fields, {column: values[column] for column in KNOBS if column in unstated}


def _candidates(problem: Problem, stated: Mapping[str, float], unknown: set[str]) -> Layouts:
    """The stated layout with every value of its unknown fields that the software has."""
    has = STACKS[problem.stack].limits
    batch = problem.global_batch / stated["dp"]
    choices: dict[str, list[float]] = {
        "microbatch": [float(n) for n in divisors(int(batch))],
        "recompute": [float(recompute.code(name)) for name in has.recompute],
        "zero": [float(stage) for stage in has.zero],
        "sequence_parallel": [float(value) for value in has.sequence_parallel],
    }
    names = sorted(unknown)
    rows = []
    for values in itertools.product(*(choices[name] for name in names)):
        row = {**stated, **dict(zip(names, values, strict=True))}
        row["microbatches"] = max(1.0, round(batch / row["microbatch"]))
        row["lighter"] = max(row["lighter"], float(_light_ends(problem, row)))
        if "zero" in unknown:
            row["shard"] = row["dp"]
        rows.append(row)
    kept = [row for row in rows if _sound(problem, row, unknown)] or rows
    found = Layouts(**{f.name: np.array([row[f.name] for row in kept]) for f in _fields()})
    rules = ToolLimits(software=has.software, rules=has.rules)
    allowed = np.flatnonzero(rules.allowed(found, problem.facts))
    return found.take(allowed) if len(allowed) else found


def _sound(problem: Problem, row: Mapping[str, float], unknown: set[str]) -> bool:
    """Whether a search would look at unknown values (`planning.enumeration`)."""
    late = SCHEDULES[int(row["schedule"])] in LATE
    thrown_away = recompute.name(row["recompute"]) not in ("none", "selective")
    cp, tp = int(row["cp"]), int(row["tp"])
    return not (
        ("recompute" in unknown and late and row["pp"] > 1 and thrown_away)
        or ("zero" in unknown and row["zero"] and row["dp"] * row["cp"] == 1)
        or ("zero" in unknown and row["zero"] == 2 and row["pp"] > 1)
        or (
            "sequence_parallel" in unknown
            and row["sequence_parallel"]
            and not legality.slices(problem.seq_len, cp, tp)
        )
    )


def _light_ends(problem: Problem, row: Mapping[str, float]) -> bool:
    """Whether layers only divide into stages of which the first and the last have one fewer."""
    layers, stages = len(problem.shape.layers), int(row["pp"] * row["virtual"])
    return stages > 1 and layers % stages != 0 and legality.light_ends(layers, stages)


def _fields() -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(Layouts)
