"""Context parallelism beside one process: losses, every gradient, every value, on real ranks."""

from __future__ import annotations

from typing import Any

import pytest

from hocket.spec.check import CheckReport
from tests.check.cases import CONTEXT_FAMILIES, CONTEXT_LAYOUTS

TWO = [(f, "cp2") for f in CONTEXT_FAMILIES]
COMBINED = [("llama", layout) for layout in CONTEXT_LAYOUTS]


@pytest.fixture(scope="module")
def references(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("context"))
    families = sorted(CONTEXT_FAMILIES)
    ranks.run(
        "tests.check.cases:references", world_size=2, folder=folder, families=families, backend=None
    )
    return folder


def _require(found: list[list[Any]]) -> None:
    for family, layout, report, _ in found:
        assert isinstance(report, dict), f"{family} {layout}: {report}"
        import json

        checked = CheckReport.from_json(json.dumps(report))
        assert checked.ok, f"{family} {layout}: {checked}"


@pytest.mark.parametrize("kind", ["ring", "ulysses"])
def test_families(ranks: Any, references: str, kind: str) -> None:
    """Grouped heads, windows, soft caps, sinks, latent attention, biases."""
    found = ranks.run(
        "tests.check.cases:context", world_size=2, folder=references, cases=TWO, kind=kind,
        timeout=300.0,
    )  # fmt: skip
    _require(found[0])


@pytest.mark.parametrize("world", [2, 4])
def test_with_every_other_axis(ranks: Any, references: str, world: int) -> None:
    from hocket.spec.layout import Layout

    cases = [case for case in COMBINED if Layout.parse(case[1]).world_size == world]
    found = ranks.run(
        "tests.check.cases:context", world_size=world, folder=references, cases=cases, kind="ring",
        timeout=300.0,
    )  # fmt: skip
    _require(found[0])


@pytest.mark.parametrize(
    "fault",
    ["gradients not summed over dp", "labels shifted after the cut", "positions of a rank",
     "keys of a rank alone"],
)  # fmt: skip
def test_the_check_notices(ranks: Any, references: str, fault: str) -> None:
    found = ranks.run(
        "tests.check.cases:context", world_size=2, folder=references, cases=[("llama", "cp2")],
        kind="ring", fault=fault,
    )  # fmt: skip
    import json

    assert not CheckReport.from_json(json.dumps(found[0][0][2])).ok
