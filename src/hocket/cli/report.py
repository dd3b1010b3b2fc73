"""`hocket report`: what a run was predicted to do and what it did, on one page."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated

import tyro

from hocket.cli.flags import File, parse_flags
from hocket.cli.terminal import draws, printable, terminal

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
    """

    runs: Runs = ()
    format: str = "html"
    out: File = None


def main(arguments: Sequence[str]) -> int:
    """Report. Returns 0."""
    flags = parse_flags(ReportFlags, "report", arguments, ReportFlags())
    from hocket.jobs import report

    found = report.report_records(flags.runs)
    if flags.format == "text":
        color, width = terminal()
        if flags.out is not None:
            print(report.save_text(report.report_words(found, width=width), flags.out))
            return 0
        words = report.report_words(found, width=width, color=color, unicode=draws())
        print(printable(words), end="")
    else:
        print(report.write_report(found, flags.format, flags.out))
    return 0
