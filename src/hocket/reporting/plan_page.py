"""A plan as one HTML page that needs no network: the layouts to sort, memory against capacity, the
pipeline of the first, and what would change the answer.

Every name is escaped. Without the script it is the same page, unsorted.
"""

from __future__ import annotations

import dataclasses
import html
import re
from collections.abc import Mapping, Sequence
from string import Template

from hocket.reporting.html_page import asset, html_page
from hocket.spec.timeline import Timeline
from hocket.spec.units import format_bytes

WIDTH = 1000
"""Units of the pictures' width, which scale with the page."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanRow:
    """One layout.

    Attributes:
        name: of the layout.
        cells: of each heading after the first, the text and the number that it is sorted by; None
            sorts last.
        memory: bytes by what they are for. high: its 95th percentile.
        runs: whether hocket runs it today; `reason` why not.
    """

    name: str
    cells: tuple[tuple[str, float | None], ...]
    memory: Mapping[str, int]
    high: int
    runs: bool = True
    reason: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanPage:
    """What the page shows.

    Attributes:
        title, asked: of the plan. notes: what a reader should know.
        headings: of the table after the layout's. rows: best first.
        capacity: bytes that a process can have on one GPU; None where it is not known.
        pipeline: of the first layout, as it is simulated; None without stages.
        changes: what would change the answer, in sentences.
        command: to run the first. footer: what the figures are.
    """

    title: str
    asked: str
    headings: tuple[str, ...]
    rows: tuple[PlanRow, ...]
    command: str
    notes: tuple[str, ...] = ()
    capacity: int | None = None
    pipeline: Timeline | None = None
    changes: tuple[str, ...] = ()
    footer: str = ""


def plan_html(found: PlanPage) -> str:
    body = Template(asset("plan.html")).substitute(
        title=_text(found.title),
        asked=_text(found.asked),
        notes=_list("notes", found.notes),
        headings="".join(
            f'<th scope="col"><button type="button">{_text(name)}</button></th>'
            for name in ("layout", *found.headings)
        ),
        rows="".join(_row(row) for row in found.rows),
        capacity="unknown" if found.capacity is None else format_bytes(found.capacity),
        memory=_memory(found.rows, found.capacity),
        pipeline=_pipeline(found),
        explanation=_section(
            "change", "Why this layout, and what would change the answer", found.changes
        ),
        command=_text(found.command),
        footer=_text(found.footer),
    )
    style = asset("page.css", "plan.css")
    return html_page(f"Plan: {_text(found.title)}", body, style=style, script=asset("plan.js"))


def _text(text: str) -> str:
    return html.escape(text)


def _layout(text: str) -> str:
    """A layout, with line breaks after a colon or a comma alone."""
    parts = re.split(r"(?<=[:,])", text)
    return "<wbr>".join(f"<span>{_text(part)}</span>" for part in parts)


def _ranged(text: str) -> str:
    """A figure whose range, in brackets, a narrow page leaves out."""
    return re.sub(r"( \(.*\))$", r'<span class="range">\1</span>', _text(text))


def _list(name: str, lines: Sequence[str]) -> str:
    items = "".join(f"<li>{_text(line)}</li>" for line in lines)
    return f'<ul class="{name}">{items}</ul>' if lines else ""


def _section(name: str, title: str, lines: Sequence[str]) -> str:
    if not lines:
        return ""
    return f'<section id="{name}"><h2>{_text(title)}</h2>{_list("", lines)}</section>'


def _row(row: PlanRow) -> str:
    cells = "".join(
        f'<td data-value="{"" if value is None else repr(float(value))}">{_ranged(text)}</td>'
        for text, value in row.cells
    )
    mark = "" if row.runs else " *"
    title = f' title="{_text(row.reason)}"' if row.reason else ""
    return (
        f'<tr{"" if row.runs else " class=off"}><td data-value="{_text(row.name)}"{title}>'
        f"{_layout(row.name)}{mark}</td>{cells}</tr>"
    )


def _memory(rows: Sequence[PlanRow], capacity: int | None) -> str:
    """A bar for each layout, stacked by kind."""
    kinds = list(dict.fromkeys(kind for row in rows for kind in row.memory))
    most = max(
        [capacity or 0, *(max(row.high, sum(row.memory.values())) for row in rows)], default=1
    )
    scale = WIDTH / max(1, most)
    pictures = []
    for row in rows:
        out, at = [], 0.0
        for kind, size in row.memory.items():
            wide = size * scale
            out.append(
                f'<rect class="k{kinds.index(kind) % 6}" x="{at:.2f}" y="3" width="{wide:.2f}" '
                f'height="16"><title>{_text(kind)}: {format_bytes(size)}</title></rect>'
            )
            at += wide
        if capacity is not None:
            wide = capacity * scale - 1
            out.append(f'<rect class="limit" x="0.5" y="3.5" width="{wide:.2f}" height="15"/>')
        high = min(WIDTH - 1, row.high * scale)
        out.append(f'<line class="high" x1="{high:.2f}" x2="{high:.2f}" y1="0" y2="22"/>')
        total = f"{format_bytes(sum(row.memory.values()))}, 95th {format_bytes(row.high)}"
        label = f"{row.name}: {total}"
        words = f"{_layout(row.name)}: {total}"
        pictures.append(f'<p class="small">{words}</p>' + _picture(22, out, label))
    keys = "".join(
        f'<span><i class="k{at % 6}"></i>{_text(kind)}</span>' for at, kind in enumerate(kinds)
    )
    return "".join(pictures) + f'<div class="keys">{keys}</div>'


def _pipeline(found: PlanPage) -> str:
    timeline = found.pipeline
    if timeline is None or not timeline.duration:
        return ""
    scale = WIDTH / timeline.duration
    out = []
    for rank in range(timeline.num_ranks):
        out.append(f'<rect class="idle" x="0" y="{22 * rank}" width="{WIDTH}" height="18"/>')
    for event in timeline.events:
        if event.lane == "compute":
            kind = {"F": "F", "W": "W"}.get(event.kind, "B")
            out.append(
                f'<rect class="a{kind}" x="{event.start * scale:.2f}" y="{22 * event.rank}" '
                f'width="{max(0.4, (event.end - event.start) * scale - 0.6):.2f}" height="18">'
                f"<title>{_text(event.name)}</title></rect>"
            )
    keys = "".join(
        f'<span><i class="{name}"></i>{label}</span>'
        for name, label in (
            ("aF", "forward"),
            ("aB", "backward"),
            ("aW", "weight gradient"),
            ("idle", "idle"),
        )
    )
    microbatches = 1 + max((event.microbatch or 0 for event in timeline.events), default=0)
    return (
        '<section id="pipeline"><h2>Pipeline of the first layout</h2>'
        f'<p class="lead">{_text(found.rows[0].name)}: a row per pipeline rank, {microbatches} '
        "microbatches, as simulated.</p>"
        + _picture(22 * timeline.num_ranks, out, "pipeline of the first layout")
        + f'<div class="keys">{keys}</div></section>'
    )


def _picture(height: int, parts: Sequence[str], label: str) -> str:
    return (
        f'<svg class="bars" viewBox="0 0 {WIDTH} {height}" height="{height}" '
        f'preserveAspectRatio="none" role="img" aria-label="{_text(label)}">{"".join(parts)}</svg>'
    )
