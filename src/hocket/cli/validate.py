"""`hocket validate`: how far the planner's prices are from what others measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated

import tyro

from hocket.cli.flags import File, parse_flags
from hocket.cli.terminal import show_text

Table = Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="TABLE.csv")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ValidateFlags:
    """Predict each run of a table of published runs and print the errors by source and overall.

    Attributes:
        table: CSV file, one measured run per row.
        infer: rows of serving: time per output token, time to first token, tokens/s.
        rows: write each row's prediction to this CSV file.
        json: print one JSON object: `overall` and `groups`.
    """

    table: Table = ""
    infer: bool = False
    rows: File = None
    json: bool = False


def main(arguments: Sequence[str]) -> int:
    """Print. Returns 0."""
    flags = parse_flags(ValidateFlags, "validate", arguments, ValidateFlags())
    from hocket.jobs.accuracy import accuracy, accuracy_text, serving_accuracy, serving_text
    from hocket.spec.errors import OptionError

    if not flags.table:
        raise OptionError("no table is given", hint="hocket validate TABLE.csv")
    if flags.infer:
        serving = serving_accuracy(flags.table, rows=flags.rows)
        found, printed = serving.to_json(), serving_text(serving)
    else:
        training = accuracy(flags.table, rows=flags.rows)
        found, printed = training.to_json(), accuracy_text(training)
    if flags.json:
        import json

        print(json.dumps(found))
    else:
        show_text(printed, end="")
    return 0
