"""Sums by the kernel are those of the group, in the order of ranks, and tell who is missing."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from hocket.runtime.native.library import library
from hocket.spec.errors import RankFailure
from hocket.spec.layout import Layout
from tests.families import whole_model
from tests.ranks import RankPool

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(120)]
CASES = "tests.serving.sum_cases:"


@pytest.fixture(autouse=True)
def compiled() -> None:
    if library() is None:
        pytest.skip("no C compiler here")


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_every_rank_has_the_sum_in_the_order_of_ranks(ranks: RankPool, world_size: int) -> None:
    found = ranks.run(CASES + "equal", world_size, backend="shm")
    assert found == [[True, 0, 120 + 24 + 1]] * world_size


def test_lesser_processors_sum_identically(ranks: RankPool, form: str) -> None:
    found = ranks.run(CASES + "equal", 2, backend="shm", form=form)
    assert found == [[True, 0, 120 + 24 + 1]] * 2


def test_ranks_that_share_no_memory_have_none(ranks: RankPool) -> None:
    assert ranks.run(CASES + "equal", 2, backend="gloo") == [[False, 0]] * 2


def test_sums_of_different_sizes_are_reported(ranks: RankPool) -> None:
    for text in ranks.run(CASES + "unequal", 2, backend="shm"):
        assert "different sizes" in text


def test_a_late_rank_is_named(ranks: RankPool) -> None:
    first, _, third = ranks.run(CASES + "late", 3, backend="shm", timeout=2.5)  # short: it expires
    for text, seconds in (first, third):
        assert "did not come: rank 1" in text
        assert 2.5 <= seconds < 5.5


def test_a_dead_rank_is_named(ranks: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    # The parent would end the peers before they notice; under torchrun nobody does.
    monkeypatch.setattr("hocket.launch.watch.GRACE", 60.0)
    events: list[dict[str, Any]] = []
    payload = {"case": CASES + "bereaved", "backend": "shm", "timeout": 60, "kwargs": {}}
    begin = time.monotonic()
    with pytest.raises(RankFailure, match=r"rank 2 of 3 .* was killed by SIGKILL"):
        ranks.launcher.run("tests.ranks:call", 3, payload, on_event=events.append)
    assert time.monotonic() - begin < 10.0  # as they notice it, and not as their time is over
    (pid,) = [e["pid"] for e in events if e["event"] == "dying"]
    errors = {e["rank"]: e["text"] for e in events if e["event"] == "noticed"}
    assert sorted(errors) == [0, 1]
    assert all(f"rank 2 (process {pid}) died" in text for text in errors.values())


def test_what_is_unfinished_elsewhere_goes_on(ranks: RankPool) -> None:
    assert ranks.run(CASES + "unfinished", 2, backend="shm", timeout=60) == [4.0, 4.0]


@pytest.mark.parametrize("layout", ["tp2", "tp4", "tp2.pp2"])
def test_split_layers_that_sum_by_it_equal_the_whole_model(
    ranks: RankPool, tmp_path: Path, layout: str
) -> None:
    families = ["llama", "llama_tied", "mistral", "gemma3", "qwen3"]
    for family in families:
        whole_model(family).save_pretrained(tmp_path / family)
    results = ranks.run(
        "tests.serving.paged_cases:serve",
        Layout.parse(layout).world_size,
        backend="shm",
        folder=str(tmp_path),
        cases=[(family, layout) for family in families],
    )
    for number, family in enumerate(families):
        errors = [result[number][2] for result in results if result[number][2] is not None]
        assert len(errors) == Layout.parse(layout).tp
        assert max(errors) < 1e-5, (family, errors)
