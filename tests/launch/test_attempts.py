"""Ranks of one attempt agree on its number, whatever each host has counted."""

from __future__ import annotations

import datetime
import subprocess
import sys
import time

import pytest

from tests.ranks import ROOT

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.timeout(90)]

RANK = """\
import sys, time
from hocket.launch.joined import joined_context
context = joined_context()
store = context.store(30)
if context.rank:
    print(context.attempt, store.get("word").decode(), flush=True)
else:
    store.set("word", sys.argv[1])
    print(context.attempt, sys.argv[1], flush=True)
    sys.stdin.read()  # it answers as long as it lives
"""


def start(rank: int, port: int, count: int, word: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", RANK, word], text=True, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={
            "PATH": "/usr/bin:/bin", "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}", "RANK": str(rank),
            "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            "TORCHELASTIC_RESTART_COUNT": str(count), "TORCHELASTIC_USE_AGENT_STORE": "True",
        },
    )  # fmt: skip


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_a_host_that_did_not_count_an_attempt_still_joins_it() -> None:
    """Rank 1's host has counted a failure that rank 0's host only hears of."""
    store = torch.distributed.TCPStore(
        "127.0.0.1", 0, None, True, timeout=datetime.timedelta(seconds=30), wait_for_workers=False
    )
    for attempt, counts in enumerate([(0, 0), (0, 1), (1, 1)]):
        word = f"word {attempt}"
        late = attempt == 1  # of what an earlier attempt left in the store, nothing is taken
        ranks = []
        for rank in (1, 0) if late else (0, 1):
            ranks.append(start(rank, store.port, counts[rank], word))
            time.sleep(0.5)
        try:
            assert [first_line(process) for process in ranks] == [f"{attempt} {word}"] * 2
        finally:
            for process in ranks:
                process.kill()
                process.wait()
