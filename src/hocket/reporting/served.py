"""Served: what a server's run folder tells: its forecast compared with what was measured.

A server that was killed leaves what it had written last. Whatever can be read is kept; what cannot
is named in `notes`, and nothing is made up for it.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hocket.reporting.record import cores_of_others, disturbed, reader
from hocket.spec.files import parse_json
from hocket.spec.ledger import DISTURBED
from hocket.spec.run import RunFolder, RunSpec
from hocket.spec.serving import num_replicas
from hocket.spec.serving_forecast import (
    Decode,
    Need,
    Prefill,
    ServiceLoad,
    ServingForecast,
    ServingMeasured,
)
from hocket.spec.timeline import Timeline
from hocket.spec.units import format_bytes, format_count, format_seconds

MEASURED = "measured.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerRecord:
    """One server.

    Attributes:
        path: of its folder. spec: what was asked for; None where run.json is gone.
        forecast: None where nothing was predicted. measured: what it did.
        loads, needs: simulated from the steps that were measured; empty where too few were.
        timeline: of a window of steps, where one was recorded.
        notes: sentences about what is missing or could not be read.
    """

    path: Path
    spec: RunSpec | None = None
    forecast: ServingForecast | None = None
    measured: ServingMeasured | None = None
    loads: tuple[ServiceLoad, ...] = ()
    needs: tuple[Need, ...] = ()
    timeline: Timeline | None = None
    notes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The folder's own name."""
        return self.path.resolve().name

    @property
    def replicas(self) -> int:
        """Of the model."""
        return 1 if self.spec is None else num_replicas(self.spec.layout)


@dataclasses.dataclass(frozen=True)
class ServedFigure:
    """A figure, predicted and measured; `unit` is `seconds`, `bytes`, `tokens`, `rate` or ``."""

    title: str
    unit: str
    predicted: float | None
    measured: float | None
    count: int = 0

    @property
    def off(self) -> float | None:
        """How far the prediction was off, as a share of what was measured."""
        if self.predicted is None or not self.measured:
            return None
        return self.predicted / self.measured - 1


def is_served(path: Path) -> bool:
    try:
        return bool(parse_json((path / "run.json").read_text())["command"] == "serve")
    except (OSError, ValueError, KeyError, TypeError):
        return (path / MEASURED).exists()


def read_served(path: Path) -> ServerRecord:
    """Read a server's folder, complete or not."""
    folder = RunFolder(path)
    notes: list[str] = []

    take = reader(notes)
    spec = take(folder.spec_file, RunSpec.from_json, "run.json is missing: the layout is unknown")
    forecast = take(
        folder.forecast_file, ServingForecast.from_json, "the folder holds no forecast.json"
    )
    measured = take(
        path / MEASURED, ServingMeasured.from_json, "nothing was measured: it was never ready"
    )
    if forecast is not None and not forecast.known:
        notes.append(f"nothing was predicted: {forecast.why}")
        forecast = None
    if measured is not None and not measured.requests:
        notes.append("no request has been answered to its end")
    if measured is not None and measured.restarts:
        notes.append(f"replicas died and were started again {_times(measured.restarts)}")
    others = take(folder.background_load_file, cores_of_others, "")
    if others is not None and others > DISTURBED:
        notes.append(disturbed(others))
    timeline = take(folder.timeline_file, Timeline.from_json, "")
    return ServerRecord(
        path=path,
        spec=spec,
        forecast=forecast,
        measured=measured,
        timeline=timeline,
        notes=tuple(notes),
    )


# --- predicted and measured --------------------------------------------------------------------


