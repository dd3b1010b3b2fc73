"""The report of one or two runs as text, for a terminal or where scripts do not run."""

from __future__ import annotations

from collections.abc import Sequence

from hocket.reporting.curve import curve_text
from hocket.reporting.decomposition import PARTS
from hocket.reporting.payload import in_words, run_figures, run_parts, run_verdict, traffic
from hocket.reporting.record import RunRecord
from hocket.reporting.served import OFF_BY, figure_text
from hocket.reporting.table import table_text
from hocket.reporting.timeline import timeline_text
from hocket.reporting.topology import matrix_text
from hocket.spec.forecast import KINDS
from hocket.spec.units import format_bytes, format_seconds

TEN = 10
_ATTENTION = ("layer", "layers", "kernel", "reason")
"""Ranks whose memory is listed, and alternatives."""


def report_text(
    record: RunRecord,
    own_bubble: float | None = None,
    *,
    width: int = 100,
    color: bool = False,
    unicode: bool = True,
) -> str:
    """One run in words, tables and pictures of letters.

    Args:
        record: what its folder holds.
        own_bubble: idle share of its schedule where all stages are equal; None if unknown.
        width, color, unicode: of the terminal.
    """
    parts = run_parts(record, own_bubble)
    blocks = [_head(record), *(f"note: {printable(note)}" for note in record.notes)]
    rows = [
        [
            figure["title"],
            figure_text(figure["unit"], figure["predicted"]),
            figure_text(figure["unit"], figure["measured"]),
            _off(figure["unit"], figure["measured"], figure["predicted"]),
        ]
        for figure in run_figures(record)
    ]
    if rows:
        blocks.append("\n" + table_text(["", "predicted", "measured", "off by"], rows))
        blocks.append(OFF_BY)
    if parts.measured is not None:
        blocks.append("\n" + run_verdict(parts))
    for timeline, what in ((record.predicted, "predicted"), (record.measured, "measured")):
        if timeline is not None:
            drawn = timeline_text(
                timeline, width, title=f"{what} step", color=color, unicode=unicode
            )
            blocks.append("\n" + printable(drawn) if not color else "\n" + drawn)
    if parts.measured is not None:
        blocks.append(
            "\n" + _parts(parts.predicted.mean if parts.predicted else None, parts.measured.mean)
        )
    if record.attention:
        rows = [[str(row[name]) for name in _ATTENTION] for row in record.attention]
        blocks.append("\n" + printable(table_text(["attention", "layers", "kernel", "why"], rows)))
    if record.memory:
        blocks.append("\n" + _memory(record))
    sent = traffic(record, parts)
    if sent:
        blocks.append(
            "\n"
            + table_text(
                ["axis", "link", "calls", "bytes", "exposed per rank"],
                [
                    [
                        row["axis"],
                        row["link"] or "unknown",
                        row["count"],
                        format_bytes(row["bytes"]),
                        "" if row["measured"] is None else format_seconds(row["measured"]),
                    ]
                    for row in sent
                ],
            )
        )
    if record.experts:
        blocks.append("\n" + _experts(record, width=width, unicode=unicode))
    losses = record.column("loss")
    if unicode and len(losses) > 1:
        blocks.append("\nloss over the steps\n" + curve_text(losses, width=min(width, 80)))
    blocks.append("\n" + _links(record))
    if record.forecast is not None and record.forecast.alternatives:
        blocks.append("\n" + _alternatives(record))
    return "\n".join(blocks) + "\n"


def both_text(records: Sequence[RunRecord]) -> str:
    """The figures of several runs, compared."""
    titles: dict[str, str] = {}
    columns = []
    for record in records:
        found = {f["title"]: f for f in run_figures(record)}
        titles.update({title: f["unit"] for title, f in found.items()})
        columns.append(found)
    rows = [
        ["layout", *(str(record.layout or "unknown") for record in records)],
        *(
            [
                title,
                *(
                    figure_text(unit, found[title]["measured"]) if title in found else ""
                    for found in columns
                ),
            ]
            for title, unit in titles.items()
        ),
    ]
    return table_text(["measured", *(printable(record.name) for record in records)], rows) + "\n"


