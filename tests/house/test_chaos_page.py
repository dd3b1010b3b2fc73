"""The last tables of the page on chaos are what their writer makes of the stored results."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

WRITER = Path(__file__).resolve().parents[2] / "docs" / "reference" / "write_chaos.py"


def test_the_tables_are_of_the_stored_results() -> None:
    writer = runpy.run_path(str(WRITER))
    assert writer["PAGE"].read_text() == writer["page"]()
    for rows in writer["TABLES"]:
        runs = map(json.loads, rows.read_text().splitlines())
        faults = [fault for run in runs for fault in run["faults"]]
        assert f"{len(faults)} faults, seeds" in writer["table"](rows)
        assert rows.name in writer["PAGE"].read_text()
