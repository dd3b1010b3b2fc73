"""Printed job files run as they are on two emulated hosts: ranks join, train, stop, resume, serve.

Of the cases each commit runs one; `HOCKET_TESTS=all` runs them all.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.hosts import Host, hosts
from tests.ranks import ROOT
from tests.rotation import part

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(150)]

FOREIGN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Cluster:
    """Two hosts, and a folder with programs of the names that job files call."""

    def __init__(self, made: list[Host], folder: Path) -> None:
        self.hosts, self.folder = made, folder
        self.more: list[str] = []
        programs = folder / "bin"
        programs.mkdir()
        python = sys.executable
        self.program("hocket", f'exec {python} -m hocket "$@"')
        self.program("torchrun", f'exec {python} -m torch.distributed.run "$@"')
        self.program("srun", f'exec {python} -m tests.cluster.srun "$@"')
        self.program(
            "scontrol",
            '[ "$1" = show ] || exec echo "$@" >> scontrol.log\nprintf "node-0\\nnode-1\\n"',
        )
        variables = [
            [f"node-{i}", host.command(), {"GLOO_SOCKET_IFNAME": host.interface}]
            for i, host in enumerate(made)
        ]
        self.environment = {
            **{k: v for k, v in os.environ.items() if k not in FOREIGN and "SLURM" not in k},
            "PATH": f"{programs}:{os.environ['PATH']}",
            "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}",
            "SRUN_HOSTS": json.dumps(variables),
            "SRUN_TASKS": "1",
            "SRUN_PID": str(folder / "srun.pid"),
            "SLURM_JOB_ID": "77",
            "SLURM_JOB_NODELIST": "node-[0-1]",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        (folder / "text.txt").write_text("A layout of two ranks on two hosts. " * 200)

    def program(self, name: str, text: str) -> None:
        file = self.folder / "bin" / name
        file.write_text(f"#!/bin/sh\n{text}\n")
        file.chmod(0o755)

    def template(self, *words: str) -> str:
        """What `hocket template` prints."""
        return subprocess.run(
            [sys.executable, "-m", "hocket", "template", *words],
            env=self.environment, capture_output=True, text=True, check=True, timeout=60,
        ).stdout  # fmt: skip

    @contextlib.contextmanager
    def started(self, *words: str, **variables: str) -> Iterator[subprocess.Popen[str]]:
        """A process that is ended with everything it started."""
        with (self.folder / "output").open("a") as output:
            process = subprocess.Popen(
                words, cwd=self.folder, env={**self.environment, **variables}, stdout=output,
                stderr=output, text=True, start_new_session=True,
            )  # fmt: skip
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    @property
    def output(self) -> str:
        return (self.folder / "output").read_text()

    def until(self, found: Callable[[], bool], process: subprocess.Popen[str]) -> None:
        end = time.monotonic() + 100
        while not found():
            assert process.poll() is None, self.output
            assert time.monotonic() < end, self.output
            time.sleep(0.1)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    names = {i: [f"node-{i}", f"hocket-{i}.hocket", f"hocket-{i}.hocket-ranks"] for i in range(2)}
    with hosts(names) as made:
        yield Cluster(made, tmp_path)


def losses(run: Path) -> list[float]:
    return [json.loads(row)["loss"] for row in (run / "metrics.jsonl").read_text().splitlines()]


def slurm_stops_and_is_queued_again(cluster: Cluster) -> None:
    """Without `--layout` among hocket's own words: the file's layout is the launcher's world."""
    options = ["--steps", "4000", "--seq-len", "16", "--global-batch", "2", "--cluster", "none"]
    text = cluster.template(
        *("slurm", "tiny-llama", "--layout", "dp2", "--data", "text.txt", "--gpus-per-node", "0"),
        *("--", "--device", "cpu", *options),
    )
    (cluster.folder / "job.sbatch").write_text(text)
    run = cluster.folder / "runs" / "hocket"
    metrics, job = run / "metrics.jsonl", ["bash", "job.sbatch"]
    with cluster.started(*job) as process:
        cluster.until(lambda: metrics.exists() and metrics.read_text().count("\n") > 3, process)
        os.kill(int((cluster.folder / "srun.pid").read_text()), signal.SIGUSR1)
        assert process.wait(60) == 0, cluster.output
    assert (cluster.folder / "scontrol.log").read_text() == "requeue 77\n"
    taken = len(losses(run))
    assert list((run / "checkpoints").glob("*"))
    with cluster.started(*job) as process:  # as Slurm starts it again
        cluster.until(lambda: len(losses(run)) > taken + 3, process)
        os.kill(int((cluster.folder / "srun.pid").read_text()), signal.SIGUSR1)
        assert process.wait(60) == 0, cluster.output
    assert f"resumed from {run}" in cluster.output
    assert len(losses(run)) > taken


