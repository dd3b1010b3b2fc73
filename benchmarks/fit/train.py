"""Fit the constants of training to a table of published runs, and say how well they carry over.

    python -m benchmarks.fit.train TABLE.csv [TABLE.csv ...] [--eval-fraction] [--leave-one-out]
                                   [--halves] [--write]

Fitted together, on the mainstream rows, by least squares on logarithms with a soft loss (an
outlier of 20% counts as one of 5%), every source weighted by the root of its rows. Rows that are
one run measured several times count with their median. Rows whose layout was completed by
`planning.unstated` take no part. `--eval-fraction` leaves whole publications out, chosen by a hash
of their names before any figure is seen, and judges fitted and present constants by them alone;
what it writes was fitted without them, and nothing is written where they are predicted worse than
by the constants that there are. The shape of the matrix rate (`small_tile`, `inner_overhead`,
`memory_rate`) comes from `benchmarks.fit.products`, not from here.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from hocket.cost.constants import FEW_BITS, PRECISION_FIELDS, Constants, constants, constants_file
from hocket.planning.pricing import RowBatch, by_structure, row_batch
from hocket.planning.table import MAINSTREAM, PublishedRow, read_training_table, training_rows
from hocket.planning.validate import (
    ValidatedRow,
    average_training_scores,
    price_training_rows,
    training_group,
    training_scores,
)

PRODUCTS = {"A100": 0.973, "H100": 0.857}
"""Share of the dense rate that measured products reach alone (`benchmarks.fit.products`)."""

FREE = (
    # In a step products run hotter and beside others' memory traffic: a tenth less than alone.
    ("gpus", "A100", "matrix_rate", 0.88 * PRODUCTS["A100"], 0.05),
    ("gpus", "H100", "matrix_rate", 0.88 * PRODUCTS["H100"], 0.05),
    # The first fused attention kernels: 30% of the A100's rate.
    ("gpus", "A100", "flash_rate", 0.25, 0.2),
    ("gpus", "A100", "contention", 1.2, 0.1),
    # A layer's forward calls PyTorch about 70 times, 10 us each, for 14 kernels that are counted.
    ("stacks", "megatron", "kernel_time", 5e-05, 0.5),
    ("stacks", "megatron", "softmax", 0.8, 0.2),
    # Large messages reach three quarters of the cards' rate (nccl-tests on several nodes).
    ("stacks", "megatron", "network", 0.75, 0.2),
    ("stacks", "megatron", "skew", 1e-04, 0.5),
    ("stacks", "megatron", "hop", 5e-06, 0.3),
    ("stacks", "megatron", "step_overhead", 0.005, 1.0),
    ("stacks", "deepspeed", "network", 0.6, 0.3),
    ("stacks", "deepspeed", "sharded_network", 0.4, 0.4),
    ("stacks", "fsdp", "traffic", 1.5, 0.2),
    ("stacks", "fsdp", "network", 0.75, 0.2),
    ("stacks", "fsdp", "overlap", 0.4, 0.4),
    ("stacks", "fsdp", "step_overhead", 0.01, 1.0),
    ("stacks", "fsdp", "hop", 5e-06, 0.3),
    ("pairs", "A100 fsdp-triton", "flash_rate", 0.3, 0.2),
    # Kernels written for the A100's instructions reach 60% of an H100's, of 3.17 times the rate.
    ("pairs", "H100 fsdp-triton", "flash_rate", 0.18, 0.2),
)
"""Where in the data file each fitted number stands, what is believed before any row is seen, and
how far off that may be (standard deviation of its logarithm)."""

APART = (
    ("gpus", "B200", "matrix_rate", 0.88 * 0.769, 0.1),
    ("gpus", "GB200", "matrix_rate", 0.88 * 0.768, 0.1),
    ("gpus", "GB300", "matrix_rate", 0.88 * 0.768, 0.2),
    ("gpus", "GB200", "flash_rate", 0.3, 0.3),
    ("gpus", "V100", "matrix_rate", 0.75, 0.1),
    ("gpus", "V100", "contention", 1.2, 0.3),
    ("precisions", "fp4", "matrix_rate", 0.7, 0.3),
    ("pairs", "H100 megatron-core", "flash_rate", 0.35, 0.2),
    ("stacks", "nemo", "tensor_exposed", 0.5, 0.3),
)
"""The same of what only rows outside the mainstream tell (dense ones; reported apart)."""

EXPERTS = (
    # Sorted before and after the exchange, and back: read and written each.
    ("stacks", "nemo", "expert_passes", 8.0, 0.5),
    ("stacks", "nemo", "expert_time", 0.0005, 1.0),
    ("stacks", "nemo", "expert_exposed", 0.7, 0.5),
    # There, whole layers of experts are captured as graphs, which wait for nothing.
    ("pairs", "GB300 nemo", "expert_time", 0.0002, 1.0),
)
"""The same of what only mixtures of experts tell."""

BELIEF = 0.2
"""Weight of the beliefs: a number off by its deviation costs as much as all rows off by this."""

SHARED_NETWORK = ("fsdp", "megatron")
"""Stacks whose sharded collectives reach the network as their others do."""

SHARED_FLASH = ("B200", "GB300")
"""GPUs whose fused attention kernel is the GB200's."""