def served_figures(served: ServerRecord) -> list[ServedFigure]:
    """The figures that say most."""
    forecast, found = served.forecast, served.measured
    rows = []
    tokens = min((r.cache_tokens for r in found.replicas), default=0) if found else 0
    held = [row for r in found.replicas for row in r.memory] if found else []
    rows.append(
        ServedFigure(
            "cache of a replica",
            "tokens",
            float(forecast.cache_tokens) if forecast else None,
            float(tokens) if tokens else None,
        )
    )
    for kind, title in (("weights", "weights of the peak rank"), ("cache", "its cache")):
        rows.append(
            ServedFigure(
                title,
                "bytes",
                max((float(m[kind]) for m in forecast.memory if kind in m), default=None)
                if forecast
                else None,
                max((float(m[kind]) for m in held if kind in m), default=None),
            )
        )
    most = max((r.seconds and r.batch / r.seconds for r in _decode_rounds(found)), default=None)
    rows.append(
        ServedFigure(
            "tokens/s of a replica, at most",
            "rate",
            forecast.tokens_per_second if forecast else None,
            None,
        )
    )
    if most:
        at = max(_decode_rounds(found), key=lambda r: r.batch / r.seconds)
        rows.append(
            ServedFigure(
                f"tokens/s of decode steps alone, {at.batch:.0f} at once",
                "rate",
                _rate(forecast, at),
                most,
                at.count,
            )
        )
    return [row for row in rows if row.predicted is not None or row.measured is not None]


def _rate(forecast: ServingForecast | None, at: Decode) -> float | None:
    seconds = _predicted_seconds(forecast.decode, at.batch, at.context) if forecast else None
    return at.batch / seconds if seconds else None


def _decode_rounds(found: ServingMeasured | None) -> list[Decode]:
    """Rounds of all replicas, those of the same batch in one."""
    sums: dict[int, list[Decode]] = {}
    for replica in found.replicas if found else ():
        for row in replica.decode:
            if row.seconds > 0:
                sums.setdefault(round(row.batch), []).append(row)
    merged = []
    for _, same in sorted(sums.items()):
        count = sum(row.count for row in same) or len(same)

        def mean(name: str, same: list[Decode] = same, count: int = count) -> float:
            return sum(getattr(row, name) * (row.count or 1) for row in same) / count

        merged.append(
            Decode(
                batch=mean("batch"), context=mean("context"), seconds=mean("seconds"), count=count
            )
        )
    return merged


def round_seconds(served: ServerRecord) -> list[ServedFigure]:
    """Seconds of a round by the requests in it."""
    forecast = served.forecast
    measured = _decode_rounds(served.measured)
    if measured:
        return [
            ServedFigure(
                _of(row),
                "seconds",
                _predicted_seconds(forecast.decode, row.batch, row.context) if forecast else None,
                row.seconds,
                row.count,
            )
            for row in measured
        ]
    return [
        ServedFigure(_of(row), "seconds", row.seconds, None)
        for row in (forecast.decode if forecast else ())
    ]


def _of(row: Decode) -> str:
    return f"{_counted(row.batch, 'request')} of {_counted(row.context, 'token', '.0f')}"


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"


def _counted(number: float, noun: str, form: str = ".3g") -> str:
    """`1 request`, `2 requests`."""
    forecast = format(number, form)
    return f"{forecast} {noun}{'' if forecast == '1' else 's'}"


def prompts(served: ServerRecord) -> list[ServedFigure]:
    """Seconds in which prompts are read, by their tokens in one step: four rows to a doubling."""
    forecast = served.forecast
    points = [(row.tokens, row.seconds) for row in forecast.prefill] if forecast else []
    groups: dict[int, list[Prefill]] = {}
    for replica in served.measured.replicas if served.measured else ():
        for row in replica.prefill:
            groups.setdefault(round(4 * math.log2(max(row.tokens, 1.0))), []).append(row)
    if not groups:
        return [ServedFigure(f"{tokens:.0f} tokens", "seconds", s, None) for tokens, s in points]
    found = []
    for _, same in sorted(groups.items()):
        count = sum(max(row.count, 1) for row in same)
        tokens = sum(row.tokens * max(row.count, 1) for row in same) / count
        seconds = sum(row.seconds * max(row.count, 1) for row in same) / count
        title = f"{tokens:.0f} tokens"
        found.append(ServedFigure(title, "seconds", _between(points, tokens), seconds, count))
    return found


def latencies(served: ServerRecord) -> list[tuple[str, float, float, float]]:
    """What requests met with: name, and seconds as p50, p90, p99."""
    found = served.measured
    if found is None or not found.requests:
        return []
    return [
        (name, one.p50, one.p90, one.p99)
        for name, one in (
            ("first token", found.ttft),
            ("each further token", found.tpot),
            ("whole answer", found.end_to_end),
        )
    ]


