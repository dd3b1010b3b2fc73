"""A pipeline gives one process's loss and gradients, whatever the cut and the schedule."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(200)]

HEADER = """# hocket schedule 1
# name: by hand
# microbatches: {}
# stage ranks: 0 1
"""
# Zero bubble: the weights' gradients fill what would be rests.
ZERO_BUBBLE = HEADER.format(3) + (
    "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0I0,0F2,0SEND_F2,0RECV_B1,0I1,0W0,0RECV_B2,0I2,0W1,0W2\n"
    "1RECV_F0,1F0,1I0,1SEND_B0,1RECV_F1,1F1,1I1,1SEND_B1,1W0,1RECV_F2,1F2,1W1,1B2,1SEND_B2\n"
)
OVERLAP = HEADER.format(2) + (
    "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n"
    "1RECV_F0,1F0,1RECV_F1,(1F1;1B0)OVERLAP_F_B,1SEND_B0,1B1,1SEND_B1\n"
)

TWO = [
    {"model": m, "layout": f"pp2:schedule={s}", "microbatches": 4, "bounds": b, "tied": t}
    for m, s, b, t in [
        ("plain", "sequential", [2, 2], False),
        ("plain", "gpipe", [1, 3], True),
        ("plain", "1f1b", [3, 1], True),
        ("plain", "1f1b", [4, 0], False),
        ("plain", "1f1b", [0, 4], False),
        ("llama", "1f1b", [3, 1], False),
        ("llama", "gpipe", [2, 2], True),
        ("gpt2", "1f1b", [1, 3], True),
        ("gpt2", "sequential", [2, 2], False),
        ("gpt2", "zero-bubble", [2, 2], True),
    ]
] + [
    {"model": "llama", "layout": "pp2:virtual_stages=2", "microbatches": 4,
     "bounds": [1, 2, 1, 1], "tied": True},
    {"model": "gpt2", "layout": "pp2:virtual_stages=2,schedule=zb-v", "microbatches": 6,
     "bounds": [1, 1, 2, 1], "tied": True},
    {"model": "plain", "layout": "pp2:virtual_stages=2,schedule=gpipe", "microbatches": 3,
     "bounds": [1, 1, 1, 1]},
    {"model": "llama", "layout": "pp2", "microbatches": 3, "bounds": [2, 2],
     "schedule": ZERO_BUBBLE},
    {"model": "plain", "layout": "pp2", "microbatches": 2, "bounds": [2, 2], "schedule": OVERLAP},
]  # fmt: skip

FOUR = [
    {"model": "plain", "layout": "pp4:schedule=sequential", "microbatches": 2,
     "bounds": [1, 2, 1, 1]},
    {"model": "gpt2", "layout": "pp4:schedule=gpipe", "microbatches": 6, "bounds": [2, 1, 1, 2],
     "tied": True},
    {"model": "llama", "layout": "pp4", "microbatches": 6, "bounds": [1, 1, 1, 1]},
    {"model": "llama", "layout": "pp4", "microbatches": 2, "bounds": [1, 2, 2, 1], "tied": True},
    {"model": "llama", "layout": "pp4:schedule=zero-bubble", "microbatches": 6,
     "bounds": [1, 1, 1, 1], "tied": True},
    {"model": "llama", "layout": "pp4:virtual_stages=2,schedule=zb-v", "microbatches": 12,
     "bounds": [1, 1, 1, 1, 1, 1, 1, 1], "tied": True},
    {"model": "plain", "layout": "pp4:virtual_stages=2", "microbatches": 4,
     "bounds": [1, 1, 1, 1, 1, 1, 1, 1]},
]  # fmt: skip


def check(results: list[list[dict[str, Any]]], cases: list[dict[str, Any]]) -> None:
    for index, case in enumerate(cases):
        for rank, result in enumerate(r[index] for r in results):
            where = (case, rank)
            assert result["loss"] < 1e-5, where
            assert result["gradients"] < 1e-4, where
            assert result["left"] == 0, where
            expected = result["expected"] if result["last"] else [0.0, 0.0]
            assert result["evaluated"] == pytest.approx(expected, rel=1e-5), where


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_two_ranks(ranks: Any, backend: str) -> None:
    run = "tests.runtime_pipeline.cases:batch_of_cases"
    check(ranks.run(run, 2, backend=backend, cases=TWO), TWO)


def test_four_ranks(ranks: Any) -> None:
    results = ranks.run("tests.runtime_pipeline.cases:batch_of_cases", 4, cases=FOUR)
    check(results, FOUR)
    # Every parameter has exactly one home, and no rank holds the whole.
    for index in (i for i, case in enumerate(FOUR) if not case.get("tied")):
        homes = [name for result in results for name in result[index]["names"]]
        assert len(homes) == len(set(homes))
        owned = [result[index]["owned"] for result in results]
        assert sum(owned) == results[0][index]["whole"]
        assert max(owned) < 0.6 * sum(owned)


def test_messages_are_counted_and_actions_recorded(ranks: Any) -> None:
    case = {"model": "plain", "layout": "pp2", "microbatches": 4, "bounds": [2, 2]}
    run = "tests.runtime_pipeline.cases:transparency"
    results = ranks.run(run, 2, record=True, **case)
    # Two steps of four microbatches, each a hidden state of 3 x 12 x 16 floats.
    expected = {"axis": "pp", "phase": "microbatch", "count": 8, "bytes": 8 * 3 * 12 * 16 * 4}
    for result in results:
        assert result["collectives"] == [
            {"name": "receive", **expected},
            {"name": "send", **expected},
        ]
    order = [name for lane, _, name in results[1]["events"] if lane == "compute"]
    step = [f"1{kind}{m}" for m in range(4) for kind in "FB"]
    assert order == step * 2 + ["1F0", "1F1", "1F2", "1F3", "1F4"]
    talk = [name for lane, _, name in results[0]["events"] if lane == "communication"]
    assert talk[:4] == ["0SEND_F0", "0SEND_F1", "0RECV_B0", "0SEND_F2"]
