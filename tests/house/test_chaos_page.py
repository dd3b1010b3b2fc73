"""The last table of the page on chaos is what its writer makes of the stored results."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

WRITER = Path(__file__).resolve().parents[2] / "docs" / "reference" / "write_chaos.py"


def test_the_table_is_of_the_stored_results() -> None:
    writer = runpy.run_path(str(WRITER))
    assert writer["PAGE"].read_text() == writer["page"]()
    faults = [
        f for line in writer["ROWS"].read_text().splitlines() for f in json.loads(line)["faults"]
    ]
    assert f"{len(faults)} faults, seeds" in writer["table"]()
