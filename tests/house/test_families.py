"""The page of all model types is what its rows say."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from hocket.spec.matrix import LAYOUTS

REFERENCE = Path(__file__).resolve().parents[2] / "docs" / "reference"


def test_the_page_is_what_its_rows_say() -> None:
    spec = importlib.util.spec_from_file_location("write", REFERENCE / "write_families.py")
    assert spec is not None
    assert spec.loader is not None
    writer = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(writer)
    rows = writer.read([writer.ROWS])
    # Another version may be installed than the rows are of.
    found, expected = (
        re.sub(r"transformers [0-9.]+", "transformers", text)
        for text in (writer.PAGE.read_text(), writer.page(rows))
    )
    assert found == expected
    for row in rows:
        assert {cell.layout for cell in row.cells} <= set(LAYOUTS)
        assert all(cell.outcome in ("equal", "refused") for cell in row.cells), row.kind
