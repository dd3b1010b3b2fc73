"""The one table of what runs here."""

from __future__ import annotations

import dataclasses

import pytest

from hocket.spec.capabilities import TABLE, absent, runnable, runs
from hocket.spec.layout import Layout


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("dp2.pp2.tp2:schedule=zero-bubble", []),
        ("dp2.pp2.tp2:schedule=zero-bubble,recompute=full,recompute_layers=2", []),
        ("dp4:zero=3", []),
        ("dp2.cp2.tp2:zero=1,recompute=full", []),
        ("dp2.tp2.ep4.etp1", []),
        ("tp4.etp2", ["etp"]),
        ("dp4.pp2.tp2:zero=3,shard=2,schedule=zero-bubble,recompute=full", []),
        ("tp2:recompute=full,sequence_parallel=true", []),
        ("tp2:recompute=norm+activation+mla_up", []),
    ],
)
def test_what_a_layout_asks_for_and_the_runtime_lacks(text: str, fields: list[str]) -> None:
    layout = Layout.parse(text)
    assert [row.field for row in absent(layout)] == fields
    assert runs(layout) == (not fields)
    assert runs(runnable(layout))


def test_a_reason_holds_the_value() -> None:
    layout = Layout.parse("tp2:sequence_parallel=true")
    assert absent(layout) == []
    (row,) = absent(layout, serving=True)
    said = row.reason(layout)
    assert said == "sequence_parallel is true: this release keeps whole sequences between layers"


def test_every_row_names_a_field_and_runs_its_default() -> None:
    defaults = {field.name: field.default for field in dataclasses.fields(Layout)}
    assert all(row.runs[0] == defaults[row.field] for row in TABLE)


def test_what_runs_is_left_as_it_is() -> None:
    layout = Layout.parse("dp2.pp2:schedule=gpipe,microbatches=4")
    assert runnable(layout) == layout
