"""The report of one server, or of two side by side; what was measured is played on into a curve."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hocket.spec.errors import HocketError, RunFolderError
from hocket.spec.run import write_text

if TYPE_CHECKING:
    from hocket.reporting.served import ServerRecord


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


def server_report_text(
    found: Sequence[ServerRecord], *, width: int = 100, color: bool = False, unicode: bool = True
) -> str:
    """The report in words."""
    from hocket.reporting.served_text import both_served_text, served_text

    parts = [served_text(one, width=width, color=color, unicode=unicode) for one in found]
    if len(found) > 1:
        parts.append(both_served_text(found))
    return ("\n" + "=" * min(width, 80) + "\n\n").join(parts)


def write_server_report(found: Sequence[ServerRecord], form: str, path: Path) -> None:
    """Write the report into a file, as `html`, `png` or `trace`.

    Raises:
        RunFolderError: there is no timeline to trace.
        OptionError: a package that `form` needs is not installed.
    """
    if form == "trace":
        from hocket.reporting.record import RunRecord
        from hocket.reporting.trace import trace_json

        if all(one.timeline is None for one in found):
            raise RunFolderError(
                f"{found[0].path} holds no timeline: no window of steps was recorded"
            )
        as_records = [RunRecord(path=o.path, spec=o.spec, measured=o.timeline) for o in found]
        write_text(path, trace_json(as_records))
    elif form == "png":
        from hocket.reporting.served_figures import save_served_figure

        save_served_figure(found, path)
    else:
        from hocket import __version__
        from hocket.reporting.served_page import served_page

        made = datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")
        write_text(path, served_page(found, version=__version__, made=made))
