"""The printed job file under a real Slurm of two nodes; skipped where there is none."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster.slurm import asked, logs, missing, slurm
from tests.cluster.test_emulated import Cluster, cluster, losses, ranks_of

__all__ = ["cluster"]

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.timeout(150),
    pytest.mark.skipif(missing() is not None, reason=missing() or ""),
]


class Nodes:
    """A Slurm cluster, and jobs on it."""

    def __init__(self, hosts: Cluster, variables: dict[str, str]) -> None:
        self.cluster, self.variables = hosts, {**hosts.environment, **variables}
        self.variables["PATH"] = f"{hosts.folder / 'bin'}:{variables['PATH']}"
        for name in ("srun", "scontrol"):
            (hosts.folder / "bin" / name).unlink()

    def ask(self, *words: str) -> str:
        return asked(self.cluster.hosts[0], self.variables, *words)

    def submit(self, *options: str) -> str:
        text = self.cluster.template(
            *("slurm", "tiny-llama", "--layout", "dp2", "--data", "text.txt", "--gpus-per-node"),
            *("0", "--", "--device", "cpu", "--seq-len", "16", "--global-batch", "2"),
            *("--cluster", "none", *options),
        )
        file = self.cluster.folder / "job.sbatch"
        file.write_text(text)
        return self.ask("sbatch", "--parsable", f"--chdir={self.cluster.folder}", str(file))

    def until(self, job: str, found: Callable[[], bool]) -> None:
        end = time.monotonic() + 60
        while not found():
            log = self.cluster.folder / f"hocket-{job}.log"
            state = self.state(job)
            written = log.read_text() if log.exists() else ""
            assert time.monotonic() < end, state + written + logs(self.cluster.folder / "slurm")
            time.sleep(0.2)

    def state(self, job: str) -> str:
        return self.ask("scontrol", "show", "job", job)

    def restarts(self, job: str) -> int:
        (count,) = re.findall(r"Restarts=(\d+)", self.state(job))
        return int(count)


@pytest.fixture
def nodes(cluster: Cluster, tmp_path: Path) -> Iterator[Nodes]:
    with slurm(cluster.hosts, tmp_path / "slurm") as variables:
        yield Nodes(cluster, variables)


def test_a_killed_rank_and_a_notice_change_no_weight(nodes: Nodes) -> None:
    """A rank dies: the step is tried again. USR1 comes: saved, requeued, continued to the end."""
    cluster, run = nodes.cluster, nodes.cluster.folder / "runs" / "hocket"
    options = ("--steps", "300", "--save-every", "50")
    job = nodes.submit(*options)
    saved = run / "checkpoints"
    nodes.until(job, lambda: any(saved.glob("step-*")))
    (pid,) = ranks_of(cluster.hosts[1])
    os.kill(pid, signal.SIGKILL)
    log = cluster.folder / f"hocket-{job}.log"
    nodes.until(job, lambda: "resumed from" in log.read_text() and len(losses(run)) > 60)
    assert "attempt 1 ended with exit code 137" in log.read_text()
    restarts = nodes.restarts(job)
    nodes.ask("scancel", "--signal=USR1", f"{job}.1")
    nodes.until(job, lambda: nodes.restarts(job) > restarts)
    assert len(losses(run)) < 300
    assert not ranks_of(cluster.hosts[0]) + ranks_of(cluster.hosts[1])
    # Not in two minutes, as Slurm would by itself; at once, it revokes the credential.
    nodes.until(job, lambda: "Reason=BeginTime" in nodes.state(job))
    nodes.ask("scontrol", "update", f"jobid={job}", "StartTime=now+3")
    nodes.until(job, lambda: "COMPLETED" in nodes.state(job))
    whole = cluster.folder / "whole"
    words = ["hocket", "train", "tiny-llama", "--layout", "dp2", "--data", "text.txt"]
    words += ["--device", "cpu", "--seq-len", "16", "--global-batch", "2", "--cluster", "none"]
    with cluster.started(*words, *options, "--run", str(whole)) as process:
        assert process.wait(60) == 0, cluster.output
    weights = Path("model") / "model.safetensors"
    assert (run / weights).read_bytes() == (whole / weights).read_bytes()
    assert losses(run) == losses(whole)
