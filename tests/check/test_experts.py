"""Mixtures under ep and etp compute what one process of plain transformers computes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hocket.spec.check import CheckReport
from hocket.spec.errors import HocketError
from hocket.spec.layout import Layout
from tests.families import EXPERTS
from tests.ranks import RankPool
from tests.rotation import part

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(400)]

MIXTURES = ("mixtral", *EXPERTS)
EVERY = ("dp2.ep2", "dp2.tp2.ep4.etp1", "dp2.pp2.ep2:microbatches=4")
SLICED = ("mixtral", "qwen3_moe", "olmoe")  # whose experts tp can slice
MORE = {
    "dp2.tp2.ep2": SLICED,
    "tp2.etp1": ("mixtral", "gpt_oss"),
    "tp2.ep2.etp1:microbatches=2": ("deepseek_v3",),
    "dp4.ep2:microbatches=2": ("granitemoe", "mixtral"),
    "dp4.ep2:zero=1": ("mixtral", "deepseek_v3"),
    "dp4.ep2:zero=2,microbatches=2": ("qwen3_moe", "gpt_oss"),
    "dp4.ep2:zero=3,microbatches=2": ("mixtral", "olmoe"),
    "dp2.ep2:zero=1": ("olmoe",),
    "dp2.ep2:zero=3": ("mixtral", "deepseek_v3"),
    "dp2.ep2:zero=3,offload=params": ("mixtral",),
    "dp2.ep2:zero=1,offload=optimizer": ("qwen3_moe",),
    "tp4.ep2.etp1:zero=1": ("mixtral",),
    "dp2.tp2.ep2.etp1:zero=2,microbatches=2": ("mixtral",),
    "dp2.tp2.ep2:zero=3": ("qwen3_moe",),
    "dp2.ep2:microbatches=2,recompute=full": ("mixtral", "deepseek_v3"),
    "dp2.ep2:recompute=selective": ("qwen3_moe",),
    "dp2.ep2:zero=2,recompute=norm+activation+mla_up": ("gpt_oss",),
    "dp2.ep2:zero=2,recompute=norm+activation+mla_up+mlp": ("deepseek_v3",),
    "dp2.tp2.ep2.etp1:sequence_parallel=true,recompute=norm+activation": ("mixtral",),
    "dp2.tp2.ep4.etp1:sequence_parallel=true": ("mixtral", "qwen3_moe"),
    "dp2.tp2.ep2:sequence_parallel=true": ("mixtral",),
    "dp2.tp2.ep2.etp1:zero=3,sequence_parallel=true,recompute=full": ("mixtral",),
    "dp2.pp2.ep2:zero=1,microbatches=4": ("gpt_oss",),
    "dp2.pp2.ep2:zero=3,schedule=zb-v,microbatches=4,virtual_stages=2": ("mixtral",),
    "dp2.tp2.ep4.etp1:order=dp-tp-cp-pp": ("mixtral",),
}
ALL = [(family, layout) for layout in EVERY for family in MIXTURES]
ALL += [(family, layout) for layout, families in MORE.items() for family in families]
CASES = [("mixtral", layout) for layout in EVERY]
CASES += part([case for case in ALL if case not in CASES], 10)

FAULTS = [
    ("experts summed over dp", "mixtral", "dp2.ep2", "experts"),
    ("an expert's copies not summed", "mixtral", "dp4.ep2", "experts"),
    ("tokens not brought back", "mixtral", "dp2.ep2", "gradient"),
    ("gradients not summed over dp", "mixtral", "dp2.ep2", "q_proj"),
]

SEEN = sorted({family for family, _ in CASES} | {"gpt_oss"})


@pytest.fixture(scope="module")
def folder(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The references of all families."""
    path = tmp_path_factory.mktemp("references")
    ranks.run("tests.check.cases:references", 2, backend=None, folder=str(path), families=SEEN)
    return path


@pytest.fixture(scope="module")
def outcomes(ranks: RankPool, folder: Path) -> dict[tuple[str, str], Any]:
    """Every case's report, or what went wrong; one world for all cases of a size."""
    found: dict[tuple[str, str], Any] = {}
    worlds: dict[int, list[tuple[str, str]]] = {}
    for case in CASES:
        worlds.setdefault(Layout.parse(case[1]).world_size, []).append(case)
    for size, cases in worlds.items():
        try:
            rows = ranks.run(
                "tests.check.cases:matrix", size, folder=str(folder), cases=cases, timeout=120.0
            )[0]
        except HocketError as error:
            found |= dict.fromkeys(cases, str(error))
            continue
        found |= {(family, layout): report for family, layout, report, _ in rows}
    return found


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_experts_over_ranks_change_nothing(
    outcomes: dict[tuple[str, str], Any], family: str, layout: str
) -> None:
    outcome = outcomes[family, layout]
    assert isinstance(outcome, dict), outcome
    report = CheckReport.from_json(json.dumps(outcome))
    assert report.ok, "\n".join(report.failures)
    assert report.world_size == Layout.parse(layout).world_size
    # Each shard of the experts is compared on every rank that holds a copy of it.
    experts = next(
        row for row in report.rows if row.name.endswith("down_proj") and ".experts" in row.name
    )
    assert experts.ranks == report.world_size // Layout.parse(layout).pp


@pytest.mark.parametrize(
    ("dispatch", "cases"),
    [
        (
            "node:2",
            [("mixtral", "dp4.ep4"), ("gpt_oss", "dp4.ep4:zero=3,microbatches=2,recompute=full")],
        ),
        (
            "deepep",
            [("mixtral", "dp2.ep2:microbatches=2,recompute=full"), ("gpt_oss", "dp2.ep2:zero=3")],
        ),
    ],
)
def test_other_ways_of_dispatch_change_nothing(
    ranks: RankPool, folder: Path, dispatch: str, cases: list[tuple[str, str]]
) -> None:
    found = ranks.run(
        "tests.check.cases:context", Layout.parse(cases[0][1]).world_size, folder=str(folder),
        cases=cases, dispatch=dispatch, timeout=120.0,
    )  # fmt: skip
    for family, layout, report, _ in found[0]:
        checked = CheckReport.from_json(json.dumps(report))
        assert checked.ok, (family, layout, checked.failures)


@pytest.mark.parametrize(("fault", "family", "layout", "seen"), FAULTS)
def test_a_fault_is_found(
    ranks: RankPool, folder: Path, fault: str, family: str, layout: str, seen: str
) -> None:
    size = Layout.parse(layout).world_size
    rows = ranks.run(
        "tests.check.cases:matrix", size, folder=str(folder), cases=[(family, layout)], fault=fault
    )[0]
    report = CheckReport.from_json(json.dumps(rows[0][2]))
    assert not report.ok
    assert any(seen in failure for failure in report.failures), report.failures[:5]
