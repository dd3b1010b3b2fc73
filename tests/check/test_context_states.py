"""Recurrent layers over context ranks against one process of plain transformers: losses, every
gradient, every value."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hocket.spec.check import CheckReport
from hocket.spec.layout import Layout
from tests.families import HYBRIDS

TWO = [(family, f"cp2{more}") for family in HYBRIDS for more in ("", ":recompute=full")]
FOUR = [(family, "cp4") for family in HYBRIDS]
MAMBA2, DELTA = "bamba", "qwen3_next"
COMBINED = [
    (family, layout)
    for family in (MAMBA2, DELTA)
    for layout in (
        "cp2:recompute=selective", "cp2:zero=3", "cp2:microbatches=2", "cp4:recompute=full,zero=1",
        "dp2.cp2:zero=2", "cp2.tp2", "cp2.pp2:microbatches=2", "cp2.pp2:microbatches=4,zero=1",
    )
]  # fmt: skip
COMBINED += [("mamba2", "cp2.pp2:microbatches=2"), ("falcon_h1", "cp2.tp2")]


@pytest.fixture(scope="module")
def references(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("states"))
    ranks.run(
        "tests.check.cases:references", world_size=2, folder=folder, families=sorted(HYBRIDS),
        backend=None, timeout=300.0,
    )  # fmt: skip
    return folder


def _equal(ranks: Any, folder: str, cases: list[tuple[str, str]]) -> None:
    world = Layout.parse(cases[0][1]).world_size
    found = ranks.run(
        "tests.check.cases:context", world_size=world, folder=folder, cases=cases, kind="ring",
        timeout=400.0,
    )  # fmt: skip
    for family, layout, report, _ in found[0]:
        checked = CheckReport.from_json(json.dumps(report))
        assert checked.ok, f"{family} {layout}: {checked}"


@pytest.mark.timeout(600)
def test_families_over_two_ranks(ranks: Any, references: str) -> None:
    _equal(ranks, references, TWO)


@pytest.mark.timeout(600)
def test_families_over_four_ranks(ranks: Any, references: str) -> None:
    _equal(ranks, references, FOUR)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("world", [2, 4])
def test_with_every_other_axis(ranks: Any, references: str, world: int) -> None:
    _equal(ranks, references, [c for c in COMBINED if Layout.parse(c[1]).world_size == world])


@pytest.mark.timeout(300)
@pytest.mark.parametrize("family", ["mamba2", MAMBA2, "olmo_hybrid", "lfm2"])
def test_in_double_precision(ranks: Any, tmp_path: Path, family: str) -> None:
    found = ranks.run(
        "tests.check.context_cases:trained", world_size=2, folder=str(tmp_path), family=family,
        layout="cp2", options={}, dtype="fp64", timeout=200.0,
    )  # fmt: skip
    report = CheckReport.from_json(json.dumps(found[0]))
    assert report.ok, report


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("family", "fault"),
    [
        (MAMBA2, "states not handed on"),
        (DELTA, "states not handed on"),
        ("lfm2", "inputs not handed on"),
        (DELTA, "gradients of states not handed back"),
    ],
)
def test_the_check_notices(ranks: Any, references: str, family: str, fault: str) -> None:
    found = ranks.run(
        "tests.check.cases:context", world_size=2, folder=references, cases=[(family, "cp2")],
        kind="ring", fault=fault,
    )  # fmt: skip
    assert not CheckReport.from_json(json.dumps(found[0][0][2])).ok


def test_a_second_model_of_the_process_is_whole(ranks: Any) -> None:
    """Functions of transformers' modules are replaced for good; models that are not split do not
    notice."""
    types = [MAMBA2, DELTA, MAMBA2]
    found = ranks.run("tests.check.context_cases:reasons", world_size=2, types=types, timeout=200.0)
    assert found == [[""] * 3] * 2