def counts(served: ServerRecord) -> list[tuple[str, str]]:
    """What was counted, in words."""
    found = served.measured
    if found is None:
        return []
    rows = [
        ("ready after", format_seconds(found.start_seconds)),
        ("answering for", format_seconds(found.seconds)),
        (
            "requests",
            f"{found.requests:,} answered, {found.refused:,} rejected, {found.failed:,} lost",
        ),
        ("prompt tokens", f"{found.prompt_tokens:,}"),
        ("answered tokens", f"{found.output_tokens:,}"),
    ]
    if found.prompt_tokens:
        share = found.cached_tokens / found.prompt_tokens
        rows.append(("found in the prefix cache", f"{share:.1%} of the prompts' tokens"))
    if found.busy_seconds:
        rows.append(
            ("answered while there was anything", f"{found.tokens_per_second:,.0f} tokens/s")
        )
    for one in found.replicas:
        preempted = one.counts.get("preempted", one.counts.get("preemptions", 0))
        rows.append(
            (
                f"replica {one.number}",
                f"{one.requests:,} requests, started {_times(one.starts)}, "
                f"{preempted:,.0f} preempted",
            )
        )
    return rows


def served_verdict(served: ServerRecord) -> str:
    """One sentence: how far the predictions of rounds were off."""
    rows = [row for row in round_seconds(served) if row.off is not None and row.count]
    if not rows:
        return ""
    total = sum(row.count for row in rows)
    error = sum(abs(row.off or 0.0) * row.count for row in rows) / total
    largest = max(rows, key=lambda row: abs(row.off or 0.0))
    return (
        f"Over {total:,} decode steps, predictions were off by {error:.0%} on average, most "
        f"with {largest.title}: {format_seconds(largest.predicted or 0.0)} predicted, "
        f"{format_seconds(largest.measured or 0.0)} measured."
    )


def _predicted_seconds(rows: Sequence[Decode], batch: float, context: float) -> float | None:
    """Seconds of a round between the predicted ones: straight in batch and in context."""
    contexts = sorted({row.context for row in rows})
    at = []
    for one in contexts:
        points = [(row.batch, row.seconds) for row in rows if row.context == one]
        value = _between(points, batch)
        if value is not None:
            at.append((one, value))
    return _between(at, context)


def _between(points: Sequence[tuple[float, float]], x: float) -> float | None:
    """The value at x: straight between points; outside, as between the nearest two."""
    ordered = sorted(points)
    if not ordered:
        return None
    if len(ordered) == 1:
        return ordered[0][1]
    at = min(max(bisect.bisect([p for p, _ in ordered], x) - 1, 0), len(ordered) - 2)
    (low, a), (high, b) = ordered[at], ordered[at + 1]
    if not high > low:  # two points of one place, in a file that somebody changed
        return a
    found = a + (b - a) * (x - low) / (high - low)
    return found if found > 0 and math.isfinite(found) else a


def figure_text(unit: str, value: float | None) -> str:
    """A figure for people; nothing for None."""
    if value is None:
        return ""
    if unit == "seconds":
        return format_seconds(value)
    if unit == "bytes":
        return format_bytes(value)
    if unit == "tokens":
        return f"{format_count(value)} tokens"
    if unit == "share":
        return f"{value:.1%}"
    return f"{value:,.0f} tokens/s" if unit == "rate" else f"{value:.4g}"


OFF_BY = "off by: predicted over measured, less 100%; + means that too much was predicted"
"""The meaning of the column, below its table."""
LEGEND = f"{OFF_BY}; times: how many such steps were measured"
"""The meaning of the last columns of tables of `ServedFigure`."""


def off(row: ServedFigure) -> str:
    """How far a prediction was off, for people."""
    found = row.off
    if found is None:
        return ""
    return f"{found + 1:.3g} times" if found >= 2 else f"{found:+.1%}"


FIGURE_COLUMNS = ("predicted", "measured", "off by", "times")


