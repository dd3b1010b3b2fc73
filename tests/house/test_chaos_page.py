"""The table of the page on chaos is what its writer makes of the stored results."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

WRITER = Path(__file__).resolve().parents[2] / "docs" / "reference" / "write_chaos.py"


def test_the_table_is_of_the_stored_results() -> None:
    writer = runpy.run_path(str(WRITER))
    text = writer["PAGE"].read_text()
    assert text == writer["page"]()
    runs = map(json.loads, writer["RESULTS"].read_text().splitlines())
    faults = [fault for run in runs for fault in run["faults"]]
    assert f"\n{len(faults)} faults, seeds" in text
