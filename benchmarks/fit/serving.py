"""Fit the constants of serving to tables of published runs, and say how well they carry over.

    python -m benchmarks.fit.serving TABLE.csv [TABLE.csv ...] [--leave-one-out] [--halves]
        [--write]

Fitted together, on rows of the GPUs in `FITTED`, by least squares on logarithms of time per output
token and of tokens per second with a soft loss (an outlier of 40% counts as one of 20%), every
group of source, engine, GPU and model weighted by the root of its rows. Rows that are one run
measured several times count with their median. Time to first token is not fitted. The interval that
is written is that of sources left out of the fit.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import itertools
import json
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from hocket.cost import serving_constants
from hocket.cost.serving_constants import (
    ENGINE_FIELDS,
    GPU_FIELDS,
    ServingConstants,
    engine_chain,
    gpu_entry,
)
from hocket.planning.serving_load import answers, load_groups, stack_constants
from hocket.planning.serving_table import ServingTableRow, read_serving_table, serving_rows
from hocket.planning.validate_serving import (
    FIELDS,
    ValidatedServingRow,
    average_serving_scores,
    price_serving_rows,
    serving_group,
    serving_scores,
)

GPUS = ("A100", "A100-PCIe", "H100", "B200", "MI300X")
"""An H200 is the chip of an H100 beside another memory: both are fitted as one. Fitted apart, rows
of another mix of engines made the H200 the slower of the two."""

FITTED = ("A100", "H100", "H200", "B200", "B300", "MI300X", "MI325X")
"""Families of the rows that are fitted to."""

ENGINES = ("trtllm", "trtllm-engines", "vllm", "sglang", "gpt-fast")

BELIEVED: dict[str, tuple[float, float]] = {
    # Copies of large buffers reach 85% to 92% of the bandwidth, products of one row a little less.
    "weight_rate": (0.8, 0.07),
    # Attention over scattered pages of a cache reads less evenly.
    "cache_rate": (0.75, 0.1),
    # Fused attention forward: 55% to 70% on an A100, 45% to 65% on an H100, short prompts less.
    "prefill_rate": (0.5, 0.2),
    # Measured products of at least 1024: 83% on an A100, 77% on an H100; power throttles steps.
    "matrix_rate": (0.72, 0.1),
    "matrix_rate_8": (0.65, 0.1),
    # In a step beside other work: 1.0 to 1.3 of a collective alone.
    "sum_time": (1.1, 0.2),
    # A kernel starts and drains in 1.5 us inside a graph; dependent ones wait for each other.
    "kernel_time": (2e-6, 0.4),
    "step_time": (1.5e-3, 0.6),
    "sequence_time": (5e-6, 0.6),
    "reduction_time": (5e-6, 1.0),
    # Some five more kernels, which wait for each other.
    "expert_time": (2.5e-5, 0.5),
    # Experts have few rows each, and uneven numbers of them.
    "expert_rate": (0.7, 0.2),
    "overhead_bytes": (3e9, 0.5),
}
"""What is believed of each constant before any row is seen, and how far off that may be (standard
deviation of its logarithm)."""

EXCEPTIONS: dict[tuple[str, str], tuple[float, float]] = {
    # Without CUDA graphs and with a C++ loop that speaks to every rank.
    ("trtllm-engines", "reduction_time"): (2e-5, 1.5),
    ("gpt-fast", "kernel_time"): (3e-6, 0.5),
    ("gpt-fast", "step_time"): (5e-4, 1.0),
    # PCIe cards draw 300 W instead of 400; peers share the host's bridge.
    # Its HTTP front end, one process, turns each token into text and sends it.
    ("vllm", "sequence_time"): (2e-5, 0.8),
    # Published shares of its peak rates are lower than those of NVIDIA's GPUs.
    ("MI300X", "matrix_rate"): (0.5, 0.2),
    ("MI300X", "matrix_rate_8"): (0.45, 0.2),
    ("MI300X", "weight_rate"): (0.7, 0.15),
    ("A100-PCIe", "matrix_rate"): (0.65, 0.15),
    ("A100-PCIe", "sum_time"): (1.5, 0.4),
}

ASSUMED = {
    "trtllm": ("reduction_time",),
    "vllm": ("reduction_time",),
    "sglang": ("reduction_time",),
    "trtllm-engines": ("expert_time",),
    "gpt-fast": ("sequence_time", "overhead_bytes", "reduction_time", "expert_time"),
}
"""What is not fitted of an engine: six are at most, and no row tells of the sequences and the
memory of one that runs a single request. Nor of products in fewer bits on an A100."""

FREE: tuple[tuple[str, str, str], ...] = (
    *(
        ("gpus", gpu, field)
        for gpu in GPUS
        for field in GPU_FIELDS
        if field != "matrix_rate_8" or not gpu.startswith("A100")
    ),
    *(
        ("engines", engine, field)
        for engine in ENGINES
        for field in ENGINE_FIELDS
        if field not in ASSUMED[engine]
    ),
)
"""Where in the data file each fitted number stands."""

BELIEF = 1.0
SCALE = 0.2
TYPICAL = 0.1
"""Error of a row that is expected of the right constants."""

CEILING = {"weight_rate": 0.92, "cache_rate": 0.92, "expert_rate": 1.0}
"""Copies of large buffers reach no more of the bandwidth."""

STEP = 1e-2

ENOUGH = 1e-3
"""Relative change of the sum of squares at which a search ends."""


HOW = {
    "by benchmarks/fit/serving.py, on A100, H100 (H200), B200 (B300), MI300X (MI325X)": [
        *(f"gpus.*.{field}" for field in GPU_FIELDS),
        *(f"engines.{e}.{f}" for e in ENGINES for f in ENGINE_FIELDS if f not in ASSUMED[e]),
    ],
    "measured over predicted at the 10th and the 90th percentile, publishers left out": [
        "residuals"
    ],
    "assumed, from what engines document": [
        "max_num_batched_tokens and max_sequences: defaults of trtllm-bench and of published "
        "commands",
        "usable and reserved: 95% and the whole output (no eviction) under TensorRT-LLM, 90% and "
        "88% and half of the output under vLLM and SGLang, which preempt",
        "waves: SGLang runs waiting prompts before it decodes",
        "prefill_time: an HTTP server's tokenising and first answer",
        "one_shot: engines' own all-reduce of small messages inside an NVLink domain",
        "megatron-inference: no rows could be predicted",
    ],
    "not fitted because six are the most, or no row tells": [
        f"engines.{e}.{f}" for e in ENGINES for f in ASSUMED[e]
    ],
}
"""How each number of the data file came about."""


def belief(name: str, field: str) -> tuple[float, float]:
    """Value and deviation believed of one constant."""
    return EXCEPTIONS.get((name, field), BELIEVED[field])


class Problem:
    """Rows, grouped once, that are priced under many constants."""

    def __init__(self, found: Sequence[ServingTableRow]) -> None:
        self.rows = list(found)
        self.groups = load_groups(self.rows)
        self.predicted_rows = price_serving_rows(self.rows)
        self.kinds = sorted({(r.gpu, r.engine) for r in self.rows})
        places = {kind: i for i, kind in enumerate(self.kinds)}
        self.place = {
            id(group.rows): np.array([places[r.gpu, r.engine] for r in group.rows])
            for group in self.groups
        }

    def constants(
        self, data: dict[str, Any]
    ) -> Callable[[Sequence[ServingTableRow]], ServingConstants]:
        """Columns of constants for each group of rows."""
        parts = [serving_constants.serving_constants(g, e, data) for g, e in self.kinds]
        stacked = stack_constants(parts)
        names = [f.name for f in dataclasses.fields(ServingConstants)]

        def of(members: Sequence[ServingTableRow]) -> ServingConstants:
            place = self.place[id(members)]
            return ServingConstants(**{n: getattr(stacked, n)[place] for n in names})

        return of

    def logarithms(self, data: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
        """Logarithms of time per token and of tokens per second."""
        found = answers(self.groups, len(self.rows), self.constants(data))
        return np.log(found.tpot), np.log(found.throughput)


def changed(data: dict[str, Any], values: np.ndarray) -> dict[str, Any]:
    """The data file with other numbers at `FREE`."""
    found = copy.deepcopy(data)
    for (part, name, field), value in zip(FREE, values, strict=True):
        found[part][name][field] = float(value)
    return found


def rounded(data: dict[str, Any]) -> dict[str, Any]:
    """Four digits of each fitted number."""
    values = [float(f"{data[part][name][field]:.4g}") for part, name, field in FREE]
    return changed(data, np.array(values))


def fit(
    found: Sequence[ServingTableRow],
    data: dict[str, Any],
    evaluations: int = 15,
    near: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The data file with constants fitted to these rows, from what is believed before: nothing of
    an earlier fit enters but where the search starts (`near`). A number that the rows say nothing
    about stays at that belief."""
    same: dict[tuple[Any, ...], list[ServingTableRow]] = {}
    for row in found:
        same.setdefault(_run(row), []).append(row)
    problem = Problem([rows[0] for rows in same.values()])
    targets = {p.row.id: p.targets for p in price_serving_rows(found)}
    start = np.array([belief(name, field)[0] for _, name, field in FREE])
    believed = BELIEF / np.array([belief(name, field)[1] for _, name, field in FREE])
    # Engines differ about a mean of them all, of which the belief is: one that no row tells of
    # takes what the others' rows say.
    common = np.array(
        [[part == "engines" and field == f for f in ENGINE_FIELDS] for part, _, field in FREE]
    ).astype(float)
    of_mean = BELIEF / np.array([BELIEVED[f][1] for f in ENGINE_FIELDS])
    counts: dict[tuple[str, ...], int] = {}
    for row in found:
        counts[_cell(row)] = counts.get(_cell(row), 0) + 1
    weight = np.sqrt([len(rows) / math.sqrt(counts[_cell(rows[0])]) for rows in same.values()])
    picked = []
    for field in ("tpot", "throughput"):
        seen = [i for i, r in enumerate(problem.rows) if targets[r.id][field] is not None]
        if field == "throughput":  # of one request at once it is the time per token again
            seen = [i for i in seen if targets[problem.rows[i].id]["tpot"] is None]
        target = np.log([float(targets[problem.rows[i].id][field] or 1.0) for i in seen])
        picked.append((np.array(seen, dtype=int), target))

    def errors(logs: np.ndarray) -> np.ndarray:
        both = problem.logarithms(changed(data, start * np.exp(logs)))
        parts = [
            weight[seen] * (values[seen] - target)
            for values, (seen, target) in zip(both, picked, strict=True)
        ]
        # The soft loss is of rows alone: beliefs count as they are.
        raw = np.concatenate(parts)
        soft = SCALE * np.sqrt(2 * (np.sqrt(1 + (raw / SCALE) ** 2) - 1))
        return np.asarray(np.sign(raw) * soft / TYPICAL)

    def residuals(point: np.ndarray) -> np.ndarray:
        logs, means = np.split(point, [len(FREE)])
        return np.concatenate([errors(logs), believed * (logs - common @ means), of_mean * means])

    order = np.concatenate([seen for seen, _ in picked])
    of_row = [_takes(problem.rows[i], data) for i in order]
    touches = [np.array([(p, n) in of for of in of_row]) for p, n, _ in FREE]
    fields = list(dict.fromkeys((part, field) for part, _, field in FREE))

    def derivative(point: np.ndarray) -> np.ndarray:
        """A row knows one GPU and one engine: a field of all of them is moved at once."""
        logs = point[: len(FREE)]
        base = errors(logs)
        found = np.zeros((len(order), len(FREE)))
        for part, field in fields:
            moved = np.array([part == p and field == f for p, _, f in FREE])
            change = (errors(logs + STEP * moved) - base) / STEP
            for column in np.flatnonzero(moved):
                found[:, column] = np.where(touches[column], change, 0.0)
        about = np.hstack([np.diag(believed), -believed[:, None] * common])
        none = np.zeros((len(order) + len(of_mean), len(of_mean)))
        none[len(order) :] = np.diag(of_mean)
        found = np.vstack([found, np.zeros((len(of_mean), len(FREE)))])
        whole = np.hstack([found, none])
        return np.vstack([whole[: len(order)], about, whole[len(order) :]])

    first = np.zeros(len(start)) if near is None else np.log(_values(near) / start)
    most = np.log([CEILING.get(field, np.inf) for *_, field in FREE]) - np.log(start)
    means = common.T @ first / common.sum(axis=0)
    found_at = least_squares(
        residuals,
        np.concatenate([np.minimum(first, most - 1e-6), means]),
        derivative,
        bounds=(-np.inf, np.concatenate([most, np.full(len(means), np.inf)])),
        max_nfev=evaluations,
        ftol=ENOUGH,
    )
    return rounded(changed(data, start * np.exp(found_at.x[: len(FREE)])))