def kubernetes_pods_train(cluster: Cluster) -> None:
    options = ["--steps", "3", "--seq-len", "16", "--global-batch", "2", "--cluster", "none"]
    text = cluster.template(
        *("kubernetes", "tiny-llama", "--layout", "tp2", "--data", "text.txt"),
        *("--gpus-per-node", "0", "--", "--device", "cpu", *options),
    )
    (job,) = [one for one in yaml.safe_load_all(text) if one["kind"] == "Job"]
    (container,) = job["spec"]["template"]["spec"]["containers"]
    run = cluster.folder / "run"
    with contextlib.ExitStack() as stack:
        pods = [
            stack.enter_context(
                cluster.started(
                    *host.command(*container["command"], *container["args"]),
                    RUN=str(run),
                    JOB_COMPLETION_INDEX=str(index),
                    GLOO_SOCKET_IFNAME=host.interface,
                )
            )
            for index, host in enumerate(cluster.hosts)
        ]
        assert [pod.wait(120) for pod in pods] == [0, 0], cluster.output
    assert len(losses(run)) == 3
    assert (run / "model" / "model.safetensors").exists()
    assert json.loads((run / "run.json").read_text())["layout"].startswith("tp2")


ASK = """\
import json, sys, urllib.request
address, body, key = sys.argv[1:]
headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
request = urllib.request.Request(address, body.encode() or None, headers)
with urllib.request.urlopen(request, timeout=60) as answer:
    print(answer.read().decode())
"""


