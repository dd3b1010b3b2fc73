"""The ledger as tables: how far predictions were off, and the last runs and servers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hocket.jobs.ledger import VARIABLE, errors, ledger_file
from hocket.spec.ledger import FIGURES, SERVED_FIGURES, LedgerEntry, LedgerLine, ServedEntry

_HEADERS = ("round", "prompts", "tokens/s", "cache")
"""Words for SERVED_FIGURES."""


def _short(model: str) -> str:
    """The name of a model's folder; of the one in a run folder, the run's."""
    path = Path(model)
    return path.parent.name if path.name == "model" and path.parent.name else path.name


def text(
    entries: list[LedgerEntry], torn: int, by: str, last: int, served: Sequence[ServedEntry] = ()
) -> str:
    """The ledger as tables: the errors by group, then the last runs; then the same of servers."""
    from hocket.reporting import table_text
    from hocket.reporting.run_text import printable
    from hocket.spec.units import format_bytes, format_seconds

    path = ledger_file()
    beside = _served(served, by, last)
    if not entries:
        where = f"{path} holds no runs yet" if path else f"{VARIABLE} is empty: none is kept"
        if served:
            where = f"{path} holds no training runs yet"
        return f"{where}\n" + beside + _torn(torn)
    rows = []
    for row in errors(entries, by):
        line = [printable(row["group"]), row["runs"], row["predicted"]]
        for figure in FIGURES:
            line += _off_by(row[figure], points=figure == "bubble")
        rows.append(line)
    headers = [by, "runs", "predicted", "step off by", "bias", "memory off by", "bias",
               "bubble off by", "bias"]  # fmt: skip
    table = table_text(headers, rows)
    recent = []
    for entry in entries[-last:] if last else []:
        recent.append(
            [
                entry.date[:16].replace("T", " "),
                printable(_short(entry.model)),
                entry.layout,
                *_both(entry, "step_seconds", format_seconds),
                *_both(entry, "memory", format_bytes),
                f"{entry.others:.1f} cores" if entry.disturbed else "",
            ]
        )
    told = table_text(
        [
            "ended (UTC)",
            "model",
            "layout",
            "step",
            "predicted",
            "memory",
            "predicted",
            "disturbed by",
        ],
        recent,
    )
    return (
        f"how far predictions were off, medians; runs on record: {len(entries)}, in {path}\n\n"
        f"{table}\n" + (f"\nthe last of them\n\n{told}\n" if recent else "") + beside + _torn(torn)
    )


def _served(entries: Sequence[ServedEntry], by: str, last: int) -> str:
    """How far the predictions of servers were off by group, and the last servers; empty of none."""
    from hocket.reporting import table_text
    from hocket.reporting.run_text import printable
    from hocket.spec.units import format_count, format_seconds

    if not entries:
        return ""
    rows: list[list[Any]] = []
    for row in errors(entries, by, SERVED_FIGURES):
        line = [printable(row["group"]), row["runs"], row["predicted"]]
        for figure in SERVED_FIGURES:
            line += _off_by(row[figure])
        rows.append(line)
    headers = [by, "servers", "predicted"]
    headers += [word for name in _HEADERS for word in (f"{name} off by", "bias")]
    told = (
        f"\nservers, medians likewise; on record: {len(entries)}\n\n{table_text(headers, rows)}\n"
    )
    recent = [
        [
            entry.date[:16].replace("T", " "),
            printable(_short(entry.model)),
            entry.layout,
            entry.requests,
            *_both(entry, "decode_seconds", format_seconds),
            *_both(entry, "prefill_seconds", format_seconds),
            *_both(entry, "tokens_per_second", lambda rate: f"{rate:,.0f}"),
            *_both(entry, "cache_tokens", format_count),
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


def _torn(torn: int) -> str:
    return f"\n{torn} lines could not be read and are passed over\n" if torn else ""


def _off_by(found: dict[str, Any], *, points: bool = False) -> list[str]:
    """The median error and the bias of a group's figure, in words."""
    if found["error"] is None:
        return ["", ""]
    unit = " points" if points else "%"
    return [f"{100 * found['error']:.1f}{unit}", f"{100 * found['bias']:+.1f}{unit}"]


def _both(entry: LedgerLine, figure: str, form: Callable[[float], str]) -> list[str]:
    """A figure measured and predicted, in words."""
    now = getattr(entry.measured, figure)
    then = getattr(entry.predicted, figure) if entry.predicted is not None else None
    return ["" if value is None else form(value) for value in (now, then)]
