"""The ledger: what every run and server was predicted to do and did, a line each, in one file.

    $HOCKET_LEDGER, else $XDG_DATA_HOME/hocket/ledger.jsonl, else ~/.local/share/hocket/...

An empty HOCKET_LEDGER keeps no ledger. Lines are appended whole, under a lock, so that runs that
end together do not mix theirs; a line that a crash has torn is ended first and passed over later.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from hocket.jobs.ledger_entries import of_run, of_server
from hocket.spec.errors import HocketError, OptionError, unknown
from hocket.spec.files import parse_json
from hocket.spec.ledger import FIGURES, LedgerEntry, LedgerLine, ServedEntry

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
        return Path(asked).expanduser() if asked else None
    home = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    return Path(home).expanduser() / "hocket" / "ledger.jsonl"


def append(run: str | os.PathLike[str], others: float = 0.0) -> LedgerLine | None:
    """Add what a run's or a server's folder holds; None where no ledger is kept, or nothing was
    measured.

    `others`: cores' worth of time that other programs took beside it.

    Raises:
        HocketError: the folder holds no run.
        OSError: the ledger cannot be written.
    """
    from hocket.reporting.record import read
    from hocket.reporting.served import is_served

    path = ledger_file()
    if path is None:
        return None
    folder = Path(run)
    entry: LedgerLine | None
    entry = of_server(folder) if is_served(folder) else of_run(read(folder))
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
    entries, _, torn = read_all()
    return entries, torn


def read_all() -> tuple[list[LedgerEntry], list[ServedEntry], int]:
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


def errors(
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