class Served:
    """A tiny model in the folder of a cluster, the job file that serves it, and its clients."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.keys = cluster, cluster.folder / "keys"
        made = subprocess.run(
            [sys.executable, "-m", "tests.cluster.model", "model", "Once upon", "12"],
            cwd=cluster.folder, env=cluster.environment, capture_output=True, text=True,
            check=True, timeout=60,
        )  # fmt: skip
        self.wanted = json.loads(made.stdout.splitlines()[-1])
        self.keys.write_text("tester abcdefghijklmnopqrstuvwxyz0123456789\n")
        self.keys.chmod(0o600)
        self.file = cluster.folder / "job.sbatch"
        self.file.write_text(
            cluster.template(
                *("slurm", "model", "--serve", "--layout", "tp2", "--gpus-per-node", "0"),
                *("--", "--device", "cpu", "--num-blocks", "64", "--max-model-len", "128"),
            )
        )

    def ask(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any] | None:
        """An answer to the other node, which reaches the front by the network; None: none."""
        words = [sys.executable, "-c", ASK, f"http://node-0:{path}"]
        words += [json.dumps(body) if body else "", self.keys.read_text().split()[1]]
        words = self.cluster.hosts[1].command(*words)
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        try:
            return dict(json.loads(done.stdout)) if done.returncode == 0 else None
        except ValueError:
            return {"text": done.stdout}

    def answers_as_transformers(self, log: str) -> None:
        """Tokens and log-probabilities are those of plain transformers."""
        body = {"prompt": "Once upon", "max_tokens": 12, "temperature": 0, "logprobs": 1}
        body["return_tokens_as_token_ids"] = True
        answer = self.ask("8000/v1/completions", body)
        assert answer is not None, log
        found = answer["choices"][0]["logprobs"]
        tokens = [int(t.removeprefix("token_id:")) for t in found["tokens"]]
        assert tokens == self.wanted["tokens"]
        assert found["token_logprobs"] == pytest.approx(self.wanted["logprobs"], abs=1e-4)


def slurm_serves(cluster: Cluster) -> None:
    """One replica on two hosts: tokens and log-probabilities of plain transformers."""
    served = Served(cluster)
    with cluster.started("bash", "job.sbatch", HOCKET_API_KEYS=str(served.keys)) as process:
        cluster.until(lambda: "ready after" in cluster.output, process)
        served.answers_as_transformers(cluster.output)
        assert served.ask("8000/ready") == {"status": "ready"}
        exported = served.ask("8001/metrics")
        assert exported is not None
        assert 'hocket_generated_tokens_total{replica="0"} 12.0' in exported["text"]
        os.kill(int((cluster.folder / "srun.pid").read_text()), signal.SIGTERM)
        assert process.wait(60) == 0, cluster.output
    assert "1 request answered, 12 tokens" in cluster.output
    (measured,) = (cluster.folder / "runs").glob("*/measured.json")
    assert json.loads(measured.read_text())["requests"] == 1


def slurm_starts_no_server_again_that_is_rejected_or_stopped(cluster: Cluster) -> None:
    """srun ends the other tasks with SIGTERM: their exit codes do not hide that of the first."""
    served = Served(cluster)
    one, other = cluster.hosts
    with cluster.started("bash", "job.sbatch", HOCKET_API_KEYS=str(served.keys)) as process:
        cluster.until(
            lambda: any(catches_sigterm(pid) for pid in ranks_of(other, "serve")), process
        )
        cluster.until(lambda: any(catches_sigterm(pid) for pid in ranks_of(one, "serve")), process)
        os.kill(int((cluster.folder / "srun.pid").read_text()), signal.SIGTERM)
        assert process.wait(60) == 0, cluster.output
    assert "ready after" not in cluster.output
    (cluster.folder / "model" / "config.json").unlink()
    with cluster.started("bash", "job.sbatch", HOCKET_API_KEYS=str(served.keys)) as process:
        assert process.wait(60) == 2, cluster.output
    assert "the server ended with" not in cluster.output


def catches_sigterm(pid: int) -> bool:
    """Whether a process has a handler of SIGTERM."""
    (mask,) = re.findall(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
    return bool(int(mask, 16) >> (signal.SIGTERM - 1) & 1)


def _torchrun(
    cluster: Cluster,
    stack: contextlib.ExitStack,
    run: Path,
    *words: str,
    memory: bool = False,
    there: Sequence[int] = (0, 1),
) -> list[Any]:
    """An agent of torchrun on each host that is `there`, that starts again what fails.

    `memory`: each host has a folder of its own for copies of states.
    """
    one = cluster.hosts[there[0]]
    arguments = [
        *("torchrun", "--nnodes", "1:2" if "--elastic" in cluster.more else "2"),
        *("--nproc-per-node", "1", *words),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{one.address}:29411"),
        *("--rdzv-id", "7", "-m", "--", "hocket", "train", "tiny-llama", "--data", "text.txt"),
        *("--seq-len", "16", "--global-batch", "2", "--device", "cpu", "--cluster", "none"),
        *("--layout", "dp2", "--run", str(run)),
        *([] if "--save-every" in cluster.more else ["--save-every", "20"]),
    ]
    agents = []
    for index in there:
        host = cluster.hosts[index]
        meeting = f"is_host={int(index == there[0])},last_call_timeout=1"
        own = ["--rdzv-conf", meeting, "--local-addr", host.address]
        variables = {"GLOO_SOCKET_IFNAME": host.interface}
        if memory:
            copies = cluster.folder / f"memory-{index}"
            copies.mkdir(exist_ok=True)
            variables["HOCKET_STATE_COPIES"] = str(copies)
        agents.append(
            stack.enter_context(
                cluster.started(
                    *host.command(arguments[0], *own, *arguments[1:], *cluster.more),
                    **variables,
                )
            )
        )
    return agents


def processes(host: Host) -> list[int]:
    """Those in a host's namespace."""
    words = ["ip", "netns", "pids", host.namespace]
    found = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()
    return [int(pid) for pid in found]


def ranks_of(host: Host, verb: str = "train") -> list[int]:
    """Processes of hocket ranks in a host's namespace."""
    return [
        pid
        for pid in processes(host)
        if b"torch.distributed.run" not in (words := Path(f"/proc/{pid}/cmdline").read_bytes())
        and f"hocket\0{verb}".encode() in words
    ]


def torchrun_restarts_and_ends_as_undisturbed(cluster: Cluster) -> None:
    for name in ("whole", "cut"):
        run = cluster.folder / name
        with contextlib.ExitStack() as stack:
            cluster.more = ["--steps", "60"]
            agents = _torchrun(cluster, stack, run, "--max-restarts", "3")
            if name == "cut":
                saved = run / "checkpoints"
                cluster.until(lambda saved=saved: any(saved.glob("step-*")), agents[0])
                (pid,) = ranks_of(cluster.hosts[1])
                os.kill(pid, signal.SIGKILL)
            assert [agent.wait(100) for agent in agents] == [0, 0], cluster.output
    wanted, found = (
        (cluster.folder / name / "model" / "model.safetensors").read_bytes()
        for name in ("whole", "cut")
    )
    assert wanted == found
    assert len(losses(cluster.folder / "cut")) == 60


