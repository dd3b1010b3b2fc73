"""Job of `hocket doctor`: which checks, for how long, and the text and files of the report card."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hocket.doctor.check import GpuCheck
from hocket.spec.errors import OptionError
from hocket.spec.units import format_seconds

if TYPE_CHECKING:
    from hocket.spec.doctor import CardLine, ReportCard

FOLDER = "hocket-doctor"
"""Where a whole report card is written, unless --out names another folder."""
NAME = "report-card"
ONE_GPU, SEVERAL = 10.0, 40.0
"""Minutes that a report card may take."""


def chosen_checks(
    *, gpu: bool = False, only: Sequence[str] = (), groups: Sequence[str] = ()
) -> tuple[GpuCheck, ...]:
    """The checks: those named, else all with `gpu`, else the environment's.

    Raises:
        OptionError: an unknown check or group; the nearest is suggested.
    """
    from hocket.doctor.table import select

    if not gpu and not only and not groups:
        groups = ("environment",)
    return select(only, groups)


def card_folder(out: str | None, *, whole: bool) -> Path | None:
    """The folder for the files, made and writable; None where none are written.

    Raises:
        OptionError: it cannot be made or written to; nothing was executed.
    """
    if out is None and not whole:
        return None
    path = Path(out if out is not None else FOLDER)
    trial = path / f".{NAME}.writable"
    try:
        path.mkdir(parents=True, exist_ok=True)
        trial.write_text("")
        trial.unlink()
    except OSError as error:
        raise OptionError(
            f"--out {path} is not writable: {error.strerror}", hint="--out /tmp/hocket-doctor"
        ) from None
    return path


def doctor(
    checks: Sequence[GpuCheck],
    *,
    minutes: float | None = None,
    on_line: Callable[[CardLine], None] | None = None,
) -> ReportCard:
    """Execute the checks on this machine's GPUs, or rehearse them.

    Args:
        checks: rows of the table.
        minutes: limit on GPUs. None: `ONE_GPU` or `SEVERAL`.
        on_line: called with each line as soon as it is known.

    Raises:
        OptionError: a limit that is not positive.
    """
    from hocket.doctor.present import present
    from hocket.doctor.runner import report_card

    if minutes is not None and not minutes > 0:
        raise OptionError(f"minutes is {minutes:g}; a check needs some", hint="--minutes 10")
    here = present()
    if minutes is None:
        minutes = ONE_GPU if len(here.gpus) < 2 else SEVERAL
    return report_card(checks, limit=60.0 * minutes, on_line=on_line, here=here)


def check_rows(checks: Sequence[GpuCheck]) -> list[dict[str, object]]:
    return [{"id": c.id, "group": c.group, "what": c.what, "seconds": c.seconds} for c in checks]


def listing(checks: Sequence[GpuCheck]) -> str:
    """The checks, with the seconds that each takes on a GPU."""
    width = max(len(check.id) for check in checks)
    rows = [f"{c.group:<11}  {c.id:<{width}}  {c.seconds:>4.0f} s  {c.what}" for c in checks]
    total = sum(check.seconds for check in checks)
    return "\n".join([*rows, "", f"{len(checks)} checks, about {format_seconds(total)} on GPUs"])


def progress_text(line: CardLine, before: CardLine | None, checks: Sequence[GpuCheck]) -> str:
    """A line as it is printed while the checks go on, after the line `before`."""
    from hocket.reporting import card

    heading = card.heading(line, before)
    width = max(len(check.id) for check in checks)
    return "\n".join([*(["", heading] if heading else []), *card.line_text(line, width)])


def card_summary(report: ReportCard) -> str:
    """The counts, and whether a GPU executed the checks."""
    from hocket.reporting import card

    return card.card_counts(report)


def write_card(card: ReportCard, folder: Path) -> tuple[Path, Path]:
    """Write the JSON and the page; returns their paths."""
    from hocket.reporting.card_page import card_html
    from hocket.spec.files import named, write_text

    files = folder / f"{NAME}.json", folder / f"{NAME}.html"
    for path, content in zip(files, (card.to_json(), card_html(card)), strict=True):
        with named(path):
            write_text(path, content + "\n")
    return files