def predictions(
    found: Sequence[ServingTableRow], data: dict[str, Any]
) -> list[ValidatedServingRow]:
    """Prices of rows under a data file."""
    problem = Problem(found)
    result = answers(problem.groups, len(found), problem.constants(data))
    return [
        dataclasses.replace(p, **{f: float(getattr(result, f)[i]) for f in FIELDS})
        for i, p in enumerate(problem.predicted_rows)
    ]


def show(title: str, predicted_rows: Sequence[ValidatedServingRow]) -> None:
    """A table by publisher, its data set and engine; ranking, and rows inside the interval."""
    names: dict[str, list[ValidatedServingRow]] = {}
    for one in predicted_rows:
        names.setdefault(line_name(one.row), []).append(one)
    print(f"\n{title}\n{'':34s} rows  tpot mean median  tok/s mean median  ttft median")
    lines = {name: serving_scores(members) for name, members in names.items()}
    for name, s in (
        *lines.items(),
        ("all rows", serving_scores(predicted_rows)),
        ("averaged over lines", average_serving_scores(list(lines.values()), 0)),
    ):
        figures = (s.tpot_mape, s.tpot_median_ape, s.throughput_mape, s.throughput_median_ape)
        text = [f"{x:8.1f}" if x is not None else "       -" for x in (*figures, s.ttft_median_ape)]
        print(f"{name:34s} {s.rows_used:4d} {''.join(text)}")
    for field, (low, high) in residuals(predicted_rows).items():
        ratios = [1 / (1 + e) for p in predicted_rows if (e := p.error(field)) is not None]
        inside = sum(low <= r <= high for r in ratios) / len(ratios)
        taus = rankings(predicted_rows, field)
        ranked = f"tau {np.mean(taus):.2f} of {len(taus)} groups" if taus else "no groups"
        print(f"{field}: 80% interval {low:.2f} to {high:.2f}, {inside:.0%} inside; {ranked}")


