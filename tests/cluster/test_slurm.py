"""The printed job file under a real Slurm of two nodes; skipped where there is none.

Of the cases each commit runs one; `HOCKET_TESTS=all` runs them all.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster.slurm import asked, logs, missing, slurm
from tests.cluster.test_emulated import Cluster, Served, cluster, losses, ranks_of
from tests.rotation import part

__all__ = ["cluster"]

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.timeout(300),
    pytest.mark.skipif(missing() is not None, reason=missing() or ""),
]


OWN = ["--data", "text.txt", "--device", "cpu", "--seq-len", "16", "--global-batch", "2"]
OWN += ["--cluster", "none"]


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
            *("slurm", "tiny-llama", "--layout", "dp2", *OWN[:2], "--gpus-per-node", "0"),
            *("--", *OWN[2:], *options),
        )
        file = self.cluster.folder / "job.sbatch"
        file.write_text(text)
        return self.ask("sbatch", "--parsable", f"--chdir={self.cluster.folder}", str(file))

    def until(self, job: str, found: Callable[[], bool]) -> None:
        end = time.monotonic() + 120
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

    def requeued(self, job: str, before: int) -> None:
        """Wait until Slurm has queued a job again, and have it start at once."""
        self.until(job, lambda: self.restarts(job) > before)
        # Not in two minutes, as Slurm would by itself; at once, it revokes the credential.
        self.until(job, lambda: "Reason=BeginTime" in self.state(job))
        self.ask("scontrol", "update", f"jobid={job}", "StartTime=now+3")

    def whole(self, layout: str, *options: str) -> Path:
        """The same run, undisturbed and without Slurm."""
        cluster, run = self.cluster, self.cluster.folder / "whole"
        words = ["hocket", "train", "tiny-llama", "--layout", layout, *OWN, *options]
        with cluster.started(*words, "--run", str(run)) as process:
            assert process.wait(100) == 0, cluster.output
        return run


def a_killed_rank_and_a_notice_change_no_weight(nodes: Nodes) -> None:
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
    nodes.requeued(job, restarts)
    assert len(losses(run)) < 300
    assert not ranks_of(cluster.hosts[0]) + ranks_of(cluster.hosts[1])
    nodes.until(job, lambda: "COMPLETED" in nodes.state(job))
    whole = nodes.whole("dp2", *options)
    weights = Path("model") / "model.safetensors"
    assert (run / weights).read_bytes() == (whole / weights).read_bytes()
    assert losses(run) == losses(whole)


def a_lost_node_shrinks_the_run_until_it_is_back(nodes: Nodes) -> None:
    """With `--elastic`: on one node while the other is down, on both after the next notice."""
    cluster, run = nodes.cluster, nodes.cluster.folder / "runs" / "hocket"
    constant = ("--lr", "1e-4", "--lr-schedule", "constant", "--warmup", "2", "--save-every", "20")
    job = nodes.submit("--elastic", *constant, "--steps", "100000")

    def layouts() -> list[str]:
        rows = (run / "metrics.jsonl").read_text().splitlines() if run.exists() else []
        found = [json.loads(row)["layout"].partition(":")[0] for row in rows]
        return [layout for layout, _ in itertools.groupby(found)]

    nodes.until(job, lambda: any((run / "checkpoints").glob("step-*")))
    assert layouts() == ["dp2"]
    restarts = nodes.restarts(job)
    for state in ("down", "drain"):  # or the living daemon would register it again
        nodes.ask("scontrol", "update", "nodename=node-1", f"state={state}", "reason=test")
    nodes.requeued(job, restarts)
    nodes.until(job, lambda: layouts() == ["dp2", "dp1"])
    nodes.ask("scontrol", "update", "nodename=node-1", "state=resume")
    restarts = nodes.restarts(job)
    nodes.ask("scancel", "--signal=USR1", job)
    nodes.requeued(job, restarts)
    nodes.until(job, lambda: layouts() == ["dp2", "dp1", "dp2"])
    nodes.ask("scancel", job)
    nodes.until(job, lambda: "JobState=CANCELLED" in nodes.state(job))
    nodes.until(job, lambda: not ranks_of(cluster.hosts[0]) + ranks_of(cluster.hosts[1]))
    found = losses(run)
    whole = losses(nodes.whole("dp1", *constant, "--steps", str(len(found))))
    assert found == pytest.approx(whole, rel=2e-5)


def a_server_comes_back_and_drains(nodes: Nodes) -> None:
    """A rank is killed: the step is started again. SIGTERM: requests end, and so does the job."""
    cluster, served = nodes.cluster, Served(nodes.cluster)
    nodes.variables["HOCKET_API_KEYS"] = str(served.keys)
    job = nodes.ask("sbatch", "--parsable", f"--chdir={cluster.folder}", str(served.file))
    log = cluster.folder / f"hocket-{job}.log"
    nodes.until(job, lambda: log.exists() and "ready after" in log.read_text())
    for pid in ranks_of(cluster.hosts[1], "serve"):
        os.kill(pid, signal.SIGKILL)
    nodes.until(job, lambda: log.read_text().count("ready after") == 2)
    served.answers_as_transformers(log.read_text())
    nodes.ask("scancel", "--signal=TERM", job)
    nodes.until(job, lambda: "COMPLETED" in nodes.state(job))
    assert "1 request answered, 12 tokens" in log.read_text()
    assert not ranks_of(cluster.hosts[0], "serve") + ranks_of(cluster.hosts[1], "serve")


def a_rejected_server_is_not_tried_again(nodes: Nodes) -> None:
    """srun ends the other task with SIGTERM, whose exit code must not hide the first one's 2."""
    cluster, served = nodes.cluster, Served(nodes.cluster)
    nodes.variables["HOCKET_API_KEYS"] = str(served.keys)
    (cluster.folder / "model" / "config.json").unlink()
    job = nodes.ask("sbatch", "--parsable", f"--chdir={cluster.folder}", str(served.file))
    nodes.until(job, lambda: "JobState=FAILED" in nodes.state(job))
    assert "ExitCode=2:0" in nodes.state(job)
    assert "the server ended with" not in (cluster.folder / f"hocket-{job}.log").read_text()


CASES = [
    a_rejected_server_is_not_tried_again,
    a_server_comes_back_and_drains,
    a_killed_rank_and_a_notice_change_no_weight,
    a_lost_node_shrinks_the_run_until_it_is_back,
]


@pytest.mark.parametrize("case", part(CASES, 4), ids=lambda case: case.__name__)
def test_a_printed_job_under_slurm(
    case: Callable[[Nodes], None], cluster: Cluster, tmp_path: Path
) -> None:
    with slurm(cluster.hosts, tmp_path / "slurm") as variables:
        case(Nodes(cluster, variables))
