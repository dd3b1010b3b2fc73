"""The stops of the tour: each a claim, predicted by a formula or the planner, run, and judged.

A verdict follows from the two numbers. What a stop says in words lies in `reporting/words`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable

from hocket.jobs.tour_runner import MODEL, Guide
from hocket.spec.capabilities import runs
from hocket.spec.comparison import StrategyResult
from hocket.spec.layout import Layout
from hocket.spec.link_kinds import kind
from hocket.spec.tour import Stop
from hocket.spec.units import format_bytes, format_seconds, parse_bytes

FAST, SLOW = "nvlink3", "pcie4"
"""Links of an A100 with and without NVLink."""

FLOAT = 4
"""Bytes of a number in fp32, which the tour computes in."""

NEAR = 0.1
"""Difference of two shares of a step that still counts as the same."""


def _verdict(holds: bool, here: str = "true") -> str:
    return here if holds else "false"


def threads(guide: Guide) -> Stop:
    """Data parallel in one process: what the first device bears."""
    one, found = guide.way("dp1"), guide.way("dp2:data_parallel=threads")
    parameters = one.peak_rank["parameters"]
    vocabulary = guide.source.dimensions.vocab_size
    optimizer = 2 * parameters  # AdamW's two moments
    outputs = 2 * guide.tokens * vocabulary * FLOAT  # all logits and their gradient
    first, other = (row["total"] for row in found.memory)
    predicted, measured = optimizer + outputs, first - other
    (broadcast,) = (row for row in found.collectives if row["name"] == "broadcast")
    most = max(first, 1)
    return Stop(
        key="threads",
        command=f"hocket compare {MODEL} --strategies threads data",
        verdict=_verdict(bool(found.equal) and abs(measured - predicted) < NEAR * predicted),
        values={
            "predicted": format_bytes(predicted),
            "optimizer": format_bytes(optimizer),
            "outputs": format_bytes(outputs),
            "measured": format_bytes(measured),
            "first": format_bytes(first),
            "other": format_bytes(other),
            "broadcast": format_bytes(broadcast["bytes"]),
        },
        bars=tuple(
            (name, nbytes / most, format_bytes(nbytes))
            for name, nbytes in (("0", first), ("1", other))
        ),
    )


def processes(guide: Guide) -> Stop:
    """Data parallel in processes: only gradients travel."""
    one, found = guide.way("dp1"), guide.way("dp2")
    thread = guide.way("dp2:data_parallel=threads")
    predicted = one.peak_rank["gradients"]
    rows = [r for r in found.collectives if r["name"] == "all-reduce" and r["axis"] == "dp"]
    measured = sum(row["bytes"] for row in rows) / found.strategy.layout.world_size
    totals = {row["total"] for row in found.memory}
    near = abs(measured - predicted) < 0.01 * predicted
    return Stop(
        key="processes",
        command=f"hocket compare {MODEL} --strategies threads data",
        verdict=_verdict(bool(found.equal) and near and len(totals) == 1),
        values={
            "predicted": format_bytes(predicted),
            "measured": format_bytes(measured),
            "total": format_bytes(max(totals)),
            "threads_cost": _more(thread),
            "processes_cost": _more(found),
        },
        bars=tuple(
            (name, (o.loaded_seconds or 0.0) / _longest(thread, found), _step(o))
            for name, o in (("threads", thread), ("processes", found))
        ),
    )


def _longest(*outcomes: StrategyResult) -> float:
    return max(o.loaded_seconds or o.step_seconds for o in outcomes)


def _more(found: StrategyResult) -> str:
    """How much longer a step takes with a busy input pipeline."""
    more = (found.loaded_seconds or found.step_seconds) - found.step_seconds
    return f"{'-' if more < 0 else '+'}{format_seconds(abs(more))}"


def _step(found: StrategyResult) -> str:
    return f"{format_seconds(found.step_seconds)} -> {format_seconds(found.loaded_seconds or 0.0)}"


def zero(guide: Guide) -> Stop:
    """Replicas that share what each of them would hold (ZeRO)."""
    plain = guide.way("dp2").peak_rank
    stages = [stage for stage in (1, 2, 3) if runs(Layout(dp=2, zero=stage))]
    found = {stage: guide.way(f"dp2:zero={stage}") for stage in stages}
    last = stages[-1]
    kinds = ("parameters", "gradients", "optimizer")
    state = sum(plain[kind] for kind in kinds)
    whole = 0 if last == 3 else plain["parameters"]
    predicted = whole + (state - whole) / 2
    measured = sum(found[last].peak_rank[kind] for kind in kinds)
    limit = f"{math.floor((plain['total'] + found[last].peak_rank['total']) / 2e6)}MB"
    refusal, _, _ = guide.allowed("dp2", limit)
    refused, _, counted = guide.allowed(f"dp2:zero={last}", limit)
    near = abs(measured - predicted) < 0.05 * predicted
    equal = all(outcome.equal for outcome in found.values())
    return Stop(
        key="zero",
        command=f"hocket compare {MODEL} --memory-per-rank {limit} --strategies data zero{last}",
        verdict=_verdict(near and equal and bool(refusal) and not refused, "true_if"),
        values={
            "stage": str(last),
            "state": format_bytes(state),
            "predicted": format_bytes(predicted),
            "measured": format_bytes(measured),
            "limit": format_bytes(parse_bytes(limit)),
            "counted": format_bytes(counted),
            "total": format_bytes(plain["total"]),
        },
        bars=(
            ("dp2", 1.0, format_bytes(plain["total"])),
            *(
                (f"ZeRO-{stage}", o.peak_rank["total"] / plain["total"], _kinds(o))
                for stage, o in found.items()
            ),
            ("|", parse_bytes(limit) / plain["total"], format_bytes(parse_bytes(limit))),
        ),
    )


def _kinds(found: StrategyResult) -> str:
    """The peak rank's bytes in all, and of what is kept from step to step."""
    kinds = ("parameters", "gradients", "optimizer")
    each = " + ".join(format_bytes(found.peak_rank[kind]) for kind in kinds)
    return f"{format_bytes(found.peak_rank['total'])} ({each})"


