"""Payload: a Record as the plain JSON that the page's own script draws from.

Everything that is said in words about numbers is decided here, so that the text and the page say
the same; the script only draws and formats.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from hocket.reporting.decomposition import PARTS, Decomposition, decompose, groups
from hocket.reporting.links import links_payload
from hocket.reporting.record import RunRecord
from hocket.spec.errors import HocketError
from hocket.spec.forecast import KINDS
from hocket.spec.layout import AXES, Layout
from hocket.spec.links import Links
from hocket.spec.timeline import Timeline
from hocket.spec.units import format_bytes, format_seconds

MOST_EVENTS = 30_000
"""Of one timeline on a page; beyond it the shortest are left out, and the page says so."""

MOST_POINTS = 2_000
"""Of one curve on a page; a longer one is thinned evenly."""

AXIS_WORDS = {
    "dp": "data parallel: sums gradients over replicas",
    "pp": "pipeline parallel: passes activations between stages",
    "tp": "tensor parallel: completes every half-layer",
    "cp": "context parallel: passes keys and values",
    "ep": "expert parallel: sends tokens to their experts",
    "model": "all ranks of one replica: the norm of the gradient",
    "world": "all ranks: the loss",
    "embedding": "first and last stage: tied embeddings",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parts:
    """Where a run's step goes, measured and predicted; None where there is no timeline."""

    measured: Decomposition | None
    predicted: Decomposition | None


def run_parts(record: RunRecord, own_bubble: float | None) -> Parts:
    """Decompose both timelines of a run by the same rules."""
    layout = record.layout
    return Parts(
        measured=None
        if record.measured is None
        else decompose(record.measured, layout, own_bubble=own_bubble),
        predicted=None
        if record.predicted is None
        else decompose(record.predicted, layout, own_bubble=own_bubble),
    )


def run_payload(record: RunRecord, own_bubble: float | None = None) -> dict[str, Any]:
    """One run as plain JSON values.

    Args:
        record: what its folder holds.
        own_bubble: idle share of its schedule where all stages are equal; None if unknown.
    """
    parts = run_parts(record, own_bubble)
    return clean(
        {
            "name": record.name,
            "model": record.spec.model if record.spec else "",
            "layout": str(record.layout) if record.layout else "",
            "words": in_words(record.layout) if record.layout else "",
            "state": _state(record),
            "figures": run_figures(record),
            "verdict": run_verdict(parts),
            "timelines": {
                which: _timeline(timeline)
                for which, timeline in (
                    ("predicted", record.predicted),
                    ("measured", record.measured),
                )
                if timeline is not None
            },
            "parts": {
                which: {"mean": found.mean, "ranks": list(found.ranks), "duration": found.duration}
                for which, found in (("predicted", parts.predicted), ("measured", parts.measured))
                if found is not None
            },
            "memory": _memory(record),
            "traffic": traffic(record, parts),
            "curves": _curves(record),
            "mesh": _mesh(record),
            "machine": links_payload(record.machine, record.layout),
            "alternatives": [
                dataclasses.asdict(a)
                for a in (record.forecast.alternatives if record.forecast else ())
            ],
            "recorded_step": record.recorded_step,
            "facts": _facts(record),
            "notes": list(record.notes),
        }
    )