def a_lost_host_costs_steps_alone(cluster: Cluster) -> None:
    """Rank 1 is killed and its host's memory is gone; no checkpoint is written before the end."""
    options = ["--steps", "120", "--save-every", "1000", "--replicate-state", "4"]
    for name in ("whole", "cut"):
        run = cluster.folder / name
        with contextlib.ExitStack() as stack:
            cluster.more = options
            agents = _torchrun(cluster, stack, run, "--max-restarts", "3", memory=True)
            if name == "cut":
                memory = cluster.folder / "memory-1"
                cluster.until(
                    lambda memory=memory: len([*memory.glob("*/*/step-*")]) > 1, agents[0]
                )
                (pid,) = ranks_of(cluster.hosts[1])
                os.kill(pid, signal.SIGSTOP)
                shutil.rmtree(memory)
                memory.mkdir()
                os.kill(pid, signal.SIGKILL)
            assert [agent.wait(100) for agent in agents] == [0, 0], cluster.output
    assert re.search(r"resumed from \S*memory-0/\S*/step-\d+", cluster.output), cluster.output
    wanted, found = (
        (cluster.folder / name / "model" / "model.safetensors").read_bytes()
        for name in ("whole", "cut")
    )
    assert wanted == found
    assert len(losses(cluster.folder / "cut")) == 120
    assert not [*cluster.folder.glob("memory-*/*/*/step-*")]


def _found_within(cluster: Cluster, disturb: Callable[[], None], texts: list[str]) -> None:
    run = cluster.folder / "run"
    with contextlib.ExitStack() as stack:
        cluster.more = ["--steps", "100000"]
        agents = _torchrun(cluster, stack, run)
        metrics = run / "metrics.jsonl"
        cluster.until(lambda: metrics.exists() and metrics.read_text().count("\n") > 3, agents[0])
        disturb()
        began = time.monotonic()
        while not all(text in cluster.output for text in texts):
            assert time.monotonic() - began < 30, cluster.output
            time.sleep(0.1)
        print(f"found after {time.monotonic() - began:.1f} s")
        assert time.monotonic() - began < 15, cluster.output


def a_frozen_rank_is_found(cluster: Cluster) -> None:
    frozen: list[int] = []

    def freeze() -> None:
        frozen.extend(ranks_of(cluster.hosts[1]))
        for pid in frozen:
            os.kill(pid, signal.SIGSTOP)

    try:
        _found_within(cluster, freeze, ["rank 0 ends: rank 1 has given no sign of life"])
    finally:
        for pid in frozen:  # nothing but SIGKILL ends what is stopped
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def a_cut_link_is_found_on_both_sides(cluster: Cluster) -> None:
    def cut() -> None:
        one = cluster.hosts[0]
        words = ["ip", "-n", one.namespace, "link", "set", one.interface, "down"]
        subprocess.run(words, check=True)

    lost = "rank 0 ends: rank 1 has given no sign of life"
    _found_within(cluster, cut, [lost, "rank 1 ends: the store on rank 0's host"])


def a_lost_host_of_rank_0_leaves_nothing_behind(cluster: Cluster) -> None:
    """Nor a run that cannot go on: `--elastic` continues it on the other host alone."""
    run, other = cluster.folder / "run", cluster.hosts[1]
    cluster.more = ["--steps", "100000", "--elastic"]
    saved = run / "checkpoints"
    with contextlib.ExitStack() as stack:
        agents = _torchrun(cluster, stack, run, "--max-restarts", "3")
        cluster.until(lambda: any(saved.glob("step-*")), agents[0])
        for pid in processes(cluster.hosts[0]):
            os.kill(pid, signal.SIGKILL)
        began = time.monotonic()
        while processes(other):
            assert time.monotonic() - began < 15, cluster.output
            time.sleep(0.1)
        assert "rank 1 of 2 lost its connection to rank 0" in cluster.output
        taken = len(losses(run))
        (agent,) = _torchrun(cluster, stack, run, "--max-restarts", "3", there=[1])
        cluster.until(lambda: len(losses(run)) > taken + 3, agent)
    assert f"resumed from {saved}/step-" in cluster.output
    assert len(losses(run)) > taken