def line_name(row: ServingTableRow) -> str:
    """The line of a table that a row belongs to: its publisher, each data set of a steady load
    apart."""
    return f"{publisher(row)}, {row.source.split()[-1]}" if row.median else publisher(row)


def rankings(predicted_rows: Sequence[ValidatedServingRow], field: str) -> list[float]:
    """Kendall's tau of each group of rows that differ only in how GPUs are laid out."""
    groups: dict[tuple[Any, ...], dict[tuple[float, ...], ValidatedServingRow]] = {}
    for p in predicted_rows:
        row, at = p.row, p.row.prices.replica
        if p.targets[field] is None:
            continue
        names = ("tp", "pp", "ep", "dp")
        layout = tuple(float(getattr(at, name)[0]) for name in names)
        output = 0.0 if row.median else row.output  # measured, and never twice the same
        bits = float(at.weight[0]), float(at.expert_weight[0])
        load = round(row.load) if math.isfinite(row.load) else row.load
        same = (line_name(row), row.model, row.gpu, row.mode, bits, load, row.prompt, output)
        groups.setdefault(same, {}).setdefault(layout, p)
    found = []
    for group in groups.values():
        pairs = list(itertools.combinations(group.values(), 2))
        agree = [
            np.sign(float(a.targets[field] or 0) - float(b.targets[field] or 0))
            * np.sign(getattr(a, field) - getattr(b, field))
            for a, b in pairs
        ]
        if pairs:
            found.append(float(np.mean(agree)))
    return found


