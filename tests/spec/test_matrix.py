"""The matrix's words, by hand."""

from __future__ import annotations

import dataclasses

from hocket.spec.layout import Layout
from hocket.spec.matrix import LAYOUTS, QUICK, Cell, Matrix, TypeRow, axes_of


def row(kind: str, **outcomes: str) -> TypeRow:
    cells = tuple(
        Cell(layout=text.replace("_", ".").replace("zero", ":zero="), outcome=outcome)
        for text, outcome in outcomes.items()
    )
    return TypeRow(kind=kind, architecture="A", cells=cells)


def test_rows_read_back_equal() -> None:
    cell = Cell(layout="tp2", outcome="different", reason="far", ratio=3.0, seconds=1.5)
    whole = TypeRow(
        kind="a", architecture="A", num_parameters=3, note="n", inferred=True, cells=(cell,)
    )
    assert TypeRow.from_json(whole.to_json()) == whole


def test_every_axis_alone_in_pairs_and_together_with_and_without_zero() -> None:
    assert all(str(Layout.parse(text)) == text for text in (*LAYOUTS, *QUICK))
    more = {"zero", "sequence"}
    plain = {frozenset(axes_of(Layout.parse(t)) - more) for t in LAYOUTS if "zero" not in t}
    sharded = {frozenset(axes_of(Layout.parse(t)) - more) for t in LAYOUTS if "zero" in t}
    sliced = {frozenset(axes_of(Layout.parse(t)) - more) for t in LAYOUTS if "sequence" in t}
    sets = [{"dp"}, {"pp"}, {"tp"}, {"dp", "pp"}, {"dp", "tp"}, {"pp", "tp"}, {"dp", "pp", "tp"}]
    contexts = [{"cp"}, {"pp", "cp", "tp"}]
    experts = [{"dp", "ep"}, {"dp", "tp", "ep"}, {"dp", "pp", "ep"}]
    assert plain == {frozenset(axes) for axes in (*sets, *contexts, *experts)}
    assert sharded == {frozenset(axes) for axes in sets if "dp" in axes}
    assert sliced == {frozenset({"tp"}), frozenset({"dp", "pp", "tp"})}
    assert {Layout.parse(t).zero for t in LAYOUTS} == {0, 1, 2, 3}
    assert set().union(*(axes_of(Layout.parse(t)) for t in QUICK)) == {"dp", "pp", "tp", "zero"}


def test_a_type_trains_under_axes_where_all_their_layouts_are_equal() -> None:
    good = row("a", dp2="equal", pp2="equal", dp2_pp2="equal", dp2zero1="equal", tp2="rejected")
    assert good.trains_under("dp", "pp", "zero")
    assert not good.trains_under("dp", "pp", "tp", "zero")
    assert not good.trains_under("tp")
    assert not row("a", dp2="equal").trains_under("dp", "pp")
    sliced = Cell(layout="tp2:sequence_parallel=true", outcome="rejected")
    whole = row("a", tp2="equal")
    unsliced = dataclasses.replace(whole, cells=(*whole.cells, sliced))
    assert unsliced.trains_under("tp")
    assert not unsliced.trains_under("tp", "sequence")
    assert not row("a", dp2="equal", pp2="equal", dp2_pp2="different").trains_under("dp", "pp")


def test_a_matrix_is_ok_without_a_difference_or_a_crash() -> None:
    assert Matrix(layouts=("dp2",), rows=(row("a", dp2="equal", tp2="rejected"),)).ok
    assert not Matrix(layouts=("dp2",), rows=(row("a", dp2="different"),)).ok
    assert not Matrix(layouts=("dp2",), rows=(row("a", dp2="crashed"),)).ok
    assert not Matrix(layouts=("dp2",), rows=()).ok
