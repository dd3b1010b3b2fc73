"""Processes: a contender started, asked for turns, and ended with all that it started."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from benchmarks.groups import ROOT
from benchmarks.quiet import Watch, process_seconds
from benchmarks.serve.client import Answer, drive
from benchmarks.serve.contenders import CACHED, CHUNK, ROWS, Contender
from benchmarks.serve.workload import Load, Model


class ProcessError(Exception):
    """A contender could not be started, or failed: why, in its own words."""


@dataclasses.dataclass
class Turn:
    """What one turn gave. Seconds; `first` and `per_token` of each request, empty offline."""

    seconds: float
    tokens: list[list[int]]
    first: list[float]
    per_token: list[float]
    processor_seconds: float = 0.0
    others: float = 0.0


class Running:
    """One contender's processes. A context manager: leaving it ends all of them."""

    def __init__(
        self, contender: Contender, model: Model, folder: Path, python: str, log: Path
    ) -> None:
        self.contender, self.model, self.folder, self.log = contender, model, folder, log
        self.port = free_port()
        self.ready_seconds = 0.0
        read, write = os.pipe()
        if contender.kind == "server":
            run = log.with_suffix(".run")
            shutil.rmtree(run, ignore_errors=True)
            command = contender.command(python, folder, self.port, run)
        else:
            options = {
                "method": contender.method,
                "folder": str(folder),
                "threads": contender.threads,
                "layout": contender.layout,
                "rows": ROWS,
                "chunk": CHUNK,
                "cached": CACHED,
            }
            offline = ["-m", "benchmarks.serve.offline", json.dumps(options), str(write)]
            command = [python, *offline]
        log.parent.mkdir(parents=True, exist_ok=True)
        environment = {
            **os.environ,
            "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}",
            **contender.environment(),
        }
        self.began = time.monotonic()
        with log.open("w") as out:
            self.process = subprocess.Popen(
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
        self.answers: IO[str] = os.fdopen(read)

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *exception: object) -> None:
        self.end()

    def ready(self, seconds: float = 300.0) -> None:
        """Wait until it can be asked.

        Raises:
            ProcessError: it ended, or needs longer.
        """
        if self.contender.kind == "offline":
            self._line(seconds)
        else:
            while not self._healthy():
                if self.process.poll() is not None:
                    raise ProcessError(f"it ended with {self.process.returncode}:\n{self.tail()}")
                if time.monotonic() - self.began > seconds:
                    raise ProcessError(f"not ready after {seconds:.0f} s:\n{self.tail()}")
                time.sleep(0.1)
        self.ready_seconds = time.monotonic() - self.began

    def _healthy(self) -> bool:
        if self.contender.project == "null":
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", self.port)) == 0
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            path = "/ready" if self.contender.project == "hocket" else "/health"
            connection.request("GET", path)
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def turn(self, load: Load, prompts: Sequence[list[int]]) -> Turn:
        """Answer `prompts`; every one must come back with as many tokens as were asked for.

        Raises:
            ProcessError: an offline contender failed, or gave other numbers of tokens.
            ServerError: a server did not answer all of them.
        """
        pids = self._pids()
        before, watch = seconds_of(pids), Watch(pids)
        if self.contender.kind == "offline":
            turn = self._offline(prompts, load.clients)
        else:
            turn = self._asked(load, prompts)
        turn.others = watch.foreign()
        turn.processor_seconds = seconds_of(pids) - before
        lengths = {len(made) for made in turn.tokens}
        if len(turn.tokens) != len(prompts) or lengths != {self.model.new}:
            raise ProcessError(
                f"{len(turn.tokens)} answers of {len(prompts)}, with {sorted(lengths)} tokens "
                f"instead of {self.model.new}"
            )
        return turn

    def _asked(self, load: Load, prompts: Sequence[list[int]]) -> Turn:
        asks = [self.contender.ask(self.folder, p, self.model.new) for p in prompts]
        seconds, answers = drive(self.port, asks, load.clients)
        return self._turn(seconds, answers)

    @staticmethod
    def _turn(seconds: float, answers: list[Answer]) -> Turn:
        return Turn(
            seconds,
            [a.tokens for a in answers],
            [a.first for a in answers],
            [a.per_token for a in answers],
        )

    def _offline(self, prompts: Sequence[list[int]], clients: int) -> Turn:
        """Batches of as many prompts as clients would ask at the same time."""
        turn = Turn(0.0, [], [], [])
        for at in range(0, len(prompts), clients):
            answer = self.order({"prompts": prompts[at : at + clients], "new": self.model.new})
            turn.seconds += answer["seconds"]
            turn.tokens += answer["tokens"]
        return turn

    def order(self, message: dict[str, Any], seconds: float = 300.0) -> dict[str, Any]:
        """One order to an offline contender, and its answer."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(message) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise ProcessError(f"it has ended:\n{self.tail()}") from None
        return self._line(seconds)

    def _line(self, seconds: float) -> dict[str, Any]:
        if not select.select([self.answers], [], [], seconds)[0]:
            raise ProcessError(f"silent for {seconds:.0f} s:\n{self.tail()}")
        line = self.answers.readline()
        if not line:
            raise ProcessError(f"it ended:\n{self.tail()}")
        return dict(json.loads(line))

    def _pids(self) -> list[int]:
        return [*family(self.process.pid), os.getpid()]

    def tail(self) -> str:
        """The end of what it printed."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-15:])

    def end(self) -> None:
        """End it and whatever it started: politely first, since servers share memory segments."""
        pids = family(self.process.pid)
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(15)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        if self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()
        self.answers.close()


def seconds_of(pids: Sequence[int]) -> float:
    """Processor seconds that some processes have used."""
    return sum(process_seconds(pid) for pid in pids)


def family(pid: int) -> list[int]:
    """A process and all that descend from it (Linux)."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                parents.setdefault(parent, []).append(int(entry.name))
    found = [pid]
    for each in found:
        found += parents.get(each, [])
    return found


def free_port() -> int:
    """A port of the loopback that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
