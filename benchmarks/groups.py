"""Groups: one contender's process group, started, told to step, and ended.

Several groups stay alive side by side; all but one wait for a line of input and use no processor.
So contenders can take turns every few steps, and a drift of the machine meets all of them alike.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from benchmarks.workload import Workload

ROOT = Path(__file__).resolve().parent.parent


class GroupError(Exception):
    """A contender could not run: why, in its own words."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contender:
    """One thing to measure.

    Attributes:
        name: as the table prints it.
        axis: the table it belongs to.
        entry: `module:function`; the function builds the contender and returns its step.
        world_size: processes.
        options: keyword arguments of the function.
        requires: packages without which it is absent.
        threads: CPU threads per process.
        environment: more environment variables.
        ours: hocket itself.
    """

    name: str
    axis: str
    entry: str
    world_size: int = 2
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    requires: tuple[str, ...] = ()
    threads: int = 1
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    ours: bool = False


class Group:
    """The processes of one contender. A context manager: leaving it ends all of them."""

    def __init__(
        self, contender: Contender, workload: Workload, python: str, log: Path, timeout: float
    ) -> None:
        self.contender, self.log, self.timeout = contender, log, timeout
        self.processes: list[subprocess.Popen[str]] = []
        self.answers: list[IO[str]] = []
        port = _free_port()
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as out:
            for rank in range(contender.world_size):
                read, write = os.pipe()
                environment = {
                    **os.environ,
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(contender.world_size),
                    "LOCAL_WORLD_SIZE": str(contender.world_size),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                    "OMP_NUM_THREADS": str(contender.threads),
                    "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}",
                    **contender.environment,
                }
                command = [
                    *(python, "-m", "benchmarks.rank", contender.entry),
                    *(json.dumps(dict(contender.options)), workload.to_json(), str(write)),
                ]
                process = subprocess.Popen(
                    command,
                    cwd=ROOT,
                    env=environment,
                    stdin=subprocess.PIPE,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    pass_fds=(write,),
                    start_new_session=True,
                    text=True,
                )
                os.close(write)
                self.processes.append(process)
                self.answers.append(os.fdopen(read))

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *exception: object) -> None:
        self.end()

    def ready(self) -> list[dict[str, Any]]:
        """Wait until every rank has built its part."""
        return self._collect()

    def steps(self, count: int) -> list[dict[str, Any]]:
        """Take `count` steps; what each rank measured, in rank order.

        Raises:
            GroupError: a rank died, failed, or said nothing for `timeout` seconds.
        """
        for process in self.processes:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(f"steps {count}\n")
                process.stdin.flush()
        return self._collect()

    def _collect(self) -> list[dict[str, Any]]:
        found: dict[int, dict[str, Any]] = {}
        waiting = {pipe: rank for rank, pipe in enumerate(self.answers)}
        deadline = time.monotonic() + self.timeout
        while waiting:
            left = deadline - time.monotonic()
            readable, _, _ = select.select(list(waiting), [], [], max(0.0, left))
            if not readable:
                raise GroupError(f"silent for {self.timeout:.0f} s: ranks {list(waiting.values())}")
            for pipe in readable:
                rank = waiting.pop(pipe)
                line = pipe.readline()
                message = json.loads(line) if line else {"error": self._tail()}
                if "error" in message:
                    raise GroupError(f"rank {rank}: {message['error'].strip()}")
                found[rank] = message
        return [found[rank] for rank in sorted(found)]

    def _tail(self) -> str:
        return "it ended without a word; its log ends:\n" + "\n".join(
            self.log.read_text(errors="replace").splitlines()[-15:]
        )

    def end(self) -> None:
        """End every process of the group and wait for it."""
        for process in self.processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
        for process in self.processes:
            process.wait()
            if process.stdin is not None:
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.close()
        for pipe in self.answers:
            pipe.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def missing_packages(python: str, packages: tuple[str, ...]) -> list[str]:
    """Which of `packages` the interpreter `python` cannot find."""
    if not packages:
        return []
    program = (
        "import importlib.util as u, sys; "
        "print(*[p for p in sys.argv[1:] if u.find_spec(p) is None])"
    )
    done = subprocess.run(
        [python, "-c", program, *packages], capture_output=True, text=True, check=False
    )
    return done.stdout.split() if done.returncode == 0 else list(packages)