def transfer(
    found: Sequence[ServingTableRow],
    data: dict[str, Any],
    title: str,
    part: Callable[[ServingTableRow], str],
) -> list[ValidatedServingRow]:
    """Price each part of the rows with constants fitted to the other parts alone; `data`: the fit
    to all, from which the search starts."""
    left: list[ValidatedServingRow] = []
    for name in sorted({part(r) for r in found}):
        rest = [r for r in found if part(r) != name]
        held = [r for r in found if part(r) == name]
        left += predictions(held, fit(rest, data, 8, near=data))
        print(f"  fitted without {name[:90]}", flush=True)
    show(title, left)
    return left


def _values(data: dict[str, Any]) -> np.ndarray:
    return np.array([float(data[part][name][field]) for part, name, field in FREE])


def _takes(row: ServingTableRow, data: dict[str, Any]) -> tuple[tuple[str, str], tuple[str, str]]:
    """The entries whose constants a row takes."""
    return ("gpus", gpu_entry(row.gpu, data)), ("engines", row.engine)


def publisher(row: ServingTableRow) -> str:
    """Whose figure a row is: all of MLPerf's submitters are one, as are a document's versions."""
    first = re.split(r"[ /@]", row.source)[0]
    return f"{first}: {row.engine}" if first == "ai-dynamo" else first


