"""The shared-memory backend computes what Gloo computes, in any order, and tells who is missing."""

from __future__ import annotations

import time
from typing import Any

import pytest

from hocket.spec.errors import RankFailure
from tests.ranks import RankPool

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(200)]
CASES = "tests.shm.cases:"


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_all_reduce_equals_gloo(ranks: RankPool, world_size: int) -> None:
    counts = ranks.run(CASES + "all_reduce", world_size, backend="shm", timeout=60)
    assert counts[0] > 100
    assert len(set(counts)) == 1


@pytest.mark.parametrize("size", [7, 100_000, 700_001])
def test_every_rank_holds_the_same_bits(ranks: RankPool, size: int) -> None:
    case = CASES + "every_rank_holds_the_same_bits"
    assert len(set(ranks.run(case, 4, backend="shm", size=size))) == 1


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_pieces_move_as_with_gloo(ranks: RankPool, world_size: int) -> None:
    counts = ranks.run(CASES + "moving", world_size, backend="shm", timeout=60)
    assert counts == [4 * 3 * (2 * 4 + 5)] * world_size


def test_all_to_all_of_uneven_pieces(ranks: RankPool) -> None:
    assert ranks.run(CASES + "uneven", 3, backend="shm") == [True] * 3


def test_tensors_that_are_not_contiguous(ranks: RankPool) -> None:
    total = 24 * 6.0
    for rank, found in enumerate(ranks.run(CASES + "strided", 3, backend="shm")):
        assert found == [total, 4 * 3.0, 24 * ((rank - 1) % 3 + 0.5), 6.0, 3.0]


def test_subgroups(ranks: RankPool) -> None:
    found = ranks.run(CASES + "subgroups", 4, backend="shm")
    assert found == [[1.0, 2.0, 2.0], [1.0, 4.0, 3.0], [5.0, 2.0, 2.0], [5.0, 4.0, 3.0]]


@pytest.mark.parametrize(("world_size", "seed"), [(2, 1), (2, 2), (3, 3), (4, 4)])
def test_asynchronous_calls_in_any_order(ranks: RankPool, world_size: int, seed: int) -> None:
    found = ranks.run(CASES + "asynchronous", world_size, backend="shm", timeout=60, seed=seed)
    assert found == [0.0] * world_size


def test_messages(ranks: RankPool) -> None:
    first, second = ranks.run(CASES + "messages", 2, backend="shm", timeout=60)
    assert first == [True]
    assert second == [1.0, 3.0, 0.0, 2.0, 4.0, True, [0, 7.0]]


@pytest.mark.parametrize(
    ("how", "telling"),
    [
        ("kind", "rank 0 all-reduce of 32 bytes; rank 1 barrier of 0 bytes"),
        ("size", "rank 0 all-reduce of 32 bytes; rank 1 all-reduce of 64 bytes"),
        ("message", "rank 0 sent 32 bytes where rank 1 receives 16"),
    ],
)
def test_ranks_that_call_different_things_are_reported(
    ranks: RankPool, how: str, telling: str
) -> None:
    found = ranks.run(CASES + "mismatch", 2, backend="shm", how=how)
    assert telling in found[1]
    assert how == "message" or telling in found[0]


def test_a_late_rank_is_named(ranks: RankPool) -> None:
    first, _, third = ranks.run(CASES + "late", 3, backend="shm", timeout=2.5)  # short: it expires
    for text, seconds in (first, third):
        assert "did not come: rank 1" in text
        assert "all-reduce" in text
        assert seconds < 6.0


@pytest.mark.parametrize("how", ["collective", "receive"])
def test_a_dead_rank_is_named_to_its_peers_and_to_the_parent(
    ranks: RankPool, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The parent would end the peers before they notice; under torchrun nobody does.
    monkeypatch.setattr("hocket.launch.watch.GRACE", 60.0)
    events: list[dict[str, Any]] = []
    payload = {"case": CASES + "bereaved", "backend": "shm", "timeout": 60, "kwargs": {"how": how}}
    begin = time.monotonic()
    with pytest.raises(RankFailure, match=r"rank 2 of 3 .* was killed by SIGKILL"):
        ranks.launcher.run("tests.ranks:call", 3, payload, on_event=events.append)
    assert time.monotonic() - begin < 10.0  # as they notice it, and not as their time is over
    (pid,) = [e["pid"] for e in events if e["event"] == "dying"]
    errors = {e["rank"]: e["text"] for e in events if e["event"] == "noticed"}
    assert sorted(errors) == [0, 1]
    assert all(f"rank 2 (process {pid}) died" in text for text in errors.values())


def test_nothing_is_left_to_be_found(ranks: RankPool) -> None:
    assert ranks.run(CASES + "traces", 2, backend="shm") == [[], []]


def test_fsdp_and_dtensor_run_on_it(ranks: RankPool) -> None:
    for found in ranks.run(CASES + "functional", 2, backend="shm", timeout=60):
        assert found == pytest.approx([0.0, 0.0], abs=1e-5)


def test_a_group_has_no_devices_until_torch_has_made_it(ranks: RankPool) -> None:
    """torch 2.15 asks a new group that has some for a backend in C++."""
    assert ranks.run(CASES + "devices", 2, backend="shm") == [[[], ["cpu"]]] * 2
