"""Flex attention over tensor ranks: each has its heads and their sinks."""

from __future__ import annotations

import pytest

from tests.ranks import RankPool

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("sequence", [False, True])
def test_heads_and_sinks_are_split_over_ranks(ranks: RankPool, sequence: bool) -> None:
    """Loss and gradients over tp2 are those of the family's own code in one process."""
    found = ranks.run(
        "tests.models.flex_cases:over_tp", world_size=2, families=["gemma2", "gpt_oss"],
        sequence=sequence,
    )  # fmt: skip
    for each in (row for by_rank in found for row in by_rank):
        assert each["calls"] == 4
        assert each["heads"] == 2
        assert each["sinks"] == ([2] * 4 if each["family"] == "gpt_oss" else [])
        assert each["loss"] == pytest.approx(each["wanted"], abs=1e-4), each
        assert each["gap"] < 1e-3, each
