"""Dispatch to experts: hand-made routings, against the family's own loop over experts."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from hocket.runtime.expert_parallel.experts import sharded_experts_class  # noqa: E402
from hocket.runtime.tensor_parallel.experts import sliced_experts_class as sliced  # noqa: E402
from tests.runtime.expert_cases import block  # noqa: E402

ROUTINGS = ("spread", "one", "empty")


@pytest.mark.ranks
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize(
    ("layout", "family", "way"),
    [
        *(
            (layout, family, way)
            for way in ("dispatched", "gathered")
            for layout, family in (
                ("dp2.ep2", "mixtral"),
                ("dp2.ep2", "gpt_oss"),
                ("dp4.ep2", "deepseek_v3"),
                ("dp2.tp2.ep4.etp1", "granitemoe"),
                ("tp2.etp1", "mixtral"),
                ("tp2.ep2.etp1", "mixtral"),
            )
        ),
        ("dp2.ep2", "mixtral", "library"),
        ("dp4.ep4", "gpt_oss", "library"),
        ("dp2.tp2.ep4.etp1", "granitemoe", "library"),
    ],
)
def test_each_token_reaches_its_experts_and_comes_back(
    ranks, layout: str, family: str, routing: str, way: str
) -> None:
    size = 4 if "dp4" in layout or "dp2.tp2" in layout else 2
    found = ranks.run(
        "tests.runtime.expert_cases:experts", size,
        layout=layout, family=family, routing=routing, way=way,
    )  # fmt: skip
    rows = [row.pop("rows") for row in found]
    for rank, row in enumerate(found):
        assert row.pop("crossed") == 0.0
        del row["to cross"]
        assert max(row.values()) < 2e-6, (rank, row)
    if "ep" in layout.replace("etp", ""):
        # Routed to one half of the experts, some rank has no token at all, and still answers.
        assert (min(rows) == 0.0) == (routing != "spread")


@pytest.mark.ranks
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize(
    ("layout", "family"),
    [
        ("dp4.ep4", "mixtral"),
        ("dp4.ep4", "gpt_oss"),
        ("dp2.tp2.ep4.etp1", "granitemoe"),
    ],
)
def test_a_token_crosses_the_network_once_for_each_node(
    ranks, layout: str, family: str, routing: str
) -> None:
    found = ranks.run(
        "tests.runtime.expert_cases:experts", 4,
        layout=layout, family=family, routing=routing, way="node",
    )  # fmt: skip
    rows = [row.pop("rows") for row in found]
    for rank, row in enumerate(found):
        assert row.pop("crossed") == row.pop("to cross")
        assert max(row.values()) < 2e-6, (rank, row)
    assert (min(rows) == 0.0) == (routing != "spread")


def test_the_class_keeps_the_slices_of_tp_outside() -> None:
    kind = type(block("mixtral").experts)
    names = [base.__name__ for base in sharded_experts_class(sliced(kind)).__mro__[1:4]]
    assert names == ["TensorParallelExperts", "ExpertParallelExperts", kind.__name__]