def _of_page(cluster: Cluster, stack: contextlib.ExitStack, page: str, *own: str) -> list[Any]:
    """What a page shows for two hosts, on both: with the addresses, the interface and the sizes of
    these, and `own` in place of the words after the verb."""
    text = (ROOT / "docs" / "how-to" / page).read_text("utf-8")
    (shown,) = re.findall(r"^export (GLOO.*)\n(torchrun [^`]*?)\n```", text, re.MULTILINE)
    variables = dict(each.split("=") for each in shown[0].split())
    words = shlex.split(shown[1].replace("\\\n", " "))
    verb = words.index("hocket") + 1
    words[verb + 1 :] = [*own, "--layout", "dp2", "--device", "cpu"]
    values = {
        "--nproc-per-node": "1",
        "--master-addr": cluster.hosts[0].address,
        "--master-port": "29412",
    }
    started = []
    for number, host in enumerate(cluster.hosts):
        for flag, value in {**values, "--node-rank": str(number)}.items():
            words[words.index(flag) + 1] = value
        here = dict.fromkeys(variables, host.interface)
        started.append(stack.enter_context(cluster.started(*host.command(*words), **here)))
    return started


def the_page_of_training_runs(cluster: Cluster) -> None:
    run = cluster.folder / "of-page"
    own = ["tiny-llama", "--data", "text.txt", "--run", str(run), "--cluster", "none"]
    with contextlib.ExitStack() as stack:
        agents = _of_page(
            cluster,
            stack,
            "several-hosts.md",
            *own,
            "--seq-len",
            "16",
            "--global-batch",
            "2",
            "--steps",
            "3",
        )
        assert [agent.wait(100) for agent in agents] == [0, 0], cluster.output
    assert len((run / "metrics.jsonl").read_text().splitlines()) >= 3


def the_page_of_serving_runs(cluster: Cluster) -> None:
    subprocess.run(
        [sys.executable, "-m", "tests.cluster.model", "model", "Once upon", "1"],
        cwd=cluster.folder, env=cluster.environment, capture_output=True, check=True, timeout=60,
    )  # fmt: skip
    own = [
        "model",
        "--num-blocks",
        "64",
        "--max-model-len",
        "128",
        "--host",
        "0.0.0.0",
        "--insecure",
        "--port",
        "8123",
    ]
    with contextlib.ExitStack() as stack:
        front, other = _of_page(cluster, stack, "serve.md", *own)
        cluster.until(lambda: "ready after" in cluster.output, front)
        visit = cluster.hosts[1].command(
            "curl", "-sS", f"http://{cluster.hosts[0].address}:8123/ready"
        )
        done = subprocess.run(visit, capture_output=True, text=True, check=False, timeout=100)
        assert json.loads(done.stdout) == {"status": "ready"}, done.stderr
        front.terminate()
        front.wait(60)
        other.wait(60)


CASES = [
    the_page_of_training_runs,
    the_page_of_serving_runs,
    slurm_serves,
    slurm_starts_no_server_again_that_is_rejected_or_stopped,
    slurm_stops_and_is_queued_again,
    kubernetes_pods_train,
    torchrun_restarts_and_ends_as_undisturbed,
    a_lost_host_costs_steps_alone,
    a_frozen_rank_is_found,
    a_cut_link_is_found_on_both_sides,
    a_lost_host_of_rank_0_leaves_nothing_behind,
]


@pytest.mark.parametrize("case", part(CASES, 7), ids=lambda case: case.__name__)
def test_a_printed_job_runs_on_two_hosts(case: Callable[[Cluster], None], cluster: Cluster) -> None:
    case(cluster)


def test_a_host_reaches_the_other_by_the_network_alone(cluster: Cluster) -> None:
    """The proof that the hosts are apart: a listener on one's loopback is not the other's."""
    code = (
        "import socket, sys\n"
        "server = socket.create_server((sys.argv[1], 0))\n"
        "print(server.getsockname()[1], flush=True)\n"
        "server.accept()\n"
    )
    one, other = cluster.hosts
    for address, wanted in (("127.0.0.1", 1), (one.address, 0)):
        words = one.command(sys.executable, "-c", code, address)
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as listening:
            assert listening.stdout is not None
            port = listening.stdout.readline().strip()
            visit = f"import socket; socket.create_connection(('{address}', {port}), 5)"
            done = subprocess.run(
                other.command(sys.executable, "-c", visit), capture_output=True, check=False
            )
            listening.kill()
        assert done.returncode == wanted, done.stderr
    assert shutil.which("ip")
