"""The report of one run, or of two side by side: as a page, as text, as a picture, as a trace."""

from __future__ import annotations

import dataclasses
import datetime
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hocket.spec.errors import HocketError, OptionError, RunFolderError
from hocket.spec.files import write_text

if TYPE_CHECKING:
    from hocket.reporting.record import RunRecord
    from hocket.reporting.served import ServerRecord

MOST_RUNS = 2

FILES = {"html": "report.html", "png": "report.png", "trace": "trace.json"}
"""Form to the name of its file in the run folder."""


def report_records(runs: Sequence[str | os.PathLike[str]]) -> list[RunRecord] | list[ServerRecord]:
    """Read the run folders: of training jobs, or of servers.

    Raises:
        OptionError: no run, more than two, or a training job and a server.
        RunFolderError: one of them holds no run.
    """

    from hocket.reporting.record import read_run
    from hocket.reporting.served import is_served

    if not runs:
        raise OptionError("which run?", hint="hocket report runs/first")
    if len(runs) > MOST_RUNS:
        raise OptionError(
            f"{len(runs)} runs were given; one is shown, or two side by side",
            hint=f"hocket report {runs[0]} {runs[1]}",
        )
    servers = [is_served(Path(run)) for run in runs]
    if all(servers):
        return [read_server_folder(Path(run)) for run in runs]
    if any(servers):
        raise OptionError(
            f"{runs[servers.index(True)]} is a server's folder, "
            f"{runs[servers.index(False)]} a training job's; they cannot be compared",
            hint=f"hocket report {runs[0]}",
        )
    return [read_run(Path(run)) for run in runs]


def report_words(
    found: Sequence[RunRecord] | Sequence[ServerRecord],
    *,
    width: int = 100,
    color: bool = False,
    unicode: bool = True,
) -> str:
    from hocket.reporting.run_text import both_text, report_text
    from hocket.reporting.served_text import both_served_text, served_text

    runs, servers = _apart(found)
    form: dict[str, Any] = {"width": width, "color": color, "unicode": unicode}
    parts = [served_text(one, **form) for one in servers]
    parts += [report_text(r, own_bubble(r), **form) for r in runs]
    if len(found) > 1:
        parts.append(both_served_text(servers) if servers else both_text(runs))
    return ("\n" + "=" * min(width, 80) + "\n\n").join(parts)


def _apart(
    found: Sequence[RunRecord] | Sequence[ServerRecord],
) -> tuple[Sequence[RunRecord], Sequence[ServerRecord]]:
    from hocket.reporting.served import ServerRecord

    servers = [one for one in found if isinstance(one, ServerRecord)]
    return [one for one in found if not isinstance(one, ServerRecord)], servers


def write_report(
    found: Sequence[RunRecord] | Sequence[ServerRecord], form: str = "html", out: str | None = None
) -> Path:
    """Write the report into a file, and say where.

    Args:
        found: one or two records.
        form: `html`, `png` or `trace`.
        out: the file. None: in the folder of the first run.

    Raises:
        OptionError: `out` is a folder or cannot be written; a package that `form` needs is not
            installed.
        RunFolderError: there is no timeline to trace.
    """
    path = Path(out) if out is not None else _default(found, form)
    _must_be_writable(path, asked=out is not None)
    runs, servers = _apart(found)
    if form == "trace":
        from hocket.reporting.record import RunRecord
        from hocket.reporting.trace import trace_json

        if servers:
            hint, why = None, "no window of steps was recorded"
            runs = [RunRecord(path=o.path, spec=o.spec, measured=o.timeline) for o in servers]
        else:
            hint = "a run records one in its middle, or at --timeline-step N"
            why = "there is nothing to trace"
        if all(r.measured is None and r.predicted is None for r in runs):
            raise RunFolderError(f"{found[0].path} holds no timeline: {why}", hint=hint)
        write_text(path, trace_json(runs))
    elif form == "png":
        from hocket.reporting.figures import save_run_figure
        from hocket.reporting.served_figures import save_served_figure

        if servers:
            save_served_figure(servers, path)
        else:
            save_run_figure(runs, [own_bubble(r) for r in runs], path)
    else:
        assert form == "html", form
        write_text(path, _served_html(servers) if servers else html(runs))
    return path


def of_ended(run: Path, say: Callable[[str], None]) -> Path | None:
    """The page of a run that has just ended; whatever goes wrong here is said and fails nothing."""
    try:
        return write_report(report_records([run]))
    except Exception as error:  # the run is done and saved: its picture cannot undo that
        say(f"no report was written: {type(error).__name__}: {error}")
        return None


def save_text(words: str, out: str) -> Path:
    """Write the report in words into a file, and say where. Raises OptionError as
    `write_report`."""
    path = Path(out)
    _must_be_writable(path, asked=True)
    write_text(path, words)
    return path


def html(found: Sequence[RunRecord]) -> str:
    """The page."""
    from hocket.reporting.page import run_html
    from hocket.reporting.payload import run_payload

    payloads = [run_payload(r, own_bubble(r)) for r in found]
    return run_html(payloads, text=report_words(found), **_made())


def _served_html(found: Sequence[ServerRecord]) -> str:
    from hocket.reporting.served_page import served_page

    return served_page(found, **_made())


def _made() -> dict[str, str]:
    from hocket import __version__

    made = datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")
    return {"version": __version__, "made": made}


def own_bubble(record: RunRecord) -> float | None:
    """The idle share that the run's schedule has by its own; None where it is not known."""
    from hocket.schedules import relower
    from hocket.simulation import theoretical_bubble

    if record.schedule is None:
        return None
    try:
        # Earlier versions wrote messages in an order that the simulator does not complete.
        return theoretical_bubble(relower(record.schedule))
    except HocketError:  # written by hand and damaged since
        return None


def _default(found: Sequence[RunRecord] | Sequence[ServerRecord], form: str) -> Path:
    name = FILES[form]
    if len(found) > 1:
        stem, _, ending = name.partition(".")
        name = f"{stem}-beside-{found[1].name}.{ending}"
    return found[0].path / name


def _must_be_writable(path: Path, *, asked: bool) -> None:
    if path.is_dir():
        raise OptionError(f"{path} is a folder", hint=f"--out {path / 'report.html'}")
    folder = path.absolute().parent
    if not folder.is_dir():
        raise OptionError(f"{folder} is not a folder", hint="--out report.html")
    hint = "another --out" if asked else "--out report.html"
    if not os.access(folder, os.W_OK | os.X_OK):
        raise OptionError(f"{folder} cannot be written to", hint=hint)
    try:  # what permissions say is not the whole truth: a full disk, /proc
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OptionError(f"{path} cannot be written: {error.strerror}", hint=hint) from None


def read_server_folder(path: Path) -> ServerRecord:
    """A server's folder, with what its measured steps come to under load."""
    from hocket.jobs.serving.forecast import load_curve
    from hocket.reporting import served

    found = served.read_served(path)
    options = None if found.spec is None else found.spec.serving
    if found.measured is None or options is None:
        return found
    sizes = {
        name: getattr(options, name)
        for name in ("max_num_batched_tokens", "max_num_seqs", "max_model_len")
    }
    if None in sizes.values():
        return found
    try:
        loads, needs = load_curve(found.forecast, found.measured, sizes)
    except HocketError as error:
        note = f"the measured load was not simulated: {error.message}"
        return dataclasses.replace(found, notes=(*found.notes, note))
    return dataclasses.replace(found, loads=loads, needs=needs)