DATA = Path(__file__).resolve().parents[2] / "src/hocket/cost/data/constants.json"


Free = Sequence[tuple[str, str, str, float, float]]


def changed(data: dict[str, Any], values: Sequence[float], free: Free = FREE) -> dict[str, Any]:
    """The data file with the free numbers replaced."""
    data = json.loads(json.dumps(data))
    for (part, name, field, *_), value in zip(free, values, strict=True):
        data[part][name][field] = float(value)
    for name in SHARED_FLASH:
        data["gpus"][name]["flash_rate"] = data["gpus"]["GB200"]["flash_rate"]
    # A B300 has the GB300's constants, but its recipes capture no graphs.
    data["pairs"]["B300 nemo"]["expert_time"] = data["stacks"]["nemo"]["expert_time"]
    for name in SHARED_NETWORK:
        data["stacks"][name]["sharded_network"] = data["stacks"][name]["network"]
    return data


class Problem:
    """Rows and where each takes its constants from."""

    def __init__(self, found: Sequence[PublishedRow]) -> None:
        self.rows = list(found)
        self.batch: RowBatch = row_batch(self.rows)
        self.kinds = sorted({(row.cluster.node.gpu.name, row.stack) for row in self.rows})
        self.place = np.array(
            [self.kinds.index((row.cluster.node.gpu.name, row.stack)) for row in self.rows]
        )

        parts = [constants(gpu, stack) for gpu, stack in self.kinds]
        own = np.array([float(part.flash_rate) for part in parts])[self.place]
        self.flash = self.batch.constants.flash_rate / own  # 8-bit rows keep attention in 16
        self.bits = {
            name: np.array([row.kind.endswith(name) for row in self.rows]) for name in FEW_BITS
        }

    def constants(self, data: dict[str, Any]) -> Constants:
        """Arrays of constants under another data file; what rows change themselves stays."""
        from hocket.cost import constants as module

        original = module.constants_file
        module.constants_file = lambda: data  # type: ignore[assignment]
        try:
            parts = [module.constants(gpu, stack) for gpu, stack in self.kinds]
        finally:
            module.constants_file = original
        values = {}
        for field in dataclasses.fields(Constants):
            if field.name in (*PRECISION_FIELDS, "quantized_inputs"):
                values[field.name] = getattr(self.batch.constants, field.name)
                continue
            column = np.array([float(getattr(part, field.name)) for part in parts])
            values[field.name] = column[self.place]
        values["flash_rate"] = values["flash_rate"] * self.flash
        for name, rows_of in self.bits.items():
            share = data["precisions"][name]["matrix_rate"]
            values["matrix_rate"] = values["matrix_rate"] * np.where(rows_of, share, 1.0)
        return Constants(**values)


def fit(
    found: Sequence[PublishedRow], data: dict[str, Any], evaluations: int = 30, free: Free = FREE
) -> dict[str, Any]:
    """The data file with constants fitted to these rows, from what is believed before: nothing of
    an earlier fit enters. A number that the rows say nothing about stays at that belief."""
    problems = [Problem([found[place] for place in places]) for places in by_structure(found)]
    rows = [row for problem in problems for row in problem.rows]
    target = np.log([p.target or math.nan for p in price_training_rows(rows)])
    counts: dict[str, int] = {}
    for row in rows:
        counts[training_group(row)] = counts.get(training_group(row), 0) + 1
    weight = np.array([1 / math.sqrt(counts[training_group(row)]) for row in rows])
    weight = np.sqrt(weight / weight.sum() * 1000)
    start = np.array([value for *_, value, _ in free])
    believed = BELIEF / np.array([deviation for *_, deviation in free])

    def residuals(logs: np.ndarray) -> np.ndarray:
        tried = changed(data, start * np.exp(logs), free)
        step = np.concatenate([p.batch.times(p.constants(tried)).step for p in problems])
        return np.concatenate([weight * (np.log(step) - target), believed * logs])

    found_at = least_squares(
        residuals,
        np.zeros(len(start)),
        loss="soft_l1",
        f_scale=0.05,
        max_nfev=evaluations,
        diff_step=1e-3,
    )
    return changed(data, start * np.exp(found_at.x), free)


def predictions(found: Sequence[PublishedRow], data: dict[str, Any]) -> list[ValidatedRow]:
    """Prices of rows under a data file."""
    predicted_rows: dict[int, ValidatedRow] = {}
    for places in by_structure(found):
        problem = Problem([found[place] for place in places])
        rows = price_training_rows(problem.rows, lambda _: problem.constants(data))  # noqa: B023
        predicted_rows |= zip(places, rows, strict=True)
    return [predicted_rows[place] for place in range(len(found))]


def publication(source: str) -> str:
    """A source without version and date: releases of one page are one publication."""
    return re.sub(r"\s*\(.*?\)|\b\d+(\.\d+)+\b", "", source).strip()


def is_held_out(source: str) -> bool:
    """Whether a publication is among the three in ten that no fit with `--eval-fraction` sees."""
    digest = hashlib.sha256(publication(source).encode()).hexdigest()
    return int(digest, 16) % 10 < 3