def _run(row: ServingTableRow) -> tuple[Any, ...]:
    """Equal for rows that are one run, measured again: with one prediction and one target."""
    measured = row.tpot is None, row.throughput is None
    return row.key, row.source, row.prompt, row.output, row.load, id(row.prices), measured


def _cell(row: ServingTableRow) -> tuple[str, ...]:
    return row.source, row.engine, row.gpu, row.model


def main() -> None:
    """Fit, report, and write the data file if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("tables", nargs="+", metavar="TABLE.csv")
    parser.add_argument("--leave-one-out", action="store_true")
    parser.add_argument("--halves", action="store_true")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    everything = [
        row for table in options.tables for row in serving_rows(read_serving_table(table))[0]
    ]
    found = [r for r in everything if r.family in FITTED and (r.tpot or r.throughput)]
    data = json.loads(json.dumps(serving_constants.engine_file()))
    start = changed(data, np.array([belief(name, field)[0] for _, name, field in FREE]))
    show("as believed before any row", predictions(found, start))
    fitted = fit(found, data, near=data)
    for part, name, field in FREE:
        print(f"{part:8s} {name:16s} {field:16s} {fitted[part][name][field]:.4g}")
    predicted_rows = predictions(found, fitted)
    show("fitted", predicted_rows)
    left = predicted_rows
    if options.leave_one_out:
        left = transfer(
            found,
            fitted,
            "each publisher and engine predicted by the others' fit",
            publisher,
        )
    if options.halves:
        transfer(found, fitted, "each model priced by the others' fit", lambda r: r.model)
    if options.write:
        fitted["residuals"] = residuals(left)
        fitted["how"] = HOW
        path = Path(serving_constants.__file__).parent / "data" / "serving.json"
        path.write_text(json.dumps(fitted, indent=1) + "\n")


def residuals(predicted_rows: Sequence[ValidatedServingRow]) -> dict[str, list[float]]:
    """Measured over predicted at the 10th and the 90th percentile, each group counting equally."""
    found = {}
    for field in FIELDS:
        ratios, weights = [], []
        counts: dict[str, int] = {}
        for p in predicted_rows:
            counts[serving_group(p.row)] = counts.get(serving_group(p.row), 0) + 1
        for p in predicted_rows:
            error = p.error(field)
            if error is not None:
                ratios.append(1 / (1 + error))
                weights.append(1 / math.sqrt(counts[serving_group(p.row)]))
        order = np.argsort(ratios)
        share = np.cumsum(np.array(weights)[order]) / np.sum(weights)
        sorted_ratios = np.array(ratios)[order]
        found[field] = [
            round(float(sorted_ratios[np.searchsorted(share, level)]), 4) for level in (0.1, 0.9)
        ]
    return found


assert all(engine_chain(engine)[0] == engine for engine in ENGINES)
assert gpu_entry("A100-PCIe-80") == "A100-PCIe"

if __name__ == "__main__":
    main()
