"""The pages of all model types, trained and served, are what their rows say."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from hocket.spec.matrix import LAYOUTS, SERVED_LAYOUTS

REFERENCE = Path(__file__).resolve().parents[2] / "docs" / "reference"


@pytest.mark.parametrize("served", [False, True])
def test_the_page_is_what_its_rows_say(served: bool) -> None:
    spec = importlib.util.spec_from_file_location("write", REFERENCE / "write_families.py")
    assert spec is not None
    assert spec.loader is not None
    writer = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(writer)
    rows = writer.read([writer.SERVED_ROWS if served else writer.ROWS])
    page = writer.SERVED_PAGE if served else writer.PAGE
    made = (writer.served_page if served else writer.page)(rows)
    # Another version may be installed than the rows are of.
    found, expected = (
        re.sub(r"transformers [0-9.]+", "transformers", text) for text in (page.read_text(), made)
    )
    assert found == expected
    for row in rows:
        assert {cell.layout for cell in row.cells} <= {*(SERVED_LAYOUTS if served else LAYOUTS)}
        assert all(cell.outcome in ("equal", "refused") for cell in row.cells), row.kind
        # A reason is ours: no other library's exception text.
        assert not any(re.search(r"[A-Z]\w+Error: ", cell.reason) for cell in row.cells), row.kind


def test_what_hocket_models_prints_is_of_the_same_rows() -> None:
    from hocket.catalogue.families import families

    spec = importlib.util.spec_from_file_location("write", REFERENCE / "write_families.py")
    assert spec is not None
    assert spec.loader is not None
    writer = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(writer)
    rows = writer.read([writer.ROWS]), writer.read([writer.SERVED_ROWS])
    assert writer.SUMMARY.read_text() == writer.summary(*rows)
    assert families()["llama"].trains == ("dp", "pp", "tp", "cp", "zero", "sequence")
    assert families()["mamba"].serves == ("dp", "pp")
    assert families()["rwkv"].serves == ()
    assert "recurrent" in families()["rwkv"].why_served
