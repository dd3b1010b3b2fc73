"""A run with a slow rank, slow link or slow input names it, its cause and its cost."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hocket.cli.main import main
from hocket.launch.spare import is_spare
from tests import rotation
from tests.ranks import RankPool
from tests.support.runs import job, text_in

pytestmark = [
    pytest.mark.train,
    pytest.mark.ranks,
    pytest.mark.usefixtures("runs"),
    pytest.mark.timeout(400),
]

STEPS = 205
"""Four of them are compared: 50, 100, 150 and 200."""


Cause = Callable[[Path, RankPool, pytest.CaptureFixture[str]], None]


def command(folder: Path, layout: str, batch: int, *words: str) -> list[str]:
    return [
        *("train", "tiny-llama", "--data", str(text_in(folder)), "--run", str(folder / "run")),
        *("--layout", layout, "--global-batch", str(batch), "--seq-len", "16", "--device", "cpu"),
        *("--steps", str(STEPS), "--save-every", "0", "--eval-every", "0", "--cluster", "none"),
        *words,
    ]


def named(text: str) -> list[tuple[str, str, int]]:
    """Who is slow, which of its times, and the percentage that it costs, of each finding."""
    found = re.findall(r"step \d+: (.*) (?:is|are) slow: (.*) takes .* all ranks (\d+)%", text)
    return [(who, cause, int(share)) for who, cause, share in found]


def compute(tmp_path: Path, ranks: RankPool, capfd: pytest.CaptureFixture[str]) -> None:
    """As by a host whose processor is taken away: it runs for one fifth of the time."""
    over = threading.Event()
    server = ranks.launcher._server.pid

    def bursts() -> None:
        while not over.wait(0.012):
            listed = Path(f"/proc/{server}/task/{server}/children").read_text().split()
            children = [int(word) for word in listed if not is_spare(int(word))]
            if len(children) == 2:
                for number, pause in ((signal.SIGSTOP, 0.05), (signal.SIGCONT, 0.0)):
                    try:
                        os.kill(children[1], number)
                    except ProcessLookupError:
                        break
                    time.sleep(pause)

    thread = threading.Thread(target=bursts)
    thread.start()
    try:
        assert main(command(tmp_path, "dp2", 4)) == 0
    finally:
        over.set()
        thread.join()
    ((who, cause, share),) = named("".join(capfd.readouterr()))
    assert (who, cause) == ("rank 1", "its compute")
    assert share > 10


def data_source(tmp_path: Path, ranks: RankPool, capfd: pytest.CaptureFixture[str]) -> None:
    """One rank waits before each batch."""
    notes: list[str] = []
    slow = {"kind": "slow", "rank": 1, "phase": "input", "step": 1, "seconds": 0.05}
    job(tmp_path, "run", "dp2", [slow], notes, steps=STEPS, save_every=0, eval_every=0)
    ((who, cause, share),) = named("\n".join(notes))
    assert (who, cause) == ("rank 1", "its input (making the batch)")
    assert share > 10


def link(tmp_path: Path, ranks: RankPool, capfd: pytest.CaptureFixture[str]) -> None:
    """Of three pairs of tensor parallelism one is split between two domains of three ranks."""
    links = "400GB/sx3+8GB/s:scale=1000"
    # Four sequences a rank: with one, gradients over the same link take most of the step.
    assert main(command(tmp_path, "dp3.tp2", 24, "--emulate-links", links)) == 0
    ((who, cause, share),) = named("".join(capfd.readouterr()))
    assert (who, cause) == ("ranks (2, 3)", "the link between them")
    assert share > 10


@pytest.mark.parametrize("cause", rotation.part([compute, data_source, link], 3))
def test_what_is_slow_is_named(
    tmp_path: Path, ranks: RankPool, capfd: pytest.CaptureFixture[str], cause: Cause
) -> None:
    cause(tmp_path, ranks, capfd)
