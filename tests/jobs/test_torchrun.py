"""Agents of torchrun that are killed and come back: their ranks end with them, the run goes on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import ROOT
from tests.support.ports import free_ports
from tests.support.runs import job, losses, text_in

pytestmark = [
    pytest.mark.train,
    pytest.mark.ranks,
    pytest.mark.usefixtures("runs"),
    pytest.mark.timeout(240),
]

FOREIGN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
CONSTANT: dict[str, Any] = {"lr_schedule": "constant", "lr": 1e-3, "eval_every": 0}
EVERY = 10


class Agents:
    """Agents of one job of torchrun, each as on a host of its own; all meet at one port."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.folder, self.words = folder, words
        self.started: list[subprocess.Popen[bytes]] = []
        self.port = free_ports(1)

    def start(self, ranks: int) -> subprocess.Popen[bytes]:
        environment = {k: v for k, v in os.environ.items() if k not in FOREIGN and "SLURM" not in k}
        environment |= {"PYTHONPATH": f"{ROOT}:{ROOT / 'src'}", "OMP_NUM_THREADS": "1"}
        environment |= {"GLOO_SOCKET_IFNAME": "lo", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        meeting = f"is_host={int(not self.started)},last_call_timeout=1,keep_alive_interval=1"
        with (self.folder / f"agent-{len(self.started)}.log").open("wb") as log:
            agent = subprocess.Popen(
                [
                    *(sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2"),
                    *("--max-restarts=5", f"--nproc-per-node={ranks}", "--rdzv-backend=c10d"),
                    *(f"--rdzv-endpoint=127.0.0.1:{self.port}", f"--rdzv-conf={meeting}"),
                    *("--monitor-interval=0.1", "-m", "--", "hocket", *self.words),
                ],
                cwd=self.folder, env=environment, stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip
        self.started.append(agent)
        return agent

    def kill(self) -> None:
        """End all agents; their ranks end with them."""
        for agent in self.started:
            agent.kill()
            agent.wait()

    def output(self, number: int) -> str:
        return (self.folder / f"agent-{number}.log").read_text()


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Callable[..., Agents]]:
    made: list[Agents] = []

    def make(*words: str) -> Agents:
        made.append(Agents(tmp_path, *words))
        return made[-1]

    yield make
    for one in made:
        one.kill()


def rows(folder: Path) -> list[dict[str, Any]]:
    """Rows of metrics.jsonl that are complete."""
    file = folder / "run" / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def until(condition: Callable[[], object], seconds: float = 100) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def state(folder: Path, name: str, step: int) -> dict[str, bytes]:
    """Weights and optimizer state of rank 0 in a checkpoint."""
    from safetensors.numpy import load_file

    path = folder / name / "checkpoints" / f"step-{step:06d}" / "rank-00000.safetensors"
    return {k: v.tobytes() for k, v in load_file(path).items() if not k.startswith("random/")}


def command(batch: int) -> list[str]:
    return [
        *("train", "tiny-llama", "--data", "text.txt", "--run", "run", "--layout", "dp4"),
        *("--seq-len", "16", "--global-batch", str(batch), "--steps", "100000"),
        *("--save-every", str(EVERY), "--eval-every", "0", "--warmup", "2", "--lr", "1e-3"),
        *("--lr-schedule", "constant", "--device", "cpu", "--cluster", "none", "--elastic"),
    ]


def test_four_ranks_then_three_then_four(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    agents: Callable[..., Agents],
) -> None:
    """An agent is killed and its host comes back: the losses are those of one process, and the
    weights those of a run that is resumed by hand in the same layouts at the same steps."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # nothing was measured
    options: dict[str, Any] = {"global_batch": 12, "warmup": 2, **CONSTANT}
    text_in(tmp_path)
    torchrun = agents(*command(12))

    def reached(layout: str) -> Callable[[], bool]:
        def found() -> bool:
            last = [row["layout"] for row in rows(tmp_path)][-EVERY - 1 :]
            return len(last) > EVERY and all(text.startswith(layout) for text in last)

        return found

    torchrun.start(3)
    lost = torchrun.start(1)
    until(reached("dp4"))
    (orphan,) = children(lost.pid)
    lost.kill()
    until(lambda: not Path(f"/proc/{orphan}").exists(), 5)
    until(reached("dp3"))
    torchrun.start(1)
    until(reached("dp4"))
    torchrun.kill()
    used = {row["step"]: row["layout"] for row in rows(tmp_path)}
    few = [step for step, text in used.items() if text.startswith("dp3")]
    assert few == list(range(few[0], few[-1] + 1))
    assert (few[0] - 1) % EVERY == 0
    assert "rank 3 ends: the torchrun agent" in torchrun.output(1)
    last = max(int(path.name[-6:]) for path in (tmp_path / "run" / "checkpoints").glob("step-*"))
    assert last > few[-1]

    options["save_every"] = EVERY
    for layout, steps, backend in (
        ("dp4", few[0] - 1, "gloo"),  # of two hosts
        (used[few[0]], few[-1], "auto"),
        ("dp4", last, "gloo"),
    ):
        job(tmp_path, "by-hand", layout, steps=steps, backend=backend, **options)
    assert state(tmp_path, "by-hand", last) == state(tmp_path, "run", last)

    job(tmp_path, "one", "dp1", steps=last, **options)
    found, wanted = losses(tmp_path, "run")[:last], losses(tmp_path, "one")
    assert [step for step, _ in found] == [step for step, _ in wanted]
    assert [loss for _, loss in found] == pytest.approx([loss for _, loss in wanted], rel=2e-5)


PREPARES = """
import sys, time
from pathlib import Path
import hocket.jobs.train as train
from hocket.cli.main import main
from hocket.launch import joined_context
train.STARTUP = float(sys.argv.pop(1))
prepare = train._prepare_joined
def slowly(*given):
    Path("prepares").touch()
    while not Path("waits").exists():
        time.sleep(0.1)
    time.sleep(6)
    return prepare(*given)
train._prepare_joined = slowly
if joined_context().rank:
    Path("waits").touch()
sys.exit(main(sys.argv[1:]))
"""


def test_ranks_wait_for_data_as_long_as_rank_0_prepares_it(tmp_path: Path) -> None:
    """Longer than they wait for the store: tokenizing, or a checksum of all tokens, takes hours."""
    text_in(tmp_path)
    port = free_ports(1)
    environment = {k: v for k, v in os.environ.items() if k not in FOREIGN and "SLURM" not in k}
    environment |= {"PYTHONPATH": f"{ROOT}:{ROOT / 'src'}", "WORLD_SIZE": "2"}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    options = ["--layout", "dp2", "--seq-len", "16", "--global-batch", "2", "--steps", "2"]
    words = ["train", "tiny-llama", "--data", "text.txt", "--run", "run", "--cluster", "none"]
    ranks = []
    try:
        for rank, startup in ((0, "60"), (1, "2")):
            ranks.append(
                subprocess.Popen(
                    [sys.executable, "-c", PREPARES, startup, *words, *options, "--device", "cpu"],
                    cwd=tmp_path, env={**environment, "RANK": str(rank)}, stderr=subprocess.PIPE,
                    stdout=subprocess.DEVNULL, text=True,
                )
            )  # fmt: skip
            until(lambda: (tmp_path / "prepares").exists() or ranks[0].poll() is not None)
        ended = [(rank.communicate(timeout=100)[1], rank.returncode) for rank in reversed(ranks)]
    finally:
        for one in ranks:
            one.kill()
    assert [code for _, code in ended] == [0, 0], ended
    assert len(losses(tmp_path, "run")) == 2
