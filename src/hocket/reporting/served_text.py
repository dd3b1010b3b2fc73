"""The report of a server as text, for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from hocket.reporting.run_text import printable
from hocket.reporting.served import (
    FIGURE_COLUMNS,
    LEGEND,
    LOAD_COLUMNS,
    ServerRecord,
    counts,
    figure_rows,
    figure_text,
    latencies,
    load_curves,
    load_rows,
    load_text,
    needs,
    prompts,
    round_seconds,
    served_figures,
    served_verdict,
)
from hocket.reporting.table import table_text
from hocket.reporting.timeline import timeline_text
from hocket.spec.units import format_seconds


def served_text(
    served: ServerRecord, *, width: int = 100, color: bool = False, unicode: bool = True
) -> str:
    """One server in words and tables."""
    blocks = [_head(served), *(f"note: {printable(note)}" for note in served.notes)]
    if counts(served):
        blocks.append("\n" + table_text(["counted", ""], [list(row) for row in counts(served)]))
    for title, rows in (
        ("", served_figures(served)),
        ("decode step", round_seconds(served)),
        ("prefill", prompts(served)),
    ):
        if rows:
            blocks.append("\n" + table_text([title, *FIGURE_COLUMNS], figure_rows(rows)))
    if served_figures(served):
        blocks.append(LEGEND)
    if served_verdict(served):
        blocks.append("\n" + served_verdict(served))
    met = latencies(served)
    if met:
        table = [[name, *map(format_seconds, values)] for name, *values in met]
        blocks.append("\n" + table_text(["latency", "p50", "p90", "p99"], table))
    for name, loads in load_curves(served):
        of = "" if name == "measured" else f": {load_text(served)}"
        lines = table_text(LOAD_COLUMNS, load_rows(loads))
        blocks.append(f"\none replica over load, {name}{of}\n{lines}")
    name, found = needs(served)
    if found:
        table = [
            [f"{one.rate:.3g}", _count(one.replicas), _count(one.within_goals)] for one in found
        ]
        headers = [f"requests/s ({name})", "replicas", "within the goals"]
        blocks.append("\n" + table_text(headers, table))
    if served.forecast is not None and served.forecast.alternatives:
        blocks.append("\n" + _alternatives(served))
    if served.timeline is not None:
        drawn = timeline_text(
            served.timeline, width, title="recorded steps", color=color, unicode=unicode
        )
        blocks.append("\n" + (drawn if color else printable(drawn)))
    return "\n".join(blocks) + "\n"


def both_served_text(several: Sequence[ServerRecord]) -> str:
    """Two servers compared."""
    titles: dict[str, None] = {}
    columns = []
    for served in several:
        rows = {row.title: row for row in (*served_figures(served), *round_seconds(served))}
        columns.append(rows)
        titles.update(dict.fromkeys(rows))
    table = [["layout", *(str(s.spec.layout) if s.spec else "unknown" for s in several)]]
    for title in titles:
        cells = [
            figure_text(r[title].unit, r[title].measured) if title in r else "" for r in columns
        ]
        if any(cells):
            table.append([title, *cells])
    for number, name in enumerate(("first token", "each further token", "whole answer")):
        met = [latencies(served) for served in several]
        if any(met):
            table.append(
                [f"{name}, p50", *(format_seconds(m[number][1]) if m else "" for m in met)]
            )
    return table_text(["measured", *(printable(s.name) for s in several)], table) + "\n"


def _head(served: ServerRecord) -> str:
    words = [printable(served.name)]
    if served.spec is not None:
        words += [printable(served.spec.model), str(served.spec.layout)]
    return ": ".join(words) + "\na server"


def _count(value: int | None) -> str:
    return "not with any number" if value is None else f"{value:,}"


def _alternatives(served: ServerRecord) -> str:
    assert served.forecast is not None
    return table_text(
        ["layout (predicted)", "tokens/s", "first token alone", "next", "cache", ""],
        [
            [
                printable(one.layout),
                f"{one.tokens_per_second:,.0f}",
                format_seconds(one.ttft),
                format_seconds(one.tpot),
                f"{one.cache_tokens:,} tokens",
                "this server" if one.chosen else "" if one.fits else "does not fit",
            ]
            for one in served.forecast.alternatives
        ],
    )
