"""`hocket ledger`: how far predictions were off, over every run on record."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from hocket.cli.flags import parse_flags


@dataclasses.dataclass(frozen=True, kw_only=True)
class LedgerFlags:
    """Show the prediction errors of all runs.

    Attributes:
        by: grouping of the runs. One of: axis, machine, model.
        last: number of runs to list.
        json: print one JSON object: `file`, `unreadable`, `errors` and `entries` of runs,
            `served_errors` and `served` of servers.
    """

    by: str = "axis"
    last: int = 10
    json: bool = False


def main(arguments: Sequence[str]) -> int:
    """Print. Returns 0."""
    flags = parse_flags(LedgerFlags, "ledger", arguments, LedgerFlags())
    from hocket.jobs import ledger
    from hocket.spec.errors import OptionError
    from hocket.spec.ledger import SERVED_FIGURES

    if flags.last < 0:
        raise OptionError(f"--last is {flags.last}; it is a number of runs", hint="--last 10")
    entries, served, torn = ledger.read_all_entries()
    errors = ledger.ledger_errors(entries, flags.by)
    if flags.json:
        import json

        path = ledger.ledger_file()
        found = {
            "file": None if path is None else str(path),
            "unreadable": torn,
            "errors": errors,
            "entries": [dataclasses.asdict(entry) for entry in entries],
            "served_errors": ledger.ledger_errors(served, flags.by, SERVED_FIGURES),
            "served": [dataclasses.asdict(entry) for entry in served],
        }
        print(json.dumps(found))
    else:
        print(ledger.ledger_text(entries, torn, flags.by, flags.last, served), end="")
    return 0