def layers(guide: Guide) -> Stop:
    """Layer-wise splitting: 48 layers over 4 devices, one batch at a time."""
    even = guide.way("pp4:schedule=sequential,pipeline_split=even,microbatches=1", 48)
    balanced = guide.way("pp4:microbatches=4", 48)
    predicted = (4 - 1) / 4
    near = abs(even.bubble - predicted) < NEAR
    return Stop(
        key="layers",
        command="hocket schedule --layout pp4 --schedule sequential --microbatches 1",
        verdict=_verdict(near and even.layers == (12, 12, 12, 12), "true_if"),
        values={
            "predicted": f"{predicted:.0%}",
            "measured": f"{even.bubble:.0%}",
            "even": ", ".join(map(str, even.layers)),
            "balanced": "-".join(map(str, balanced.layers)),
        },
        drawing="\n".join(
            f"{rank}  {'·' * 4 * rank}████{'·' * 4 * (3 - rank)}" for rank in range(4)
        ),
    )


def microbatch_stop(guide: Guide) -> Stop:
    """What microbatches do to the idle time of a pipeline."""
    counts = [m for m in (1, 2, 4, 8) if m <= guide.batch]
    found = [guide.way(f"pp2:schedule=gpipe,microbatches={m}").bubble for m in counts]
    theory = [1 / (m + 1) for m in counts]
    falls = found[-1] < found[0] / 2
    near = all(abs(a - b) < NEAR for a, b in zip(found, theory, strict=True))
    rows = []
    for m, here, there in zip(counts, found, theory, strict=True):
        rows.append((f"m={m} {{predicted}}", there, f"{there:.0%}"))
        rows.append(("{measured}", here, f"{here:.0%}"))
    return Stop(
        key="microbatches",
        command=f"hocket compare {MODEL} --sweep microbatches",
        verdict=_verdict(falls and near, "true_if"),
        values={
            "predicted": ", ".join(f"{share:.0%}" for share in theory),
            "measured": ", ".join(f"{share:.0%}" for share in found),
        },
        bars=tuple(rows),
    )


def column_stop(guide: Guide) -> Stop:
    """Why the first product is split by columns and the second by rows."""
    generator = random.Random(0)

    def matrix(rows: int, width: int) -> Matrix:
        return [[generator.gauss(0, 1) for _ in range(width)] for _ in range(rows)]

    x, first, second = matrix(8, 16), matrix(16, 32), matrix(32, 16)
    whole = _product(_gelu(_product(x, first)), second)
    halves = [slice(0, 16), slice(16, 32)]
    by_columns = _sum(
        _product(_gelu(_product(x, [row[half] for row in first])), second[half]) for half in halves
    )
    parts = [slice(0, 8), slice(8, 16)]
    by_rows = _product(
        _sum(_gelu(_product([row[part] for row in x], first[part])) for part in parts), second
    )
    differences = [_apart(found, whole) for found in (by_columns, by_rows)]
    largest = max(abs(value) for row in whole for value in row)
    return Stop(
        key="columns",
        command=f"hocket check {MODEL} --layout tp2",
        verdict=_verdict(differences[0] < 1e-9 * largest and differences[1] > 0.1 * largest),
        values={
            "columns": f"{differences[0]:.0e}",
            "rows": f"{differences[1]:.2g}",
            "largest": f"{largest:.2g}",
        },
        drawing="x ┬─ A[:, left]  ─ f ─ B[left , :] ─┐\n  └─ A[:, right] ─ f ─ B[right, :] ─┴─ sum",
    )


