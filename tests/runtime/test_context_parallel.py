"""Attention over context ranks beside attention written out in plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hocket.runtime.context_parallel.split import part_of, token_indices
from hocket.runtime.mesh import Axis
from hocket.spec.errors import OptionError

CASES: list[dict[str, Any]] = [
    {},
    {"key_heads": 4},
    {"value": 6},
    {"softcap": 2.0},
    {"sinks": True},
    {"mask": "window"},
    {"mask": "window", "sinks": True, "softcap": 1.5},
    {"mask": "documents"},
    {"mask": "padding"},
    {"mask": "one", "dtype": "float64"},
    {"dtype": "float64"},
    {"dtype": "float64", "mask": "window", "softcap": 2.0, "sinks": True, "value": 24},
    {"dtype": "bfloat16"},
    {"dtype": "bfloat16", "mask": "documents"},
]
"""Windows of 5 tokens and documents leave blocks in which a query sees no key; left padding leaves
queries that see none at all."""


LIMITS = {"float64": 1e-12, "float32": 3e-6, "bfloat16": 0.06}


@pytest.mark.parametrize(("kind", "world"), [("ring", 2), ("ulysses", 2), ("ring", 3), ("ring", 4)])
def test_output_and_gradients(ranks: Any, kind: str, world: int) -> None:
    for found in ranks.run(
        "tests.runtime.context_cases:gaps", world_size=world, kind=kind, cases=CASES
    ):
        for case, off in zip(CASES, found, strict=True):
            limit = LIMITS[case.get("dtype", "float32")]
            assert max(off.values()) < limit, (case, off)


def test_on_the_shared_memory_backend(ranks: Any) -> None:
    for found in ranks.run(
        "tests.runtime.context_cases:gaps",
        world_size=4,
        kind="ring",
        cases=CASES[:6],
        backend="shm",
    ):
        assert max(max(off.values()) for off in found) < 3e-6, found


def test_one_key_head_goes_round_the_ring(ranks: Any) -> None:
    for found in ranks.run(
        "tests.runtime.context_cases:gaps", world_size=2, kind="auto", cases=[{"key_heads": 1}]
    ):
        assert max(found[0].values()) < 3e-6, found


def test_what_a_ring_sends(ranks: Any) -> None:
    """Keys and values c - 1 times each way, their gradients c - 1 times: 2 B K s D e of each."""
    size = 2 * 2 * 4 * (24 // 4) * 8 * 4
    for rows in ranks.run("tests.runtime.context_cases:sent", world_size=4, kind="ring"):
        found = {row["name"]: (row["count"], row["bytes"]) for row in rows}
        assert found == {"send": (9, 9 * size), "receive": (9, 9 * size)}


def test_what_ulysses_sends(ranks: Any) -> None:
    """Queries, keys and values in one, the output in another; and backward the same."""
    one = 2 * 4 * (24 // 2) * 8 * 4
    for rows in ranks.run("tests.runtime.context_cases:sent", world_size=2, kind="ulysses"):
        found = {row["name"]: (row["count"], row["bytes"]) for row in rows}
        assert found == {"all-to-all": (4, 2 * (3 + 1) * one)}


@pytest.mark.parametrize("degree", [1, 2, 3, 4])
def test_every_token_is_dealt_once_and_work_is_even(degree: int) -> None:
    parts = [token_indices(24, rank, degree) for rank in range(degree)]
    assert torch.cat(parts).sort().values.tolist() == list(range(24))
    assert len({int((part + 1).sum()) for part in parts}) == 1  # keys that its queries see


def test_labels_are_shifted_before_the_cut() -> None:
    ids = torch.arange(100, 116).view(2, 8)
    for shifted in (False, True):
        given = {"input_ids": ids, "labels": ids + 1 if shifted else ids}
        for rank in range(2):
            axis = Axis("cp", 2, rank, (0, 1))
            part = part_of(given, axis, labels_shifted=shifted)
            follows = part["input_ids"] + 1
            if not shifted:
                follows[part["position_ids"] == 7] = -100
            assert torch.equal(part["labels"], follows)
            assert torch.equal(part["position_ids"][0], token_indices(8, rank, 2))


def test_a_length_that_does_not_divide_is_rejected() -> None:
    with pytest.raises(OptionError, match="2 x cp = 4 chunks") as caught:
        token_indices(10, 0, 2)
    assert caught.value.hint == "--seq-len 8"
