"""The report card as one HTML page that needs no network and runs no code.

What a machine or an error message holds is escaped.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from string import Template

from hocket.reporting.card import card_counts, formatted
from hocket.reporting.html_page import asset, html_page
from hocket.spec.doctor import CANNOT, FAIL, GROUPS, PASS, CardLine, ReportCard
from hocket.spec.units import format_bytes

_TITLES = {
    "environment": "Environment",
    "kernels": "Kernels compared with references",
    "equality": "One GPU compared with one process on the CPU",
    "speed": "Speed",
    "memory": "Memory",
    "checkpoint": "Checkpoints",
    "faults": "Faults",
    "prediction": "Predictions compared with measurements",
    "multi-gpu": "Several GPUs",
}


def card_html(card: ReportCard) -> str:
    groups = [g for g in GROUPS if any(line.group == g for line in card.lines)]
    counts = {**card.counts, "rehearsed": card.rehearsed}
    if card.executed_on_gpu:
        del counts["rehearsed"]
    waits = ""
    if not card.executed_on_gpu and card.counts[CANNOT]:
        waits = (
            '<p class="waits">No GPU executed these checks. A line marked "rehearsed: ok" ran on '
            "the CPU or on fake CUDA tensors, which have shapes and devices but no values.</p>"
        )
    body = Template(asset("card.html")).substitute(
        machine=_text(_name(card)),
        version=_text(card.versions.get("hocket", "")),
        date=_text(card.date.replace("T", " ").replace("Z", " UTC")),
        counts="".join(
            f'<div><div class="number">{number}</div><div class="name">{name}</div></div>'
            for name, number in counts.items()
        ),
        waits=waits,
        contents="".join(f'<a href="#{g}">{_TITLES[g]}</a>' for g in groups),
        sections="".join(_section(g, [x for x in card.lines if x.group == g]) for g in groups),
        about=_about(card),
        summary=_text(card_counts(card)).replace("\n", "<br>"),
    )
    title = f"GPU report card: {_text(_name(card))}"
    return html_page(title, body, style=asset("page.css", "card.css"))


def _name(card: ReportCard) -> str:
    """The GPUs by kind and number, or the CPU."""
    machine = card.machine
    count = int(machine.get("gpus", 0) or 0)
    kinds = [str(machine[f"gpu_{i}"]) for i in range(count) if f"gpu_{i}" in machine]
    if not kinds:
        return f"{machine.get('cpu', 'unknown CPU')}, no GPU"
    return ", ".join(f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds))


def _section(group: str, lines: Sequence[CardLine]) -> str:
    done = sum(line.status == PASS for line in lines)
    failed = sum(line.status == FAIL for line in lines)
    over = f"{len(lines)} checks, {done} pass, {failed} fail, {len(lines) - done - failed} cannot"
    rows = "".join(_row(line) for line in lines)
    return (
        f'<section id="{group}"><p class="over">{over}</p><h2>{_TITLES[group]}</h2>'
        '<div class="scroll"><table><thead><tr><th>Status</th><th>Check and criterion</th>'
        f"<th>Result</th></tr></thead><tbody>{rows}</tbody></table></div></section>"
    )


def _row(line: CardLine) -> str:
    figures = "".join(
        f"<dt>{_text(name)}</dt><dd>{_text(value)}{f', predicted {_text(other)}' if other else ''}"
        "</dd>"
        for name, value, other in formatted(line.values, line.predicted)
    )
    reason = f'<div class="reason">{_text(line.reason)}</div>' if line.reason else ""
    shown = f"<dl>{figures}</dl>" if figures and line.status != CANNOT else ""
    return (
        f'<tr id="{_text(line.id)}"><td class="status"><span class="pill {line.status}">'
        f'{line.status}</span></td><td class="check"><strong>{_text(line.id)}</strong>: '
        f'{_text(line.what)}<div class="criterion">{_text(line.criterion)}</div>'
        f'<code>{_text(line.command)}</code></td><td class="found">{reason}{shown}</td></tr>'
    )


def _about(card: ReportCard) -> str:
    rows = {**card.machine, **card.versions}
    found = []
    for name, value in rows.items():
        size = name.endswith("_bytes") and isinstance(value, int)
        shown = format_bytes(int(value)) if size else str(value)
        found.append(f"<dt>{_text(name.replace('_', ' '))}</dt><dd>{_text(shown)}</dd>")
    return "".join(found)


def _text(value: object) -> str:
    return html.escape(str(value))
