"""The pages of all model types, trained and served, are what their rows say."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from hocket.spec.layout import Layout
from hocket.spec.matrix import LAYOUTS, SERVED_LAYOUTS, SWITCHED, Cell, Matrix, TypeRow

REFERENCE = Path(__file__).resolve().parents[2] / "docs" / "reference"


@pytest.fixture(scope="module")
def writer() -> Any:
    spec = importlib.util.spec_from_file_location("write", REFERENCE / "write_families.py")
    assert spec is not None
    assert spec.loader is not None
    writer = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(writer)
    return writer


@pytest.mark.parametrize("served", [False, True])
def test_the_page_is_what_its_rows_say(writer: Any, served: bool) -> None:
    rows = writer.read(writer.SERVED_ROWS if served else writer.ROWS)
    page = writer.SERVED_PAGE if served else writer.PAGE
    made = (writer.served_page if served else writer.page)(rows)
    # Another version may be installed than the rows are of.
    found, expected = (
        re.sub(r"transformers [0-9.]+", "transformers", text) for text in (page.read_text(), made)
    )
    assert found == expected
    counted = [row for row in rows if served or not row.kind.endswith(SWITCHED)]
    counts = Matrix(layouts=(), rows=tuple(counted)).outcomes()
    readme = (REFERENCE.parents[1] / "README.md").read_text()
    assert f"{counts['equal']} equal, {counts['rejected']} rejected, 0 different" in readme
    for row in rows:
        assert {cell.layout for cell in row.cells} <= {*(SERVED_LAYOUTS if served else LAYOUTS)}
        assert all(cell.outcome in ("equal", "rejected") for cell in row.cells), row.kind
        # A reason is ours: no other library's exception text.
        assert not any(re.search(r"[A-Z]\w+Error: ", cell.reason) for cell in row.cells), row.kind
        assert not any("hocket-check-" in cell.reason for cell in row.cells), row.kind


def test_what_hocket_models_prints_is_of_the_same_rows(writer: Any) -> None:
    from hocket.catalogue.families import families

    rows = writer.read(writer.ROWS), writer.read(writer.SERVED_ROWS)
    assert writer.SUMMARY.read_text() == writer.summary(*rows)
    assert families()["llama"].trains == ("dp", "pp", "tp", "cp", "zero", "sequence")
    assert families()["mamba"].serves == ("dp", "pp")
    assert families()["rwkv"].serves == ()
    assert "recurrent" in families()["rwkv"].why_served


def test_columns_are_written_as_the_rows_write_them() -> None:
    for text in (*LAYOUTS, *SERVED_LAYOUTS):
        assert str(Layout.parse(text)) == text


def test_kept_rows_lose_nothing_but_digits(writer: Any) -> None:
    cells = (
        Cell(layout="dp1", outcome="equal", ratio=0.123456789),
        Cell(layout="tp2", outcome="equal", reason="rounding", ratio=0.5),
        Cell(layout="cp2", outcome="rejected", reason="why"),
        Cell(layout="cp2.tp2", outcome="different", reason="why", ratio=2.0),
    )
    rows = (
        TypeRow(kind="a", architecture="A", num_parameters=7, switches="x=True", cells=cells),
        TypeRow(kind="b", architecture="B", note="n", inferred=True, cells=cells[1:3]),
    )
    first, *others = writer.unpacked(writer.packed(rows))
    assert first.cell("dp1").ratio == 0.123457
    assert [*others, *first.cells[1:]] == [rows[1], *cells[1:]]
    assert (first.num_parameters, first.switches) == (7, "x=True")


@pytest.mark.parametrize("served", [False, True])
def test_the_page_on_experts_counts_types_as_the_rows_do(writer: Any, served: bool) -> None:
    layouts = ("dp2.ep2", "tp2.ep2.etp1") if served else ("dp2.ep2",)
    rows = writer.read(writer.SERVED_ROWS if served else writer.ROWS)
    equal = [
        row.kind
        for row in rows
        if not row.kind.endswith(SWITCHED)
        and all((cell := row.cell(text)) and cell.outcome == "equal" for text in layouts)
    ]
    page = (REFERENCE.parent / "concepts" / "expert-parallel.md").read_text()
    named = "types of [the serving matrix]" if served else "types](../reference/families.md)"
    assert f"{len(equal)} {named}" in page
