"""Failures on a backend that behaves as NCCL's: the rank at fault is named, not its victims."""

from __future__ import annotations

import time
from typing import Any

import pytest

from hocket.launch.failure import Failure, behind, first
from hocket.launch.symptoms import of_lost_peer
from hocket.spec.errors import RankFailure
from tests.ranks import RankPool

ENTRY = "tests.launch.cases:on_nccl_like"


def failing(ranks: RankPool, how: str, timeout: float, silence: float) -> tuple[str, float]:
    """The message of a run whose rank 1 of 3 ends as `how` says, and after how long it came."""
    ready = 0.0

    def hear(event: dict[str, Any]) -> None:
        nonlocal ready
        ready = time.monotonic()

    with pytest.raises(RankFailure) as caught:
        ranks.launcher.run(
            ENTRY,
            3,
            {"how": how, "rank": 1, "timeout": timeout},
            on_event=hear,
            on_output=lambda rank, line: None,
            silence_timeout=silence,
        )
    return str(caught.value), time.monotonic() - ready


@pytest.mark.ranks
def test_a_killed_rank_is_named_at_once(ranks: RankPool) -> None:
    message, seconds = failing(ranks, "kill", timeout=60.0, silence=60.0)
    assert message.startswith("rank 1 of 3")
    assert "was killed by SIGKILL" in message
    assert seconds < 10.0  # its peers would have waited for a minute


@pytest.mark.ranks
@pytest.mark.parametrize(("how", "telling"), [("hang", "in dwell"), ("stop", "is stopped")])
def test_a_silent_rank_is_named_though_its_peers_do_not_seem_to_wait(
    ranks: RankPool, how: str, telling: str
) -> None:
    message, seconds = failing(ranks, how, timeout=60.0, silence=3.0)
    late = {
        "hang": "it has enqueued 5 collectives of axis dp, rank 0 has 6",
        "stop": "it did not answer",
    }[how]
    suspect = message.index(f"rank 1 (the others may be waiting for it; {late})")
    assert telling in message[suspect:]
    # The victims' stacks show a host that waits for its device, and are not shown in full.
    assert message.count("the others may be waiting") == 1
    assert suspect < message.index("rank 0:")
    assert seconds < 20.0


@pytest.mark.ranks
def test_victims_of_the_watchdog_are_symptoms(ranks: RankPool) -> None:
    # NCCL's watchdog ends the peers of the hung rank first, with SIGABRT.
    message, _ = failing(ranks, "hang", timeout=2.0, silence=60.0)  # short: it expires
    assert "was killed by SIGABRT" in message
    assert "Watchdog caught collective operation timeout" in message
    assert "rank 1 (the others may be waiting for it" in message
    assert "in dwell" in message


@pytest.mark.ranks
def test_groups_are_destroyed_after_a_healthy_run(ranks: RankPool) -> None:
    found = []
    ranks.launcher.run(ENTRY, 2, {"how": "", "rank": None, "timeout": 60.0}, on_event=found.append)
    ends = [(e["how"], e["done"]) for e in found if e["event"] == "destroyed"]
    assert ends == [(["shutdown"], True)] * 2


def test_a_rank_that_the_watchdog_ended_is_not_the_cause() -> None:
    text = "[rank0]: Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5)"
    victim = Failure(0, 10, 1.0, None, -6, ("step 3", text))
    cause = Failure(1, 11, 2.0, None, -9)
    assert victim.symptom
    assert first([victim, cause]) is cause
    assert not Failure(0, 10, 1.0, None, -6, ("free(): invalid pointer",)).symptom


@pytest.mark.parametrize(
    "text",
    [
        "NCCL communicator was aborted on rank 0.",
        "NCCL error in: ProcessGroupNCCL.cpp:77, unhandled system error, NCCL version 2.29.7",
        "ncclRemoteError: A call failed possibly due to a network error or a remote process "
        "exiting prematurely.",
        "[Rank 2] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3, OpType=SEND)",
    ],
)
def test_texts_of_nccl_that_follow_from_another_rank(text: str) -> None:
    assert of_lost_peer(text)


@pytest.mark.parametrize("text", ["CUDA out of memory", "CUDA error: an illegal memory access"])
def test_texts_of_a_cause(text: str) -> None:
    assert not of_lost_peer(text)


def test_who_is_behind() -> None:
    def at(dp: int, tp: int, row: list[int]) -> dict[str, tuple[list[int], int]]:
        return {"dp": ([0, 1, 2, 3], dp), "tp": (row, tp)}

    # Of dp2.tp2 rank 3 does not come; rank 2 waits for it in tp, and all wait in dp.
    found = behind(
        {0: at(4, 9, [0, 1]), 1: at(4, 9, [0, 1]), 2: at(3, 7, [2, 3]), 3: at(3, 6, [2, 3])}
    )
    assert found == {3: "has enqueued 3 collectives of axis dp, rank 0 has 4"}
    assert behind({0: at(4, 9, [0]), 1: at(4, 9, [1])}) == {}
    assert behind({0: None, 1: None}) == {}
