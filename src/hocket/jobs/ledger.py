"""The ledger: what every run and server was predicted to do and did, a line each, in one file.

    $HOCKET_LEDGER, else $XDG_DATA_HOME/hocket/ledger.jsonl, else ~/.local/share/hocket/...

HOCKET_LEDGER=0 (or empty) keeps none. Lines are appended whole, under a lock, so that runs that
end together do not mix theirs; a line that a crash has torn is ended first and passed over later.

Of a server is compared what was measured with the same in a step: of rounds of tokens and of steps
of prompts those sizes that occurred, as its report does. Throughput is that of rounds, at the
number of requests at which it was highest: how much was asked for is not a server's doing.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import os
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hocket.spec.errors import HocketError, OptionError, unknown
from hocket.spec.files import parse_json
from hocket.spec.ledger import (
    FIGURES,
    SERVED_FIGURES,
    Figures,
    LedgerEntry,
    LedgerLine,
    ServedEntry,
    ServedFigures,
)

if TYPE_CHECKING:
    from hocket.reporting.record import RunRecord
    from hocket.reporting.served import ServedFigure
    from hocket.spec.run import RunSpec

VARIABLE = "HOCKET_LEDGER"

GROUPS: dict[str, Callable[[LedgerLine], tuple[str, ...]]] = {
    "axis": lambda entry: entry.axes,
    "machine": lambda entry: (f"{entry.machine} ({entry.fingerprint})",),
    "model": lambda entry: (entry.model,),
}
"""What entries can be grouped by; a run counts for each axis that it splits over."""


def ledger_file() -> Path | None:
    """Where the ledger lies; None where none is kept."""
    asked = os.environ.get(VARIABLE)
    if asked is not None:
        return None if asked in ("", "0") else Path(asked).expanduser()
    home = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    return Path(home).expanduser() / "hocket" / "ledger.jsonl"


def append(run: str | os.PathLike[str], others: float = 0.0) -> LedgerLine | None:
    """Add what a run's or a server's folder holds; None where no ledger is kept, or nothing was
    measured.

    `others`: cores' worth of time of background load during it.

    Raises:
        HocketError: the folder holds no run.
        OSError: the ledger cannot be written.
    """
    from hocket.reporting.record import read_run
    from hocket.reporting.served import is_served

    path = ledger_file()
    if path is None:
        return None
    folder = Path(run)
    entry: LedgerLine | None
    entry = of_server(folder) if is_served(folder) else run_line(read_run(folder))
    if entry is None:
        return None
    entry = dataclasses.replace(entry, others=others)
    line = entry.to_json().encode() + b"\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    _append_whole(path, line)
    return entry


def enter(run: str | os.PathLike[str], say: Callable[[str], None], *, others: float = 0.0) -> None:
    """Append a run that has ended well; whatever goes wrong here is said and fails nothing."""
    try:
        append(run, others)
    except Exception as error:  # the run is done and saved: its line in a list cannot undo that
        say(f"not entered in the ledger: {type(error).__name__}: {error}")


def _append_whole(path: Path, line: bytes) -> None:
    import fcntl

    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            line = b"\n" + line  # what was torn stays a line of its own
        while line:
            line = line[os.write(descriptor, line) :]
    finally:
        os.close(descriptor)  # and with it the lock


# --- reading -------------------------------------------------------------------------------


def read_ledger() -> tuple[list[LedgerEntry], int]:
    """The training runs, the oldest first, and how many lines could not be read.

    Raises:
        OptionError: the ledger is a folder or cannot be read.
    """
    entries, _, torn = read_all_entries()
    return entries, torn


def read_all_entries() -> tuple[list[LedgerEntry], list[ServedEntry], int]:
    """Training runs and servers, the oldest first, and how many lines could not be read.

    Raises:
        OptionError: as `read_ledger`.
    """
    path = ledger_file()
    if path is None or not (path.is_file() or path.is_dir()):  # a device or a pipe may have no end
        return [], [], 0
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise OptionError(
            f"the ledger {path} cannot be read: {error.strerror}", hint=f"{VARIABLE}=FILE"
        ) from None
    found: list[LedgerEntry] = []
    served: list[ServedEntry] = []
    torn = 0
    for line in filter(str.strip, lines):
        try:
            if parse_json(line)["command"] == "serve":
                served.append(ServedEntry.from_json(line))
            else:
                found.append(LedgerEntry.from_json(line))
        except (ValueError, TypeError, KeyError, AttributeError, HocketError):
            torn += 1
    return found, served, torn


def ledger_errors(
    entries: Iterable[LedgerLine], by: str, figures: Sequence[str] = FIGURES
) -> list[dict[str, Any]]:
    """How far predictions were off, a row a group and one over all.

    Each row holds the group, its `runs`, how many of them were `predicted`, and for every figure
    the median of the absolute error and of the signed one (`bias`), None where nothing is known.

    Raises:
        OptionError: `by` is not one of GROUPS.
    """
    if by not in GROUPS:
        message, hint = unknown("group", by, GROUPS)
        raise OptionError(message, hint=hint)
    groups: dict[str, list[LedgerLine]] = defaultdict(list)
    everything = list(entries)
    for entry in everything:
        for name in GROUPS[by](entry):
            groups[name].append(entry)
    rows = [_row(name, groups[name], figures) for name in sorted(groups)]
    return [*rows, _row("all", everything, figures)] if everything else []


def _row(name: str, entries: list[LedgerLine], figures: Sequence[str]) -> dict[str, Any]:
    row: dict[str, Any] = {
        "group": name,
        "runs": len(entries),
        "predicted": sum(entry.predicted is not None for entry in entries),
    }
    for figure in figures:
        off = [error for entry in entries if (error := entry.error(figure)) is not None]
        row[figure] = {
            "count": len(off),
            "error": statistics.median(map(abs, off)) if off else None,
            "bias": statistics.median(off) if off else None,
        }
    return row


# --- a folder as a line -----------------------------------------------------------------------


def run_line(record: RunRecord) -> LedgerEntry | None:
    """The line of one run; None where it took no step or its spec is gone."""
    spec = record.spec
    if spec is None or record.step_seconds is None:
        return None
    peak = max((row["total"] for row in record.memory), default=None)
    if peak is None and record.measured is not None:
        peak = max(record.measured.peak_bytes, default=None)
    pipelined = spec.layout.pp > 1
    measured = Figures(
        step_seconds=record.step_seconds,
        memory=peak,
        bubble=record.measured.bubble if record.measured is not None and pipelined else None,
    )
    predicted = None
    if record.forecast is not None:
        predicted = Figures(
            step_seconds=record.forecast.step_seconds,
            memory=max(record.forecast.peak_bytes, default=None),
            bubble=record.forecast.bubble if pipelined else None,
        )
    return LedgerEntry(
        **_forecaster_of(spec, record.path),
        steps=_steps(record),
        seq_len=spec.workload.seq_len,
        global_batch=spec.workload.global_batch,
        measured=measured,
        predicted=predicted,
    )


def _steps(record: RunRecord) -> int:
    """Steps in the layout that the run has now, which its figures are of."""
    _, first, last = record.stretches[-1]
    return last - first + 1


def of_server(folder: Path) -> ServedEntry | None:
    """The line of one server; None where it was never ready or its spec is gone."""
    from hocket.reporting import served

    found = served.read_served(folder)
    spec, counted = found.spec, found.measured
    cache = _figure(served.served_figures(found), "tokens")
    if spec is None or counted is None or not counted.seconds or cache[1] is None:
        return None
    pairs = {
        "decode_seconds": _mean(served.round_seconds(found)),
        "prefill_seconds": _mean(served.prompts(found)),
        "tokens_per_second": _figure(served.served_figures(found), "rate"),
        "cache_tokens": cache,
    }
    then = {name: pair[0] for name, pair in pairs.items() if pair[0]}
    return ServedEntry(
        **_forecaster_of(spec, folder),
        measured=ServedFigures(**{name: pair[1] for name, pair in pairs.items() if pair[1]}),
        predicted=ServedFigures(**then) if found.forecast is not None else None,
        requests=counted.requests,
        output_tokens=counted.output_tokens,
        seconds=counted.seconds,
    )


def _figure(rows: Sequence[ServedFigure], unit: str) -> tuple[float | None, float | None]:
    """Predicted and measured of the one row of a unit that was measured."""
    for row in rows:
        if row.unit == unit and row.measured is not None:
            return row.predicted, row.measured
    return None, None


def _mean(rows: Sequence[ServedFigure]) -> tuple[float | None, float | None]:
    """Predicted and measured seconds, each row as often as it was measured."""
    counted = [row for row in rows if row.measured is not None and row.count]
    total = sum(row.count for row in counted)
    if not total:
        return None, None
    now = sum((row.measured or 0.0) * row.count for row in counted) / total
    if any(row.predicted is None for row in counted):
        return None, now
    return sum((row.predicted or 0.0) * row.count for row in counted) / total, now


def _forecaster_of(spec: RunSpec, folder: Path) -> dict[str, Any]:
    """What every line holds besides figures, of a run that ends now."""
    from hocket import __version__

    words = machine_words(spec.options.device)
    if spec.options.emulate_links is not None:
        words += f", links as {spec.options.emulate_links}"
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "version": __version__,
        "run": str(folder.resolve()),
        "command": spec.command,
        "model": spec.model,
        "layout": str(spec.layout),
        "machine": words,
        "fingerprint": hashlib.sha256(words.encode()).hexdigest()[:8],
        "ranks": spec.layout.world_size,
        "dtype": spec.workload.dtype,
    }


def machine_words(device: str = "auto") -> str:
    """This machine in words: its GPUs where runs use them, else its cores."""
    from hocket.jobs.probe import present_machine

    here = present_machine(device)
    cpu = f"{here.host.cores} cores of {here.host.cpu}"
    names = [found.name for found in here.found.devices] if here.kind == "cuda" else []
    gpus = [f"{names.count(name)} x {name}" for name in dict.fromkeys(names)]
    return ", ".join([*gpus, cpu])


# --- as tables --------------------------------------------------------------------------------

_HEADERS = ("round", "prompts", "tokens/s", "cache")
"""Words for SERVED_FIGURES."""


def _short(model: str) -> str:
    """The name of a model's folder; of the one in a run folder, the run's."""
    path = Path(model)
    return path.parent.name if path.name == "model" and path.parent.name else path.name


def ledger_text(
    entries: list[LedgerEntry], torn: int, by: str, last: int, served: Sequence[ServedEntry] = ()
) -> str:
    """The ledger as tables: the errors by group, then the last runs; then the same of servers."""
    from hocket.reporting import table_text
    from hocket.reporting.run_text import printable
    from hocket.spec.units import format_bytes, format_seconds

    path = ledger_file()
    servers = _served(served, by, last)
    if not entries:
        where = f"{path} holds no runs yet" if path else f"{VARIABLE} is empty: none is kept"
        if served:
            where = f"{path} holds no training runs yet"
        return f"{where}\n" + servers + _torn(torn)
    rows = []
    for row in ledger_errors(entries, by):
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
    last_runs = table_text(
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
        f"{table}\n{LEGEND}\n"
        + (f"\nthe last of them\n\n{last_runs}\n" if recent else "")
        + servers
        + _torn(torn)
    )


LEGEND = (
    "predicted: runs with a prediction; off by: median of |predicted - measured| / measured,\n"
    "of the bubble the difference in points; bias: median with its sign, + for predicted too high"
)
"""The meaning of the columns, below the table."""


def _served(entries: Sequence[ServedEntry], by: str, last: int) -> str:
    """How far the predictions of servers were off by group, and the last servers; empty of none."""
    from hocket.reporting import table_text
    from hocket.reporting.run_text import printable
    from hocket.spec.units import format_count, format_seconds

    if not entries:
        return ""
    rows: list[list[Any]] = []
    for row in ledger_errors(entries, by, SERVED_FIGURES):
        line = [printable(row["group"]), row["runs"], row["predicted"]]
        for figure in SERVED_FIGURES:
            line += _off_by(row[figure])
        rows.append(line)
    headers = [by, "servers", "predicted"]
    headers += [word for name in _HEADERS for word in (f"{name} off by", "bias")]
    groups = (
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
        return groups
    headers = ["ended (UTC)", "model", "layout", "requests"]
    headers += [word for name in _HEADERS for word in (name, "predicted")]
    table = table_text([*headers, "disturbed by"], recent)
    return f"{groups}\nthe last servers\n\n{table}\n"


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