Matrix = list[list[float]]


def _product(left: Matrix, right: Matrix) -> Matrix:
    columns = list(zip(*right, strict=True))
    return [
        [sum(a * b for a, b in zip(row, column, strict=True)) for column in columns] for row in left
    ]


def _gelu(values: Matrix) -> Matrix:
    return [[0.5 * v * (1 + math.erf(v / math.sqrt(2))) for v in row] for row in values]


def _sum(matrices: Iterable[Matrix]) -> Matrix:
    """The sum of matrices of one shape."""
    return [
        [sum(values) for values in zip(*rows, strict=True)] for rows in zip(*matrices, strict=True)
    ]


def _apart(one: Matrix, other: Matrix) -> float:
    """The largest difference of two entries."""
    rows = zip(one, other, strict=True)
    return max(abs(a - b) for mine, theirs in rows for a, b in zip(mine, theirs, strict=True))


def half_layers(guide: Guide) -> Stop:
    """How many all-reduces a layer needs under tensor parallelism."""
    few, many = 2, 6
    counts = []
    for depth in (few, many):
        found = guide.way("tp2", depth)
        rows = [
            r
            for r in found.collectives
            if r["name"] == "all-reduce" and r["axis"] == "tp" and r["phase"] == "microbatch"
        ]
        counts.append(sum(r["count"] for r in rows) // 2)
    predicted, measured = 4, (counts[1] - counts[0]) / (many - few)
    hidden = guide.source.dimensions.hidden_size
    return Stop(
        key="half_layers",
        command=f"hocket compare {MODEL} --strategies tensor",
        verdict=_verdict(measured == predicted),
        values={
            "predicted": str(predicted),
            "measured": f"{measured:g}",
            "bytes": format_bytes(guide.tokens * hidden * FLOAT),
            "shallow": str(counts[0]),
            "deep": str(counts[1]),
            "few": str(few),
            "many": str(many),
        },
        drawing="F  attention ─ all-reduce ─ feed-forward ─ all-reduce\n"
        "B  all-reduce ─ attention ─ all-reduce ─ feed-forward",
    )


def three(guide: Guide) -> Stop:
    """Data, pipeline and tensor parallelism together."""
    one, found = guide.way("dp1"), guide.way("dp2.pp2.tp2:microbatches=4")
    whole = one.peak_rank["parameters"]
    shares = [row["parameters"] / whole for row in found.memory]
    mean = sum(shares) / len(shares)
    assert found.worst is not None
    return Stop(
        key="three",
        command=f"hocket check {MODEL} --layout dp2.pp2.tp2",
        verdict=_verdict(bool(found.equal) and abs(mean - 0.25) < 0.02),
        values={
            "predicted": "25%",
            "measured": f"{mean:.1%}",
            "peak_rank": f"{max(shares):.1%}",
            "worst": f"{found.worst:.0%}",
        },
        bars=tuple((str(rank), share, f"{share:.1%}") for rank, share in enumerate(shares)),
    )


def links_compared(guide: Guide) -> Stop:
    """NVLink and PCIe in the same unit, and what a step makes of the difference."""
    nvlink, pcie = kind(FAST), kind(SLOW)
    predicted = nvlink.rate / pcie.rate
    ratios = [
        guide.wide(layout, SLOW).step_seconds / guide.wide(layout, FAST).step_seconds
        for layout in (_TENSOR, _PIPELINE)
    ]
    rows = [("600 : 16", 37.5, "37"), ("300 : 31.5", predicted, f"{predicted:.1f}")]
    rows += [(f"tp2 {SLOW}", ratios[0], f"{ratios[0]:.1f}")]
    rows += [(f"pp2 {SLOW}", ratios[1], f"{ratios[1]:.1f}")]
    return Stop(
        key="links",
        command="hocket plan llama-2-7b --links --cluster 1x8xA100-SXM-80 --layout tp8",
        verdict=_verdict(1 < ratios[0] < predicted, "units"),
        values={
            "nvlink": f"{nvlink.rate / 1e9:g} GB/s",
            "pcie": f"{pcie.rate / 1e9:g} GB/s",
            "predicted": f"{predicted:.1f}",
            "measured": f"{ratios[0]:.1f}",
            "pipeline": f"{ratios[1]:.1f}",
        },
        bars=tuple((name, value / 37.5, label) for name, value, label in rows),
    )


_TENSOR, _PIPELINE = "tp2:microbatches=2", "pp2:microbatches=2"


def crossover(guide: Guide) -> Stop:
    """Which split is faster over which link."""
    measured, predicted = [], []
    for link in (FAST, SLOW):
        tensor, pipeline = guide.wide(_TENSOR, link), guide.wide(_PIPELINE, link)
        measured.append(tensor.step_seconds / pipeline.step_seconds)
        predicted.append(tensor.predicted["step_seconds"] / pipeline.predicted["step_seconds"])
    turns = measured[0] < 1 < measured[1]
    crossover_predicted = predicted[0] < 1 < predicted[1]
    most = max(*measured, *predicted)
    names = (f"{FAST} {{predicted}}", "{measured}", f"{SLOW} {{predicted}}", "{measured}")
    values = (predicted[0], measured[0], predicted[1], measured[1])
    return Stop(
        key="crossover",
        command="hocket train tiny-llama --data CHANGELOG.md --layout tp2 --emulate-links pcie4 "
        "--steps 20",
        verdict=_verdict(turns and crossover_predicted),
        values={
            "slow": kind(SLOW).title.removesuffix(" x16"),
            "fast": kind(FAST).title.removesuffix(", switch"),
            "predicted_fast": f"{predicted[0]:.0%}",
            "predicted_slow": f"{predicted[1]:.0%}",
            "measured_fast": f"{measured[0]:.0%}",
            "measured_slow": f"{measured[1]:.0%}",
        },
        bars=tuple((n, v / most, f"{v:.0%}") for n, v in zip(names, values, strict=True)),
    )


def pool_stop(guide: Guide) -> Stop:
    """A model that one rank may not hold, on two."""
    _, needs, _ = guide.allowed("dp1", None)
    limit = f"{math.floor(0.8 * needs / 1e6)}MB"
    refusal, _, _ = guide.allowed("dp1", limit)
    refused, predicted, counted = guide.allowed("pp2:microbatches=4", limit)
    holds = bool(refusal) and not refused and abs(predicted - counted) < 0.05 * counted
    allowed = parse_bytes(limit)
    return Stop(
        key="pool",
        command=f"hocket compare {MODEL} --memory-per-rank {limit} --strategies 1f1b tensor",
        verdict=_verdict(holds, "true_if"),
        values={
            "needs": format_bytes(needs),
            "limit": format_bytes(allowed),
            "predicted": format_bytes(predicted),
            "measured": format_bytes(counted),
        },
        bars=(
            ("dp1", 1.0, format_bytes(needs)),
            ("|", allowed / needs, format_bytes(allowed)),
            ("pp2", counted / needs, format_bytes(counted)),
        ),
    )


def serving(guide: Guide) -> Stop:
    """How many GPUs a service of 175 billion parameters takes."""
    from hocket.jobs.serving.plan import serve_plan
    from hocket.planning.service.memory import pool_gpus

    layers, width, context = 96, 12288, 2048
    size = 175e9 * 2
    cache = layers * 2 * width * 2 * context  # keys and values, 16 bits, every head
    by_hand = []
    for gigabytes, wanted in ((40, (1, 8, 23)), (80, (1, 23, 53))):
        held = [pool_gpus(n, memory=gigabytes * 1e9, weights=size, cache=cache) for n in wanted]
        counts = ", ".join(f"{gpus} ({n})" for gpus, n in zip(held, wanted, strict=True))
        by_hand.append(f"{gigabytes} GB: {counts}")
    (plan,) = serve_plan(
        "gpt3-175b", cluster="A100-40,A100-80,H100-80", requests_per_second=1.0, tpot_ms=100.0
    )
    found = {kind.gpu: kind for kind in plan.kinds if kind.best is not None}
    rows = []
    for name, answered in found.items():
        assert answered.best is not None
        rows.append((name, answered.best.layout.world_size, answered.memory.gpus))
    most = max(need for _, need, _ in rows)
    return Stop(
        key="serving",
        command="hocket plan gpt-4 --serve",
        verdict=_verdict(len(rows) == 3, "true_if"),
        values={
            "weights": format_bytes(size),
            "cache": format_bytes(cache),
            "predicted": "; ".join(by_hand),
            "least": ", ".join(f"{least} {name}" for name, _, least in rows),
            "need": ", ".join(f"{need} {name}" for name, need, _ in rows),
        },
        bars=tuple(
            row
            for name, need, least in rows
            for row in ((name, least / most, str(least)), ("1/s", need / most, str(need)))
        ),
    )


STOPS: dict[str, Callable[[Guide], Stop]] = {
    "threads": threads,
    "processes": processes,
    "zero": zero,
    "layers": layers,
    "microbatches": microbatch_stop,
    "columns": column_stop,
    "half_layers": half_layers,
    "three": three,
    "links": links_compared,
    "crossover": crossover,
    "pool": pool_stop,
    "serving": serving,
}
"""Every stop by its key, in the order they are walked."""

TIMED = frozenset({"layers", "microbatches", "links", "crossover"})
"""Stops whose verdict depends on measured times, which other programs on the machine change."""
