"""`hocket report`: what a run was predicted to do and what it did, on one page.

With `--history`: how far predictions were off, over every run on record.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated

import tyro

from hocket.cli.flags import Count, File, Text, explicit, parse_flags
from hocket.cli.terminal import draws, printable, show_text, terminal
from hocket.spec.errors import OptionError

Runs = Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="RUN...")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReportFlags:
    """Show a run, or two side by side: predicted above measured, and where they differ.

    Without another form, one HTML page that needs no network is written.

    Attributes:
        runs: one run folder, or two.
        format: one page (html), words on stdout (text), a picture (png; needs matplotlib), or a
            trace for ui.perfetto.dev or chrome://tracing. One of: html, text, png, trace.
        out: file to write (default: report.html, report.png or trace.json in the run folder).
        history: show the prediction errors of all runs and servers on record instead.
        by: with --history, grouping of the runs (default: axis). One of: axis, machine, model.
        last: with --history, number of runs to list (default: 10).
        json: with --history, print one JSON object: `file`, `unreadable`, `errors` and `entries` of
            runs, `served_errors` and `served` of servers.
    """

    runs: Runs = ()
    format: str = "html"
    out: File = None
    history: bool = False
    by: Text = None
    last: Count = None
    json: bool = False


def main(arguments: Sequence[str]) -> int:
    """Report. Returns 0."""
    flags = parse_flags(ReportFlags, "report", arguments, ReportFlags())
    written = explicit(arguments)
    if flags.history:
        for what in (*flags.runs, *(f"--{name}" for name in ("format", "out") if name in written)):
            raise OptionError(
                f"--history shows all runs on record, as text or JSON; {what} is of a run's page",
                hint="hocket report --history",
            )
        return _history(flags)
    for name in ("by", "last", "json"):
        if name in written:
            raise OptionError(
                f"--{name} is about --history, and this shows a run",
                hint=f"hocket report --history --{name} ...",
            )
    from hocket.jobs import report

    found = report.report_records(flags.runs)
    if flags.format == "text":
        color, width = terminal()
        if flags.out is not None:
            print(report.save_text(report.report_words(found, width=width), flags.out))
            return 0
        words = report.report_words(found, width=width, color=color, unicode=draws())
        show_text(printable(words), end="")
    else:
        print(report.write_report(found, flags.format, flags.out))
    return 0


def _history(flags: ReportFlags) -> int:
    from hocket.jobs import ledger
    from hocket.spec.ledger import SERVED_FIGURES

    by = "axis" if flags.by is None else flags.by
    last = 10 if flags.last is None else flags.last
    if last < 0:
        raise OptionError(f"--last is {last}; it is a number of runs", hint="--last 10")
    entries, served, torn = ledger.read_all_entries()
    errors = ledger.ledger_errors(entries, by)
    if flags.json:
        import json

        path = ledger.ledger_file()
        found = {
            "file": None if path is None else str(path),
            "unreadable": torn,
            "errors": errors,
            "entries": [dataclasses.asdict(entry) for entry in entries],
            "served_errors": ledger.ledger_errors(served, by, SERVED_FIGURES),
            "served": [dataclasses.asdict(entry) for entry in served],
        }
        print(json.dumps(found))
    else:
        show_text(ledger.ledger_text(entries, torn, by, last, served), end="")
    return 0