def show(title: str, predicted_rows: Sequence[ValidatedRow]) -> None:
    """A table by source."""
    names: dict[str, list[ValidatedRow]] = {}
    for one in predicted_rows:
        names.setdefault(training_group(one.row), []).append(one)
    table = {name: training_scores(members) for name, members in names.items()}
    print(f"\n{title}\n{'source':52s} rows   mean median  p90   bias    tau regret memory unfit")
    for name, s in table.items():
        errors = np.array([p.error for p in names[name] if p.error is not None])
        p90 = f"{100 * np.percentile(abs(errors), 90):5.1f}" if len(errors) else "    -"
        bias = f"{100 * np.median(errors):+6.1f}" if len(errors) else "     -"
        line = [s.step_time_mape, s.step_time_median_ape]
        more = [s.kendall_tau, s.mean_regret, s.memory_median_ape]
        text = [f"{x:6.1f}" if x is not None else "     -" for x in line]
        last = [f"{x:6.2f}" if x is not None else "     -" for x in more]
        print(f"{name[:52]:52s} {s.rows_used:4d} {''.join(text)} {p90} {bias} {''.join(last)} "
              f"{s.false_fits:4d}")  # fmt: skip
    main = [s for name, s in table.items() if not name.startswith("other:")]
    print("overall", dataclasses.asdict(average_training_scores(main, 0)))


def fit_all(everything: Sequence[PublishedRow], data: dict[str, Any]) -> dict[str, Any]:
    """The data file fitted in three steps, none of which changes what an earlier one fitted."""
    rows_of = [r for r in everything if r.measured and not r.resolved]
    found = [r for r in rows_of if r.kind == MAINSTREAM]
    apart = [r for r in rows_of if r.kind != MAINSTREAM and not r.shape.experts]
    experts = [r for r in rows_of if r.shape.experts]
    fitted = fit(found, data)
    fitted = fit(apart, fitted, free=APART) if apart else fitted
    return fit(experts, fitted, free=EXPERTS) if experts else fitted


def main() -> None:
    """Fit, report, and write the data file if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("tables", nargs="+")
    parser.add_argument("--eval-fraction", action="store_true")
    parser.add_argument("--leave-one-out", action="store_true")
    parser.add_argument("--halves", action="store_true")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    everything, _ = training_rows(
        [line for table in options.tables for line in read_training_table(table)]
    )
    data = json.loads(json.dumps(constants_file()))
    if options.eval_fraction:
        unseen = [r for r in everything if is_held_out(r.source)]
        print("held out:", *sorted({publication(r.source) for r in unseen}), sep="\n  ")
        everything = [r for r in everything if not is_held_out(r.source)]
    found = [r for r in everything if r.kind == MAINSTREAM and r.measured is not None]
    fitted = fit_all(everything, data)
    for part, name, field, *_ in (*FREE, *APART, *EXPERTS):
        before, after = data[part][name][field], fitted[part][name][field]
        print(f"{part:6s} {name:18s} {field:16s} {before:.4g} -> {after:.4g}")
    predicted_rows = predictions(everything, fitted)
    show("rows that were fitted on", predicted_rows)
    if options.eval_fraction:
        show("held out, constants as they are", predictions(unseen, data))
        show("held out, fitted without them", predictions(unseen, fitted))
    if options.halves:
        draw = np.random.default_rng(0).random(len(found)) < 0.5
        left = fit([r for r, half in zip(found, draw, strict=True) if half], fitted)
        rest = [r for r, half in zip(found, draw, strict=True) if not half]
        show("fitted on one half, shown on the other", predictions(rest, left))
    if options.leave_one_out:
        out: list[ValidatedRow] = []
        for name in dict.fromkeys(publication(r.source) for r in found):
            rest = [r for r in found if publication(r.source) != name]
            own = fit(rest, data, evaluations=20)
            out += predictions([r for r in found if publication(r.source) == name], own)
        show("each publication predicted by constants fitted without it", out)
        for family in sorted({p.row.cluster.node.gpu.name.partition("-")[0] for p in out}):
            of = [p for p in out if p.row.cluster.node.gpu.name.startswith(family)]
            show(f"of these, {family}", of)
    if options.write:
        ratios = [
            p.target / p.step for p in predicted_rows if p.target and p.row.kind == MAINSTREAM
        ]
        low, high = np.percentile(ratios, [10, 90])
        fitted["residuals"]["step_time"] = [round(float(low), 4), round(float(high), 4)]
        main = [p for p in predicted_rows if p.row.kind == MAINSTREAM]
        held = [p.row.memory / p.memory for p in main if p.row.memory]
        fitted["residuals"]["memory"] = [round(float(np.percentile(held, q)), 4) for q in (5, 95)]
        for part, name, field, *_ in (*FREE, *APART, *EXPERTS):
            fitted[part][name][field] = float(f"{fitted[part][name][field]:.4g}")
        DATA.write_text(json.dumps(fitted, indent=1) + "\n")
        print(f"written: {DATA}")


if __name__ == "__main__":
    main()