def printable(text: str) -> str:
    """The text with control characters written out: a name must not steer the terminal."""
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


def _head(record: RunRecord) -> str:
    words = [printable(record.name)]
    if record.spec is not None:
        words.append(printable(record.spec.model))
        words.append(f"{record.spec.layout} ({in_words(record.spec.layout)})")
    steps = record.spec.options.steps if record.spec is not None else "?"
    return ": ".join(words) + f"\n{record.steps_done} of {steps} steps"


def _off(unit: str, measured: float | None, predicted: float | None) -> str:
    if measured is None or predicted is None:
        return ""
    if unit == "share":
        return f"{100 * (predicted - measured):+.1f} points"
    if measured <= 0:
        return ""
    ratio = predicted / measured
    return f"{ratio:.3g} times" if ratio >= 3 else f"{ratio - 1:+.1%}"


def _parts(predicted: dict[str, float] | None, measured: dict[str, float]) -> str:
    rows = []
    for part in PARTS:
        row = [part]
        if predicted is not None:
            row.append(format_seconds(predicted[part]))
        row.append(format_seconds(measured[part]))
        if predicted is not None:
            by = measured[part] - predicted[part]
            row.append(("+" if by >= 0 else "-") + format_seconds(abs(by)))
        rows.append(row)
    headers = ["part of the step", "measured"]
    if predicted is not None:
        headers = ["part of the step", "predicted", "measured", "difference"]
    return table_text(headers, rows)


def _memory(record: RunRecord) -> str:
    predicted = record.forecast.memory if record.forecast else ()
    rows = []
    for rank, row in enumerate(record.memory[:TEN]):
        line = [f"rank {rank}", *(format_bytes(row[kind]) for kind in KINDS)]
        line.append(format_bytes(row["total"]))
        if predicted:
            line.append(format_bytes(predicted[rank]["total"]) if rank < len(predicted) else "")
        rows.append(line)
    text = table_text(["memory", *KINDS, "total", *(["predicted"] if predicted else [])], rows)
    rest = len(record.memory) - TEN
    return text + (f"\n... and {rest} ranks more" if rest > 0 else "")


def _experts(record: RunRecord, *, width: int, unicode: bool) -> str:
    """Rows that experts were given, by layer, and how uneven that was over the steps."""
    ep = 1 if record.layout is None else record.layout.ep
    rows = []
    for name, load in record.experts[:TEN]:
        total, count = sum(load), len(load)
        ranks = [sum(load[i : i + count // ep]) for i in range(0, count, max(1, count // ep))]
        most = [max(each) * len(each) / total if total else 1.0 for each in (load, ranks)]
        rows.append(
            [printable(name), *(f"{n:,.0f}" for n in (min(load), total / count, max(load)))]
            + [f"{value:.2f}" for value in most]
        )
    headers = ["rows of experts", "least", "mean", "most", "most / mean", "of ranks"]
    text = table_text(headers, rows)
    rest = len(record.experts) - TEN
    text += f"\n... and {rest} layers more" if rest > 0 else ""
    found = record.column("expert_imbalance")
    if len(found) > 1:
        first, last = found[0], found[-1]
        text += f"\n\nmost / mean over the steps: {first:.2f} at first, {last:.2f} at last"
        if unicode:
            text += "\n" + curve_text(found, width=min(width, 80))
    return text


def _links(record: RunRecord) -> str:
    """What joins the machine's devices, or that nobody knows."""
    measured = record.machine
    if measured is None:
        return "links of the machine: not known, it was not probed (hocket probe)"
    form = "quick" if measured.quick else "full"
    title = f"links of {measured.host.name}, each way, measured {measured.date[:10]} ({form} form)"
    return printable(f"{title}\n" + (matrix_text(measured) or "one device: none"))


def _alternatives(record: RunRecord) -> str:
    assert record.forecast is not None
    return table_text(
        ["layout (predicted)", "step", "memory", "bubble", ""],
        [
            [
                printable(a.layout),
                figure_text("seconds", a.step_seconds),
                figure_text("bytes", a.memory),
                figure_text("share", a.bubble),
                "this run" if a.chosen else "does not fit" if a.fits is False else "",
            ]
            for a in record.forecast.alternatives[:TEN]
        ],
    )
