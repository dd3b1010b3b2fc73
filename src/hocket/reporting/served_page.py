"""The report of one or two servers as one HTML file, without a script and without a network.

Tables and charts are written here. Charts carry the colours of the page's style, which eyes that
see no red or green tell apart, and every line is named where it ends.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence

from hocket.reporting.html_page import asset, html_page
from hocket.reporting.served import (
    FIGURE_COLUMNS,
    LEGEND,
    LOAD_COLUMNS,
    ServedFigure,
    ServerRecord,
    counts,
    facts,
    figure_rows,
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
from hocket.reporting.timeline import timeline_text
from hocket.spec.serving_forecast import ServiceLoad
from hocket.spec.units import format_seconds

WIDE, HIGH = 560, 300
"""Of a chart, in its own units."""

LEFT, RIGHT, TOP, BOTTOM = 62, 16, 28, 44

STYLE = """
table { border-collapse: collapse; font-size: 15px; margin-top: 8px; }
td, th { padding: 4px 14px 4px 0; text-align: left; border-bottom: 1px solid var(--line); }
th { font-weight: 600; color: var(--soft); font-size: 13px; }
.wide { overflow-x: auto; }
.two .two { grid-template-columns: minmax(0, 1fr); }
svg.chart { width: 100%; max-width: 760px; height: auto; font: 12px system-ui, sans-serif; }
svg.chart text { fill: var(--soft); }
svg.chart .axis { stroke: var(--line); fill: none; }
svg.chart path.line { fill: none; stroke-width: 2.5; }
.c0 { stroke: var(--one); fill: var(--one); } .c1 { stroke: var(--two); fill: var(--two); }
.c2 { stroke: var(--backward); fill: var(--backward); }
pre { overflow-x: auto; font-size: 12px; line-height: 1.2; }
.legend { display: flex; gap: 18px; flex-wrap: wrap; font-size: 14px; margin: 6px 0; }
.legend i { display: inline-block; width: 12px; height: 12px; margin-right: 6px; }
.b0 { background: var(--one); } .b1 { background: var(--two); } .b2 { background: var(--backward); }
"""

NAMES = ("predicted", "from measured steps", "measured")


def served_page(several: Sequence[ServerRecord], *, version: str, made: str) -> str:
    title = html.escape(" and ".join(served.name for served in several))
    parts = "".join(f"<div>{_server(served)}</div>" for served in several)
    kind = "pair two" if len(several) > 1 else "pair"
    return html_page(
        f"{title}: hocket report",
        f'<main>\n<div class="{kind}">{parts}</div>\n'
        f'<p class="small">hocket {html.escape(version)}, {html.escape(made)}</p>\n</main>',
        style=asset("page.css") + STYLE,
    )


def _server(served: ServerRecord) -> str:
    spec = served.spec
    words = f"{spec.model} in {spec.layout}" if spec else ""
    said = [
        '<div class="head"><p class="over">a server</p>'
        f"<h1>{_e(served.name)}</h1><p class=words>{_e(words)}</p></div>"
    ]
    if served_verdict(served):
        said.append(f'<p class="verdict">{_e(served_verdict(served))}</p>')
    if served.notes:
        said.append('<ul class="notes">' + "".join(f"<li>{_e(n)}</li>" for n in served.notes))
        said.append("</ul>")
    said.append(
        _section(
            "Predicted and measured",
            f"The prediction made before the ranks started, and the measured steps. {LEGEND}.",
            _compared("", served_figures(served)),
        )
    )
    if round_seconds(served):
        lead = "The time in which every running request gets one token: the time per output token."
        said.append(
            _section(
                "Decode step",
                lead,
                _bars(round_seconds(served)) + _compared("requests", round_seconds(served)),
            )
        )
    if prompts(served):
        said.append(_section("Prefill", "", _compared("prompt", prompts(served))))
    said.append(_load(served))
    met = [[name, *map(format_seconds, values)] for name, *values in latencies(served)]
    if met:
        lead = "Of the newest requests, from their arrival at the address."
        said.append(_section("Latency", lead, _table(["", "p50", "p90", "p99"], met)))
    if counts(served):
        said.append(_section("Counted", "", _table([], [list(row) for row in counts(served)])))
    said.append(_alternatives(served))
    if served.timeline is not None:
        drawn = timeline_text(served.timeline, 120, title="recorded steps")
        said.append(_section("Recorded steps", "Rank by time.", f"<pre>{_e(drawn)}</pre>"))
    said.append(_section("What was asked", "", _table([], [list(row) for row in facts(served)])))
    return "\n".join(said)


def _load(served: ServerRecord) -> str:
    several = load_curves(served)
    if not several:
        return ""
    charts: list[tuple[str, Callable[[ServiceLoad], float], str]] = [
        ("tokens/s that one replica answers with", lambda load: load.tokens_per_second, ""),
        ("milliseconds to the first token, p90", lambda load: 1e3 * load.ttft_p90, ""),
        ("milliseconds for each further token, p90", lambda load: 1e3 * load.tpot_p90, ""),
    ]
    drawn = "".join(
        f"<div>{_chart(title, [(n, [(x.rate, value(x)) for x in loads]) for n, loads in several])}"
        "</div>"
        for title, value, _ in charts
    )
    legend = "".join(
        f'<span><i class="b{NAMES.index(name)}"></i>{_e(name)}</span>' for name, _ in several
    )
    name, found = needs(served)
    table = _table(
        [f"requests/s ({name})", "replicas", "within the goals"],
        [
            [
                f"{one.rate:.3g}",
                "no number is enough" if one.replicas is None else str(one.replicas),
                "no number is enough" if one.within_goals is None else str(one.within_goals),
            ]
            for one in found
        ],
    )
    lead = (
        f"One replica over requests a second. Predicted and simulated: {load_text(served)}. "
        "Measured: "
        "the requests that came."
    )
    numbers = "".join(
        f"<p>{_e(name)}</p>{_table(LOAD_COLUMNS, load_rows(loads))}" for name, loads in several
    )
    body = (
        f'<div class="legend">{legend}</div><div class="pair two">{drawn}</div>'
        f"<details><summary>In numbers</summary>{numbers}</details>"
    )
    return _section("Load", lead, body + (table if found else ""))


def _alternatives(served: ServerRecord) -> str:
    if served.forecast is None or not served.forecast.alternatives:
        return ""
    rows = [
        [
            one.layout,
            f"{one.tokens_per_second:,.0f}",
            format_seconds(one.ttft),
            format_seconds(one.tpot),
            f"{one.cache_tokens:,}",
            "this server" if one.chosen else "" if one.fits else "does not fit",
        ]
        for one in served.forecast.alternatives
    ]
    headers = ["layout", "tokens/s", "first token alone", "next", "tokens in a cache", ""]
    return _section("Other layouts, predicted", "", _table(headers, rows))


# --- pieces ---------------------------------------------------------------------------------------


def _e(text: str) -> str:
    """Text as it is, control characters written out."""
    plain = "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)
    return html.escape(plain)


def _section(title: str, lead: str, body: str) -> str:
    intro = f'<p class="lead">{_e(lead)}</p>' if lead else ""
    return f'<section><h2>{_e(title)}</h2>{intro}<div class="wide">{body}</div></section>'


def _table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{_e(one)}</th>" for one in headers)
    body = "".join("<tr>" + "".join(f"<td>{_e(c)}</td>" for c in row) + "</tr>" for row in rows)
    return f"<table>{f'<tr>{head}</tr>' if headers else ''}{body}</table>"


def _compared(title: str, rows: Sequence[ServedFigure]) -> str:
    return _table([title, *FIGURE_COLUMNS], figure_rows(rows))


def _bars(rows: Sequence[ServedFigure]) -> str:
    """Predicted above measured, a pair of bars a row."""
    most = max((max(r.predicted or 0.0, r.measured or 0.0) for r in rows), default=0.0)
    if most <= 0:
        return ""
    each, label = 34, 190
    drawn = []
    for number, row in enumerate(rows):
        top = number * each
        drawn.append(f'<text x="0" y="{top + 20}">{_e(row.title)}</text>')
        for kind, value in enumerate((row.predicted, row.measured)):
            if value is not None:
                long = (WIDE - label - 80) * value / most
                y = top + 4 + 12 * kind
                colour = 2 * kind
                drawn.append(
                    f'<rect class="c{colour}" x="{label}" y="{y}" width="{long:.1f}" height="10"/>'
                    f'<text x="{label + long + 6:.1f}" y="{y + 9}">{format_seconds(value)}</text>'
                )
    legend = "".join(
        f'<span><i class="b{2 * k}"></i>{name}</span>'
        for k, name in enumerate(("predicted", "measured"))
    )
    high = each * len(rows)
    return (
        f'<div class="legend">{legend}</div><svg class="chart" viewBox="0 0 {WIDE} {high}" '
        f'role="img" aria-label="decode steps, predicted above measured">{"".join(drawn)}</svg>'
    )


def _tick(value: float) -> str:
    """A figure at an axis: three digits, never as 1.06e+03, which does not fit next to it."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _chart(title: str, lines: Sequence[tuple[str, Sequence[tuple[float, float]]]]) -> str:
    """Lines over requests a second."""
    points = [point for _, line in lines for point in line if all(map(math.isfinite, point))]
    far = max((x for x, _ in points), default=0.0) or 1.0
    high = max((y for _, y in points), default=0.0) or 1.0
    drawn = [f'<text x="0" y="14">{_e(title)}</text>']

    def at(x: float, y: float) -> tuple[float, float]:
        across = LEFT + (WIDE - LEFT - RIGHT) * x / far
        return across, HIGH - BOTTOM - (HIGH - TOP - BOTTOM) * y / high

    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        x, y = at(share * far, share * high)
        drawn.append(f'<path class="axis" d="M{LEFT} {y:.1f}H{WIDE - RIGHT}"/>')
        value = _tick(share * high)
        drawn.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{value}</text>')
        drawn.append(
            f'<text x="{x:.1f}" y="{HIGH - BOTTOM + 18}" text-anchor="middle">'
            f"{_tick(share * far)}</text>"
        )
    middle = (LEFT + WIDE - RIGHT) / 2
    drawn.append(
        f'<text x="{middle}" y="{HIGH - 6}" text-anchor="middle">requests/s of a replica</text>'
    )
    for name, line in lines:
        colour = NAMES.index(name)
        places = [at(x, y) for x, y in line if math.isfinite(y)]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        drawn.append(f'<path class="line c{colour}" d="M{path}"/>')
        drawn += [
            f'<circle class="c{colour}" cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>' for x, y in places
        ]
    return (
        f'<svg class="chart" viewBox="0 0 {WIDE} {HIGH}" role="img" '
        f'aria-label="{_e(title)}">{"".join(drawn)}</svg>'
    )
