"""Servers in the ledger: what a server's folder comes to as one line, and these lines as tables.

What is compared was measured with the same in a step: of rounds of tokens and of steps of prompts
those sizes that occurred, as the report of a server does. Throughput is that of rounds, at the
number of requests at which it was highest: how much was asked for is not a server's doing.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hocket.spec.ledger import SERVED_FIGURES, ServedEntry, ServedFigures

if TYPE_CHECKING:
    from hocket.reporting.served import Row

_HEADERS = ("round", "prompts", "tokens/s", "cache")
"""Words for SERVED_FIGURES."""


def entry_of(folder: Path) -> ServedEntry | None:
    """The line of one server; None where it was never ready or its spec is gone."""
    from hocket.jobs.ledger import told_by
    from hocket.reporting import served

    found = served.read(folder)
    spec, counted = found.spec, found.measured
    cache = _figure(served.figures(found), "tokens")
    if spec is None or counted is None or not counted.seconds or cache[1] is None:
        return None
    pairs = {
        "decode_seconds": _mean(served.rounds(found)),
        "prefill_seconds": _mean(served.prompts(found)),
        "tokens_per_second": _figure(served.figures(found), "rate"),
        "cache_tokens": cache,
    }
    then = {name: pair[0] for name, pair in pairs.items() if pair[0]}
    return ServedEntry(
        **told_by(spec, folder),
        measured=ServedFigures(**{name: pair[1] for name, pair in pairs.items() if pair[1]}),
        predicted=ServedFigures(**then) if found.forecast is not None else None,
        requests=counted.requests,
        output_tokens=counted.output_tokens,
        seconds=counted.seconds,
    )


def _figure(rows: Sequence[Row], unit: str) -> tuple[float | None, float | None]:
    """Predicted and measured of the one row of a unit that was measured."""
    for row in rows:
        if row.unit == unit and row.measured is not None:
            return row.predicted, row.measured
    return None, None


def _mean(rows: Sequence[Row]) -> tuple[float | None, float | None]:
    """Predicted and measured seconds, each row as often as it was measured."""
    counted = [row for row in rows if row.measured is not None and row.count]
    total = sum(row.count for row in counted)
    if not total:
        return None, None
    now = sum((row.measured or 0.0) * row.count for row in counted) / total
    if any(row.predicted is None for row in counted):
        return None, now
    return sum((row.predicted or 0.0) * row.count for row in counted) / total, now


def text(entries: Sequence[ServedEntry], by: str, last: int) -> str:
    """How far the predictions of servers were off by group, and the last servers; empty of none."""
    from hocket.jobs.ledger import both, errors, off_by
    from hocket.reporting import table_text
    from hocket.reporting.run_text import printable
    from hocket.spec.units import format_count, format_seconds

    if not entries:
        return ""
    rows: list[list[Any]] = []
    for row in errors(entries, by, SERVED_FIGURES):
        line = [printable(row["group"]), row["runs"], row["predicted"]]
        for figure in SERVED_FIGURES:
            line += off_by(row[figure])
        rows.append(line)
    headers = [by, "servers", "predicted"]
    headers += [word for name in _HEADERS for word in (f"{name} off by", "bias")]
    told = (
        f"\nservers, medians likewise; on record: {len(entries)}\n\n{table_text(headers, rows)}\n"
    )
    recent = [
        [
            entry.date[:16].replace("T", " "),
            printable(Path(entry.model).name),
            entry.layout,
            entry.requests,
            *both(entry, "decode_seconds", format_seconds),
            *both(entry, "prefill_seconds", format_seconds),
            *both(entry, "tokens_per_second", lambda rate: f"{rate:,.0f}"),
            *both(entry, "cache_tokens", format_count),
            f"{entry.others:.1f} cores" if entry.disturbed else "",
        ]
        for entry in (entries[-last:] if last else [])
    ]
    if not recent:
        return told
    headers = ["ended (UTC)", "model", "layout", "requests"]
    headers += [word for name in _HEADERS for word in (name, "predicted")]
    table = table_text([*headers, "disturbed by"], recent)
    return f"{told}\nthe last servers\n\n{table}\n"
