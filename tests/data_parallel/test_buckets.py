"""Replicas in processes: gradients equal one process's, summed in buckets inside backward."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

from hocket.runtime.data_parallel import bucket_sizes


@pytest.mark.torch
def test_buckets_go_from_the_last_parameter_to_the_first() -> None:
    assert bucket_sizes([4, 4, 4, 4, 4], 8e-6, 4e-6) == [[4], [3, 2], [1, 0]]
    assert bucket_sizes([4, 100, 4], 8e-6, 8e-6) == [[2], [1], [0]]
    assert bucket_sizes([], 8, 8) == []


CASES = [
    {"layout": "dp2", "microbatches": 1, "bucket_bytes": 1e9},
    {"layout": "dp2", "microbatches": 3, "bucket_bytes": 2000},
    {"layout": "dp2", "microbatches": 2, "bucket_bytes": 1, "record": True},
]
FOUR = [
    {"layout": "dp2.pp2", "microbatches": 3, "bucket_bytes": 4000},
    {"layout": "dp2.pp2:schedule=gpipe,virtual_stages=2", "microbatches": 2, "bucket_bytes": 1e9},
    {"layout": "dp2.pp2:schedule=zero-bubble", "microbatches": 3, "bucket_bytes": 4000},
    {"layout": "dp4", "microbatches": 1, "bucket_bytes": 4000},
]


def check(results: list[list[dict[str, Any]]], cases: list[dict[str, Any]], pp: list[int]) -> None:
    for index, case in enumerate(cases):
        mine = [r[index] for r in results]
        for step in range(2):
            total = sum(r["losses"][step] for r in mine)
            assert total == pytest.approx(mine[0]["expected"], rel=1e-5), case
        for result in mine:
            assert result["gradients"] < 1e-4, case
            # The parameter that nothing uses has a gradient of zero, on every rank.
            assert set(result["unused"]) == {0.0}, case
            (row,) = result["collectives"]
            assert row["name"] == "all-reduce"
            assert row["phase"] == "step"
            assert row["bytes"] == sum(result["bytes"]), case


@pytest.mark.ranks
@pytest.mark.timeout(120)
def test_two_data_ranks(ranks: Any) -> None:
    results = ranks.run("tests.data_parallel.cases:batch_of_cases", 2, cases=CASES)
    check(results, CASES, [1, 1, 1])
    assert results[0][0]["collectives"][0]["count"] == 1  # one bucket holds all
    # A bucket per parameter: all but the unused one's begin inside the last backward.
    events = results[0][2]["events"]
    (last,) = [e for e in events if e[1] == "0B1"]
    reductions = [e for e in events if e[0] == "all-reduce"]
    early = [e for e in reductions if last[2] < e[2] < last[3]]
    assert len(early) == len(reductions) - 1
    first = next(e for e in events if e[1] == "0B0")
    assert all(e[2] > first[3] for e in reductions)


@pytest.mark.ranks
@pytest.mark.timeout(120)
def test_data_ranks_and_a_pipeline(ranks: Any) -> None:
    results = ranks.run("tests.data_parallel.cases:batch_of_cases", 4, cases=FOUR)
    check(results, FOUR, [2, 2, 1])


@pytest.mark.ranks
@pytest.mark.timeout(120)
def test_half_precision_gradients(ranks: Any) -> None:
    for result in ranks.run("tests.data_parallel.cases:half_precision", 2):
        # Two rows of ones and two of twos: 2 + 4 everywhere.
        assert result["torch.bfloat16"] == [6.0, 6.0, 72 * 2]
        assert result["torch.float32"] == [6.0, 6.0, 72 * 4]
