"""Joining the ranks of torchrun or Slurm, and only those."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from hocket.launch import joined_context
from hocket.launch.joined import first_host
from hocket.spec.errors import LayoutError, RankFailure
from tests.ranks import ROOT
from tests.support.ports import free_ports

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "host", "MASTER_PORT": "29500"}
SRUN = {
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "gpu[03-04]",
}


def test_torchrun() -> None:
    context = joined_context({**TORCHRUN, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"})
    assert context is not None
    assert (context.rank, context.world_size, context.local_rank) == (3, 4, 1)
    assert not context.one_machine
    context = joined_context({**TORCHRUN, "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"})
    assert context is not None
    assert context.one_machine
    context = joined_context({**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "2"})
    assert context is not None
    assert context.attempt == 2


@pytest.mark.parametrize("missing", list(TORCHRUN))
def test_half_a_set_of_variables_is_no_world(missing: str) -> None:
    assert joined_context({k: v for k, v in TORCHRUN.items() if k != missing}) is None
    assert joined_context({**TORCHRUN, missing: ""}) is None
    assert joined_context({}) is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("RANK", "a"), ("RANK", "4"), ("RANK", "-1"), ("RANK", "9" * 5000), ("WORLD_SIZE", "0"),
        ("WORLD_SIZE", "\u00b2"), ("MASTER_PORT", "none"), ("MASTER_PORT", "65536"),
        ("LOCAL_WORLD_SIZE", "abc"), ("LOCAL_WORLD_SIZE", "5"), ("LOCAL_RANK", "4"),
        ("TORCHELASTIC_RESTART_COUNT", "x"), ("SLURM_STEP_NUM_TASKS", "many"),
        ("SLURM_PROCID", "8"), ("SLURM_LOCALID", "-1"), ("SLURM_STEP_ID", "x"),
        ("SLURM_JOB_ID", "77x"), ("SLURM_STEP_NUM_NODES", "two"), ("SLURM_RESTART_COUNT", "x"),
        ("SLURM_STEP_NODELIST", ","),
    ],
)  # fmt: skip
def test_variables_that_make_no_world_are_refused(name: str, value: str) -> None:
    slurm = name.startswith("SLURM")
    with pytest.raises(LayoutError) as caught:
        joined_context({**(SRUN if slurm else TORCHRUN), name: value})
    assert f"{name} is '{value[:60]}' in the environment; " in caught.value.message
    assert ("Slurm sets it" if slurm else "torchrun, or a launcher like it, sets it") in (
        caught.value.message
    )
    assert caught.value.hint == f"unset {name}"


def test_srun() -> None:
    context = joined_context(SRUN)
    assert context is not None
    assert (context.rank, context.world_size, context.local_rank) == (5, 8, 1)
    assert not context.one_machine
    context = joined_context({**SRUN, "SLURM_STEP_NUM_NODES": "1"})
    assert context is not None
    assert context.one_machine
    assert joined_context({**SRUN, "SLURM_STEP_NUM_TASKS": "1"}) is None
    batch_script = {k: v for k, v in SRUN.items() if not k.startswith("SLURM_STEP")}
    assert joined_context(batch_script) is None


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("gpu[003-006,010],login1", "gpu003"),
        ("a[7]-ib,b1", "a7-ib"),
    ],
)
def test_the_first_host_of_a_nodelist(nodelist: str, host: str) -> None:
    assert first_host(nodelist) == host


@pytest.mark.torch
@pytest.mark.parametrize(
    ("own", "reason"),
    [
        (TORCHRUN, "Connection refused"),
        (SRUN, "Connection refused"),
        ({**TORCHRUN, "MASTER_ADDR": "no-such-host.invalid"}, "[Nn]ame"),
        (TORCHRUN, "it accepts connections and does not answer: its process is stopped"),
        ({**TORCHRUN, "RANK": "0"}, "address already in use"),
    ],
)
def test_a_store_that_is_not_there_is_reported(own: dict[str, str], reason: str) -> None:
    """As where rank 0's host never answers: place and seconds, the cause, a command that tries it,
    and the variables that name another place."""
    listens = "answer" in reason or "in use" in reason
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        if not listens:
            server.close()
        address = "127.0.0.1" if own.get("MASTER_ADDR", "host") == "host" else own["MASTER_ADDR"]
        context = joined_context({**own, "MASTER_ADDR": address, "MASTER_PORT": str(port)})
        assert context is not None
        with pytest.raises(RankFailure, match=reason) as caught:
            context.store(1)
        failure, hint = caught.value, str(caught.value.hint)
        rank, what = context.rank, "serve" if context.rank == 0 else "in 1 s reach"
        assert f"rank {rank} of {context.world_size} on " in failure.message
        assert f" could not {what} the store, which rank 0's host serves at " in failure.message
        assert f"MASTER_ADDR={address} MASTER_PORT={port}: " in failure.message
        assert "\n" not in failure.message
        assert "export MASTER_" in hint
        tries = hint.split("`")[1]
        assert f"{address}/{port}" in tries
        tried = subprocess.run(tries, shell=True, capture_output=True, check=False)
        assert (tried.stdout == b"open\n") == listens


@pytest.mark.torch
def test_a_rank_0_that_never_opens_the_store_of_torchrun_is_reported() -> None:
    from torch.distributed import TCPStore

    agent = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(agent.port)}
    of_agent = {"TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    context = joined_context({**TORCHRUN, **place, **of_agent})
    assert context is not None
    with pytest.raises(RankFailure, match="rank 0 has not opened it in 1 s: stopped"):
        context.store(1)


@pytest.mark.ranks
@pytest.mark.timeout(220)
def test_two_torchrun_agents_on_one_machine(tmp_path: Path) -> None:
    """Two machines as far as PyTorch is concerned: each agent has one of the two ranks."""
    port = free_ports(1)
    environment = {k: v for k, v in os.environ.items() if k not in TORCHRUN}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    agents = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--nnodes=2"),
                *("--nproc-per-node=1", f"--node-rank={node}", "--master-addr=127.0.0.1"),
                *(f"--master-port={port}", "-m", "tests.launch.joiner", str(tmp_path)),
            ],
            cwd=ROOT,
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for node in range(2)
    ]
    try:
        for agent in agents:
            _, errors = agent.communicate(timeout=200)
            assert agent.returncode == 0, errors
    finally:
        for agent in agents:
            agent.kill()
    for rank in range(2):
        (event,) = json.loads((tmp_path / f"rank-{rank}.json").read_text())
        assert event["value"] == 11
        assert event["place"] == [rank, 2, 0, False]


@pytest.mark.ranks
@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_waits_for_its_device_learns_of_a_failed_one(failing: int) -> None:
    """Without a parent of ours, on a backend that behaves as NCCL's: its watchdog would take a
    minute."""
    port = free_ports(1)
    environment = {k: v for k, v in os.environ.items() if k not in TORCHRUN}
    folders = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment |= {"PYTHONPATH": folders, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    code = (
        "from hocket.launch import run_joined\n"
        f"payload = {{'how': 'raise', 'rank': {failing}, 'timeout': 60.0}}\n"
        "run_joined('tests.launch.cases:on_nccl_like', payload, device='cpu')\n"
    )
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env={**environment, "RANK": str(rank), "MASTER_PORT": str(port)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        errors = [rank.communicate(timeout=100)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [1, 1]
    assert "ValueError: boom in the middle" in errors[failing]
    victim = 1 - failing
    text = f"rank {victim} ends: rank {failing} failed: ValueError: boom in the middle"
    assert text in errors[victim]
    assert "Watchdog" not in errors[victim]


@pytest.mark.ranks
def test_a_rank_that_loses_a_killed_one_names_it() -> None:
    """With host and port, and without a file of Gloo's source."""
    port = free_ports(1)
    environment = {k: v for k, v in os.environ.items() if k not in TORCHRUN}
    folders = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment |= {"PYTHONPATH": folders, "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1"}
    code = (
        "from hocket.launch import run_joined\n"
        "payload = {'how': 'kill', 'rank': 1, 'backend': 'gloo'}\n"
        "run_joined('tests.launch.cases:fail', payload, device='cpu')\n"
    )
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env={**environment, "RANK": str(rank), "MASTER_PORT": str(port)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    try:
        errors = [rank.communicate(timeout=100)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [1, -signal.SIGKILL, 1]
    for rank in (0, 2):
        assert f"RankFailure: rank {rank} of 3 lost its connection to rank 1: " in errors[rank]
        assert re.search(r"\(host \S+, port \d+\)", errors[rank])
        assert "/gloo/" not in errors[rank]


WAITS = """
import os, signal, sys, time
import hocket.launch.joined as joined
joined.SILENT, joined.PREPARING, joined.JOINING, joined._POLL = 3.0, 6.0, 6.0, 0.1
context = joined.joined_context()
if sys.argv[1] == "before" and context.rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
store = context.store(60)
if sys.argv[1] == "early" and context.rank == 1:
    store.set("stopped", "")
    os.kill(os.getpid(), signal.SIGSTOP)
if context.rank == 0 and sys.argv[1] == "early":
    store.get("stopped")
elif context.rank == 0 and sys.argv[1] in ("never", "unused"):
    time.sleep(4.5)  # rank 1 waits in its entry for longer than for a silent rank
if sys.argv[1] != "unused":
    joined.run_joined("tests.launch.cases:exchange", {"start": 5}, device="cpu")
elif context.rank == 0:
    joined.run_joined("tests.launch.cases:tell_place", device="cpu", world_size=1)
else:
    joined.leave_unused()  # as a rank that the layout of an elastic run does not use
"""


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("when", "seconds"), [("before", 6), ("early", 3), ("never", 0), ("unused", 0)]
)
def test_a_rank_that_is_stopped_before_its_entry_is_named(when: str, seconds: float) -> None:
    """As a frozen host, while rank 0 prepares; one that waits in the store is not silent."""
    port = free_ports(1)
    environment = {k: v for k, v in os.environ.items() if k not in TORCHRUN}
    folders = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment |= {"PYTHONPATH": folders, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", WAITS, when],
            cwd=ROOT,
            env={**environment, "RANK": str(rank), "MASTER_PORT": str(port)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        errors = ranks[0].communicate(timeout=100)[1]
        if not seconds:
            assert [rank.wait(60) for rank in ranks] == [0, 0], errors
        else:
            assert ranks[0].returncode == 1
            assert f"rank 0 ends: rank 1 has given no sign of life for {seconds} s" in errors
    finally:
        for rank in ranks:
            rank.kill()


def joined_alone(code: str, **more: str) -> subprocess.CompletedProcess[str]:
    """The end of a process that is the only rank of torchrun's."""
    folders = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, **TORCHRUN, "PYTHONPATH": folders, "RANK": "0", "WORLD_SIZE": "1"}
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**environment, **more},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


COLLECTED = """
import os
import hocket.launch.joined as joined
class Circle:
    def __init__(self):
        self.circle = self
    def __del__(self, write=os.write):
        write(1, b"collected")
circle = Circle()
joined.run_joined("tests.launch.cases:tell_place", device="cpu", world_size=1)
"""


@pytest.mark.ranks
def test_a_rank_that_is_done_looks_at_no_objects_once_more() -> None:
    """The interpreter's last collection takes seconds of the grace that a system allows a stop."""
    done = joined_alone(COLLECTED)
    assert done.returncode == 0, done.stderr
    assert "collected" not in done.stdout


FAILS = """
import os, signal, sys
import hocket.launch.joined as joined
def ended(number, frame):
    os._exit(75)
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, ended)
abort = joined.RankContext.abort
def aborted(context):
    for number in (signal.SIGTERM, signal.SIGUSR1):
        os.kill(os.getpid(), number)
    abort(context)
joined.RankContext.abort = aborted
joined.run_joined("tests.launch.cases:only_fail", device="cpu", world_size=1)
"""


@pytest.mark.ranks
def test_a_signal_to_a_rank_that_fails_is_no_request_to_stop() -> None:
    """As srun sends it: with exit code 75 a job that fails would be queued again for ever."""
    done = joined_alone(FAILS, SLURM_STEP_ID="0")
    assert done.returncode == 1
    assert "boom" in done.stderr


ORPHAN = """
import os, sys, time
from hocket.launch import end_with_launcher
print(os.getpid(), flush=True)
if sys.argv[1] == "late":
    sys.stdin.read()  # until the launcher is gone
end_with_launcher()
print("watches", flush=True)
sys.stdin.read()
time.sleep(0.5)
print("goes on", flush=True)
"""
STEP = {name: value for name, value in SRUN.items() if name.startswith("SLURM")}
ELASTIC = {**TORCHRUN, "TORCHELASTIC_RUN_ID": "x"}


@pytest.mark.parametrize("when", ["watched", "late"])
@pytest.mark.parametrize("started_by", ["torchrun", "srun", "a shell in torchrun", "hand"])
def test_a_rank_ends_with_its_launcher(when: str, started_by: str) -> None:
    """So it does where the launcher was gone before the rank looked. Who starts ranks by hand may
    leave."""
    identity = {"srun": STEP, "hand": TORCHRUN}.get(started_by, ELASTIC)
    command = [sys.executable, "-c", ORPHAN, when]
    if "shell" in started_by:
        command = ["sh", "-c", '"$@"; true', "sh", *command]
    start = f"subprocess.run({command!r}, env={{**os.environ, **{identity!r}}})"
    environment = {k: v for k, v in os.environ.items() if k not in {**TORCHRUN, **SRUN}}
    launcher = subprocess.Popen(
        [sys.executable, "-c", f"import os, subprocess; {start}"],
        env={**environment, "PYTHONPATH": str(ROOT / "src")}, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert launcher.stdin is not None
    assert launcher.stdout is not None
    assert launcher.stderr is not None
    launcher.stdout.readline()  # it runs
    if when == "watched":
        assert launcher.stdout.readline() == "watches\n"
    launcher.kill()
    launcher.wait()
    errors = ""
    if started_by != "hand" and when == "watched":
        errors = launcher.stderr.readline()  # within the time limit of the test
    launcher.stdin.close()
    output, errors = launcher.stdout.read(), errors + launcher.stderr.read()
    if started_by == "hand":
        assert (output.splitlines()[-1], errors) == ("goes on", "")
    else:
        rank = identity.get("RANK") or identity["SLURM_PROCID"]
        ended = f"its launcher ended before rank {rank} had begun"
        assert output == ""
        assert f"rank {rank} ends: " in errors
        assert (ended if when == "late" else "which started it, is gone") in errors


STUCK = """
import ctypes, os, signal, sys, threading
from hocket.launch import end_with_launcher
signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
end_with_launcher()
libc = ctypes.PyDLL(None)  # keeps the interpreter's lock in a call
sys.setswitchinterval(1000)  # and between them: no thread of Python runs after the line is there
line = f"{os.getpid()}\\n".encode()
libc.write(1, line, len(line))
if sys.argv[1] == "stopped":
    libc.kill(os.getpid(), signal.SIGSTOP)
libc.pause()
"""


@pytest.mark.parametrize("how", ["in C", "stopped"])
@pytest.mark.parametrize("started_by", ["torchrun", "a shell in torchrun"])
def test_a_rank_that_runs_no_thread_ends_with_its_launcher(how: str, started_by: str) -> None:
    command = [sys.executable, "-c", STUCK, how]
    if "shell" in started_by:
        command = ["sh", "-c", '"$@"; true', "sh", *command]
    start = f"subprocess.run({command!r}, env={{**os.environ, **{ELASTIC!r}}})"
    launcher = subprocess.Popen(
        [sys.executable, "-c", f"import os, subprocess; {start}"],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert launcher.stdout is not None
    rank = int(launcher.stdout.readline())
    launcher.kill()
    try:
        errors = launcher.communicate(timeout=60)[1]  # until the rank has closed its output
    except subprocess.TimeoutExpired:
        os.kill(rank, signal.SIGKILL)
        raise
    assert f"rank {ELASTIC['RANK']} was killed: its launcher is gone" in errors