def clean(value: Any) -> Any:
    """The same with None for numbers that JSON does not know."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: clean(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [clean(each) for each in value]
    return value


# --- words ---------------------------------------------------------------------------------


def in_words(layout: Layout) -> str:
    """`8 ranks: 2 replicas of 2 pipeline stages, each split over 2 ranks`."""
    if layout.data_parallel == "threads":
        return f"1 process, {layout.dp} replicas in threads"
    if layout.world_size == 1:
        return "1 rank: nothing is split"
    words = []
    if layout.dp > 1:
        words.append(f"{layout.dp} replicas of the model (dp)")
    if layout.pp > 1:
        words.append(f"{layout.num_stages} pipeline stages on {layout.pp} ranks (pp)")
    if layout.tp > 1:
        words.append(f"every layer split over {layout.tp} ranks (tp)")
    if layout.cp > 1:
        words.append(f"every sequence split over {layout.cp} ranks (cp)")
    return f"{layout.world_size} ranks: " + ", ".join(words)


def run_verdict(parts: Parts) -> str:
    """One sentence: how far the prediction was off, and which part the difference lies in."""
    measured, predicted = parts.measured, parts.predicted
    if measured is None:
        return ""
    where = measured.mean
    largest = max(PARTS, key=lambda part: where[part])
    if predicted is None:
        share = where[largest] / measured.duration if measured.duration else 0.0
        return (
            f"The recorded step took {format_seconds(measured.duration)}; "
            f"{share:.0%} of it, averaged over the ranks, is {largest}."
        )
    gap = predicted.duration - measured.duration
    relative = gap / measured.duration if measured.duration else 0.0
    said = (
        f"Of the recorded step, {format_seconds(predicted.duration)} were predicted and "
        f"{format_seconds(measured.duration)} measured: the prediction was "
        f"{abs(relative):.1%} too {'high' if gap > 0 else 'low'}."
    )
    then = predicted.mean
    part = max(PARTS, key=lambda name: abs(where[name] - then[name]))
    by = where[part] - then[part]
    return said + (
        f" The largest difference is in {part}: {format_seconds(abs(by))} "
        f"{'more' if by > 0 else 'less'} than predicted."
    )


def _state(record: RunRecord) -> dict[str, Any]:
    steps = record.spec.options.steps if record.spec else None
    text = f"{record.steps_done} of {steps} steps" if steps else f"{record.steps_done} steps"
    return {"finished": record.finished, "text": text}


# --- numbers -------------------------------------------------------------------------------


def run_figures(record: RunRecord) -> list[dict[str, Any]]:
    """The figures that a run is judged by: title, unit, measured and predicted (None: unknown)."""
    forecast = record.forecast
    losses, held = record.column("loss"), record.column("held_out_loss")
    perplexity = record.column("held_out_perplexity")
    seconds = record.step_seconds
    tokens = None
    if record.spec is not None:
        tokens = record.spec.workload.global_batch * record.spec.workload.seq_len
    peak = max((row["total"] for row in record.memory), default=None)
    if peak is None and record.measured is not None and record.measured.peak_bytes:
        peak = max(record.measured.peak_bytes)
    mfu = record.column("mfu", own=True)
    pipelined = record.layout is None or record.layout.pp > 1
    rows: list[tuple[str, str, str, float | None, float | None]] = [
        (
            "Time of a step",
            "median of the steps",
            "seconds",
            seconds,
            forecast.step_seconds if forecast else None,
        ),
        (
            "Throughput",
            "tokens trained a second",
            "rate",
            tokens / seconds if tokens and seconds else None,
            forecast.tokens_per_second if forecast else None,
        ),
        (
            "Memory",
            "peak tensor bytes per rank",
            "bytes",
            peak,
            max(forecast.peak_bytes, default=None) if forecast else None,
        ),
    ]
    if pipelined:
        rows.append(
            (
                "Bubble",
                "fraction of the pipeline in which a rank does not compute",
                "share",
                record.measured.bubble if record.measured is not None else None,
                forecast.bubble if forecast else None,
            )
        )
    rows.append(
        (
            "Loss",
            "of the last step"
            + (f", from {losses[0]:.4g}" if losses else "")
            + (f"; {held[-1]:.4g} on held-out text" if held else "")
            + (f" (perplexity {perplexity[-1]:.4g})" if held and perplexity else ""),
            "loss",
            losses[-1] if losses else None,
            None,
        )
    )
    if mfu:
        rows.append(
            (
                "MFU",
                "fraction of the devices' peak that the model's arithmetic uses",
                "share",
                sorted(mfu)[len(mfu) // 2],
                None,
            )
        )
    return [
        {"title": title, "what": what, "unit": unit, "measured": now, "predicted": then}
        for title, what, unit, now, then in rows
        if now is not None or then is not None
    ]


def traffic(record: RunRecord, parts: Parts) -> list[dict[str, Any]]:
    """By mesh axis: what it does, the link it crosses, messages, bytes, seconds of all ranks."""
    rows: dict[str, dict[str, Any]] = defaultdict(lambda: {"count": 0, "bytes": 0, "names": []})
    for row in record.traffic:
        entry = rows[row["axis"]]
        entry["count"] += row["count"]
        entry["bytes"] += row["bytes"]
        if row["name"] not in entry["names"]:
            entry["names"].append(row["name"])
    links = links_of(record)
    then: dict[str, int] = defaultdict(int)
    for row in record.forecast.collectives if record.forecast else ():
        then[str(row.get("axis"))] += int(row.get("bytes", 0))
    return [
        {
            "axis": axis,
            "what": AXIS_WORDS.get(axis, ""),
            "link": links.get(axis, ""),
            **rows[axis],
            "predicted_bytes": then[axis] if then else None,
            "measured": None if parts.measured is None else parts.measured.axes.get(axis, 0.0),
            "predicted": None if parts.predicted is None else parts.predicted.axes.get(axis, 0.0),
        }
        for axis in sorted(rows, key=lambda a: -rows[a]["bytes"])
    ]


def links_of(record: RunRecord) -> dict[str, str]:
    """Axis to the name of the link that it crosses, as far as that is known."""
    emulated, layout = _emulated_links(record), record.layout
    known = dict(record.forecast.links) if record.forecast else {}
    if emulated is None or layout is None:
        return known
    axes = {row["axis"] for row in record.traffic} | {a for a in AXES if layout.degree(a) > 1}
    for axis in axes:
        found = [emulated.tier(group) for group in groups(layout, axis) if len(group) > 1]
        if found:
            known[axis] = emulated.tiers[max(found)][0].name
    return known


def _emulated_links(record: RunRecord) -> Links | None:
    """The links that the run was made to feel (`--emulate-links`)."""
    text = record.spec.options.emulate_links if record.spec else None
    try:
        return None if text is None else Links.parse(text)
    except HocketError:  # of another version
        return None


def _timeline(timeline: Timeline) -> dict[str, Any]:
    """Columns of events; times in microseconds. Names, kinds and axes by their number."""
    events = timeline.events
    left_out = 0
    if len(events) > MOST_EVENTS:
        kept = sorted(events, key=lambda e: e.start - e.end)[:MOST_EVENTS]
        left_out = len(events) - MOST_EVENTS
        events = tuple(sorted(kept, key=lambda e: (e.rank, e.start, e.end)))
    kinds: dict[str, int] = {}
    axes: dict[str, int] = {}
    names: dict[str, int] = {}

    def number(table: dict[str, int], word: str | None) -> int:
        return -1 if word is None else table.setdefault(word, len(table))

    columns: dict[str, list[Any]] = {
        "rank": [e.rank for e in events],
        "lane": [int(e.lane != "compute") for e in events],
        "kind": [number(kinds, e.kind) for e in events],
        "name": [number(names, e.name) for e in events],
        "axis": [number(axes, e.axis) for e in events],
        "stage": [-1 if e.stage is None else e.stage for e in events],
        "microbatch": [-1 if e.microbatch is None else e.microbatch for e in events],
        "bytes": [e.bytes for e in events],
        "start": [round(e.start * 1e6, 1) for e in events],
        "length": [round((e.end - e.start) * 1e6, 1) for e in events],
    }
    return {
        "ranks": timeline.num_ranks,
        "duration": timeline.duration,
        "bubble": timeline.bubble,
        "kinds": list(kinds),
        "axes": list(axes),
        "names": list(names),
        "left_out": left_out,
        "events": columns,
    }


def _memory(record: RunRecord) -> dict[str, Any]:
    forecast = record.forecast
    measured: Sequence[Mapping[str, int]] = record.memory
    if not measured and record.measured is not None:
        measured = [{"total": size} for size in record.measured.peak_bytes]
    known = [k for row in (forecast.memory if forecast else ()) for k in row]
    kinds = [*KINDS, *sorted({k for k in known if k not in (*KINDS, "total")})]
    threads = record.layout is not None and record.layout.data_parallel == "threads"
    return {
        "holder": "replica" if threads else "rank",
        "kinds": kinds,
        "measured": [dict(row) for row in measured],
        "predicted": [dict(row) for row in forecast.memory] if forecast else [],
        "capacity": (forecast.capacity or None) if forecast else None,
    }


def _curves(record: RunRecord) -> dict[str, Any]:
    rows = record.metrics
    every = max(1, -(-len(rows) // MOST_POINTS))
    kept = [row for at, row in enumerate(rows) if at % every == 0 or at == len(rows) - 1]

    def points(name: str, among: Sequence[Mapping[str, Any]]) -> list[list[float]]:
        return [
            [int(row["step"]), float(row[name])]
            for row in among
            if isinstance(row.get(name), int | float) and math.isfinite(row[name])
        ]

    return {
        "loss": points("loss", kept),
        "held_out": points("held_out_loss", rows),
        "tokens_per_second": points("tokens_per_second", kept),
        "mfu": points("mfu", kept),
    }


def _mesh(record: RunRecord) -> dict[str, Any] | None:
    layout = record.layout
    if layout is None:
        return None
    threads = layout.data_parallel == "threads"
    count = layout.dp if threads else layout.world_size
    at = [
        {axis: rank if axis == "dp" else 0 for axis in AXES} if threads else layout.coordinate(rank)
        for rank in range(count)
    ]
    stages: list[list[int]] = [[] for _ in range(layout.pp)]
    holders = record.schedule.stage_ranks if record.schedule else range(layout.num_stages)
    for stage, rank in enumerate(holders):
        if rank < len(stages):
            stages[rank].append(stage)
    forecast = record.forecast
    emulated = _emulated_links(record)
    domain = emulated.tiers[0][1] if emulated is not None else None
    return {
        "domain": domain or 0,
        "within": emulated.tiers[0][0].name if emulated is not None else "",
        "beyond": emulated.tiers[-1][0].name if emulated is not None else "",
        "links": links_of(record),
        "degrees": {axis: layout.degree(axis) for axis in AXES},
        "order": list(layout.order),
        "ranks": at,
        "stages": stages,
        "layers": list(layout.pipeline_split) if isinstance(layout.pipeline_split, tuple) else [],
        "machine": f"machine {forecast.cluster}" if forecast and forecast.cluster else "",
        "threads": threads,
    }


def _facts(record: RunRecord) -> list[list[str]]:
    spec = record.spec
    if spec is None:
        return [["Folder", str(record.path)]]
    config, work, options = spec.config, spec.workload, spec.options
    found = [
        ["Folder", str(record.path)],
        ["Model", f"{spec.model} ({config.get('model_type', 'unknown family')})"],
        ["Weights", spec.weights or f"random, from seed {options.seed}"],
        ["Layout", str(spec.layout)],
        ["Order of axes", "-".join(spec.layout.order) + ", the fastest first"],
        ["Batch", f"{work.global_batch} sequences of {work.seq_len} tokens, {work.dtype}"],
        ["Data", ", ".join(spec.data) or "none"],
        [
            "Device",
            f"{options.device}, backend {options.backend}, {options.threads} threads a rank",
        ],
        *([["Links", f"emulated as {options.emulate_links}"]] if options.emulate_links else []),
        *(
            [["Memory per rank", f"limited to {options.memory_per_rank}"]]
            if options.memory_per_rank
            else []
        ),
        *(
            [
                f"Attention, {row['layer']}",
                f"{row['kernel']} ({row['layers']} layers; {row['reason']})",
            ]
            for row in record.attention
        ),
        [
            "Learning rate",
            f"{options.lr:g} to {options.min_lr:g}, clipped at {options.max_grad_norm:g}",
        ],
    ]
    forecast = record.forecast
    if forecast is not None:
        found.insert(1, ["Predicted for", forecast.basis])
        if forecast.step_range:
            low, high = map(format_seconds, forecast.step_range)
            found.append(["Predicted time of a step, 80% of runs", f"{low} to {high}"])
        found += [["Assumed", note] for note in forecast.notes]
        if forecast.capacity:
            found.append(["Memory a rank may use", format_bytes(forecast.capacity)])
    return found