def figure_rows(rows: Sequence[ServedFigure]) -> list[list[str]]:
    """Titles, and their cells under `FIGURE_COLUMNS`."""
    return [
        [
            row.title,
            figure_text(row.unit, row.predicted),
            figure_text(row.unit, row.measured),
            off(row),
            f"{row.count:,}" if row.count else "",
        ]
        for row in rows
    ]


def load_curves(served: ServerRecord) -> list[tuple[str, tuple[ServiceLoad, ...]]]:
    """Throughput and latency of one replica over load, by where they are from."""
    forecast, found = served.forecast, served.measured
    several = [
        ("predicted", forecast.loads if forecast else ()),
        ("from measured steps", served.loads),
        ("measured", found.loads if found else ()),
    ]
    return [(name, loads) for name, loads in several if loads]


LOAD_COLUMNS = (
    "requests/s",
    "tokens/s",
    "at once",
    "first p50",
    "first p90",
    "next p50",
    "next p90",
)
"""Of `load_rows`: `first` is the time to the first token, `next` the time for each further one."""


def load_rows(loads: Sequence[ServiceLoad]) -> list[list[str]]:
    """One replica over load, a row a load."""
    return [
        [
            f"{load.rate:.3g}",
            f"{load.tokens_per_second:,.0f}",
            f"{load.batch:.1f}",
            format_seconds(load.ttft_p50),
            format_seconds(load.ttft_p90),
            format_seconds(load.tpot_p50),
            format_seconds(load.tpot_p90),
        ]
        for load in loads
    ]


def needs(served: ServerRecord) -> tuple[str, tuple[Need, ...]]:
    """Replicas for a load, and what they are counted from."""
    if served.needs:
        return "from measured steps", served.needs
    return "predicted", served.forecast.needs if served.forecast else ()


def load_text(served: ServerRecord) -> str:
    """The requests that curves and needs are made of, in words."""
    forecast = served.forecast
    if forecast is None:
        return ""
    goals = [
        f"{name} within {goal:g} ms"
        for name, goal in (
            ("first token", forecast.ttft_ms),
            ("each further one", forecast.tpot_ms),
        )
        if goal is not None
    ]
    return f"requests of {forecast.prompt_len} tokens answered with {forecast.output_len}" + (
        f"; goals for {forecast.percentile}% of them: {', '.join(goals)}" if goals else ""
    )


def attention_line(row: Mapping[str, Any]) -> str:
    """The kernel of one kind of layer, and why not another."""
    heads = f"{row['num_heads']}:{row['num_kv_heads']} heads of {row['key_size']}"
    asks = [heads, row["dtype"]]
    asks += [f"window {row['window']}"] if row.get("window") else []
    asks += [name for name in ("softcap", "sinks") if row.get(name)]
    why = "; ".join(f"not {name}: {reason}" for name, reason in row.get("rejected", {}).items())
    return (
        f"{row['kernel']} for {row['layers']} layers of stage {row.get('stage', 0)} "
        f"({', '.join(asks)}), blocks of {row['block_size']} tokens" + (f"; {why}" if why else "")
    )


def facts(served: ServerRecord) -> list[tuple[str, str]]:
    """What was asked for and assumed."""
    spec, forecast = served.spec, served.forecast
    found: list[tuple[str, Any]] = [("folder", served.path)]
    if spec is not None:
        found += [("model", spec.model), ("layout", spec.layout), ("dtype", spec.workload.dtype)]
        options = spec.serving
        if options is not None:
            found += [
                ("tokens of a step", options.max_num_batched_tokens),
                ("requests at once", options.max_num_seqs),
                ("tokens of a request", options.max_model_len),
                ("tokens of a block", options.block_size or "by the attention kernel"),
            ]
        found.append(
            ("device", f"{spec.options.device}, {_counted(spec.options.threads, 'thread')} a rank")
        )
    if served.measured is not None:
        for replica in served.measured.replicas[:1]:
            found += [("attention", attention_line(row)) for row in replica.attention]
    if forecast is not None:
        found.append(("predicted for", forecast.basis))
        found += [("assumed", note) for note in forecast.notes]
    return [(name, str(value)) for name, value in found]
