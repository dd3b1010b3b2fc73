"""Launcher: the parent's hold on a warm fork server, and through it on ranks.

    with Launcher() as launcher:             # the server imports while the parent goes on
        launcher.run("package.module:entry", world_size=8, payload={...})

The parent never imports torch. Every rank speaks to it directly; the server only starts
ranks and tells of their ends. Whatever happens to the parent, the kernel ends server and
ranks with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn, Self

from hocket.launch import failure, lines
from hocket.launch.gpus import cuda_shows, rank_settings
from hocket.launch.spare import UNKNOWN, SpareServer, ask_for_spare, take_spare
from hocket.launch.watch import Event, Watch
from hocket.spec.errors import OptionError, RankFailure

__all__ = ["DEVICES", "Launcher", "Terminated", "cuda_shows", "raising_on_sigterm"]

DEVICES = ("auto", "cpu", "cuda")


class Terminated(SystemExit):
    """SIGTERM or SIGHUP came while ranks ran; they have been ended, and so ends the parent."""

    def __init__(self, number: int = signal.SIGTERM) -> None:
        super().__init__(128 + number)


class Launcher:
    """A warm server for any number of runs, one after the other.

    Attributes:
        device_kind: `cpu` (ranks are forked) or `cuda` (ranks are fresh interpreters).
        times: seconds of each import in the server, and when each rank of the last run began.
        stop_asked: whether the last run was asked to stop (`stoppable`).
    """

    def __init__(
        self,
        device: str = "cpu",
        threads: int | None = 1,
        *,
        path: Iterable[str | os.PathLike[str]] = (),
        preload: Iterable[str] = (),
        warm: bool = True,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start the server and return at once.

        Args:
            device: `cpu`, `cuda`, or `auto`: cuda where torch is built for it and a device shows.
            threads: CPU threads per rank. None: leave the choice to torch.
            path: folders that ranks may import from besides this process's own.
            preload: modules that the server imports before the first run is asked for.
            warm: import torch and transformers in the server. False: each rank that needs them
                imports them.
            environment: variables of server and ranks besides this process's own.

        Raises:
            OptionError: an unknown device.
        """
        if device not in DEVICES:
            raise OptionError(f"unknown device {device!r}", hint=f"use one of {', '.join(DEVICES)}")
        self.device_kind = ("cuda" if cuda_shows() else "cpu") if device == "auto" else device
        self.threads = threads
        self.times: dict[str, float] = {}
        self.stop_asked = False
        self._watch: Watch | None = None
        self._spare: socket.socket | None = None
        self._modules = list(preload)
        self._ended = False
        self._cold = self.device_kind == "cuda" or not warm
        self._variables = {**self._environment(path), **(environment or {})}
        self._start()

    def _start(self) -> None:
        """Start the server, and have it import what is known to be needed."""
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._words = os.memfd_create("hocket-server")
        # The kernel's signal at a parent's death follows the thread that started the child, so
        # it is asked for only where that thread lives as long as the process.
        lasting = threading.current_thread() is threading.main_thread()
        command = [sys.executable, "-m", "hocket.launch.server", "--control", str(theirs.fileno())]
        command += ["--parent", str(os.getpid() if lasting else 0)]
        if self._cold:
            command.append("--cold")
        try:
            self._server: subprocess.Popen[bytes] | SpareServer = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=self._words,
                stderr=self._words,
                pass_fds=[theirs.fileno()],
                env=self._variables,
                # A terminal's Ctrl-C reaches the parent only, which ends the ranks in order.
                start_new_session=True,
            )
        finally:
            theirs.close()
        modules, self._modules = self._modules, []
        self.preload(modules)

    def _environment(self, path: Iterable[str | os.PathLike[str]]) -> dict[str, str]:
        # Forked ranks set their threads themselves; the server must never start a team of them.
        count = str(self.threads or 1) if self.device_kind == "cuda" else "1"
        environment = dict(os.environ)
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
            environment[name] = count
        environment["TOKENIZERS_PARALLELISM"] = "false"
        environment["PYTHONUNBUFFERED"] = "1"
        if any(name == "lo" for _, name in socket.if_nameindex()):
            environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
        # A server that asked CUDA for devices could not fork ranks, not even for the CPU.
        environment.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
        if self.device_kind == "cuda":
            environment |= rank_settings(environment, watched=True)
        environment.setdefault("TRANSFORMERS_VERBOSITY", "error")
        environment.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        folders = [str(folder) for folder in (*path, *sys.path) if str(folder)]
        environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(folders))
        return environment

    def preload(self, modules: Iterable[str]) -> None:
        """Have the server import modules, so that no rank has to. Returns at once."""
        names = [name for name in modules if name not in self._modules]
        self._modules += names
        if names and self.device_kind == "cpu" and self.alive:
            with contextlib.suppress(BrokenPipeError, ConnectionError):  # `run` finds it ended
                lines.send(self._control, {"do": "import", "modules": names})

    def run(
        self,
        entry: str,
        world_size: int,
        payload: dict[str, Any] | None = None,
        on_event: Callable[[Event], None] | None = None,
        *,
        on_output: Callable[[int, str], None] | None = None,
        logs: str | os.PathLike[str] | None = None,
        attempt: int = 0,
        startup_timeout: float = 120.0,
        silence_timeout: float = 120.0,
        stoppable: bool = False,
    ) -> None:
        """Run `entry` (`module:function`, called as `function(context, payload)`) in every rank.

        Returns when all ranks have returned from it.

        Args:
            entry: what each rank calls with its RankContext and the payload.
            world_size: number of ranks.
            payload: plain data (JSON) the same for all ranks.
            on_event: called with each event that a rank emits, its number under `rank`.
            on_output: called with rank and line for what ranks print. None: standard error.
            logs: a folder for `rank-N.log` files, which then take the output instead.
            attempt: counted up by a caller that restarts; keeps stores of attempts apart.
            startup_timeout: seconds until the first event of any rank.
            silence_timeout: seconds without a sign of life of any rank that count as a hang.
            stoppable: the first SIGTERM or SIGUSR1 sets rank 0's `stop_asked`, which is to end the
                run in good order; a second SIGTERM ends it as without.

        Raises:
            RankFailure: a rank died or hung; the first one's own traceback or stack.
            HocketError: what a rank raised, as that very kind.
            KeyboardInterrupt, Terminated: SIGINT or SIGTERM came; all ranks have been ended.
        """
        assert world_size >= 1
        self.revive()
        listener = socket.create_server(("127.0.0.1", 0), backlog=4 * world_size)
        start = {
            "entry": entry,
            "payload": payload or {},
            "world_size": world_size,
            "device_kind": self.device_kind,
            "attempt": attempt,
            "threads": self.threads,
            "port": listener.getsockname()[1],
        }
        watch = Watch(
            self._control,
            world_size,
            on_event=on_event,
            on_output=on_output,
            logs=Path(logs) if logs is not None else None,
            startup_timeout=startup_timeout,
            silence_timeout=silence_timeout,
        )
        watch.times = self.times
        self.stop_asked, self._watch = False, watch

        def ask() -> None:
            self.stop_asked = True
            watch.ask_stop()

        ended = False
        try:
            with raising_on_sigterm(ask if stoppable else None), self._server_lives():
                self.times["asked"] = time.monotonic()
                self.preload([entry.partition(":")[0]])
                with listener:
                    watch.begin(json.dumps(start).encode(), listener, self.device_kind == "cuda")
                if self._spare is None and not self._cold:
                    self._spare = ask_for_spare(self._control)
                watch.see_through()
                ended = True
        finally:
            # A second Ctrl-C may not leave ranks behind: the server's death ends them surely.
            try:
                # Before its first rank the server imports, and reads nothing for seconds.
                if not ended and not (watch.any_rank and watch.end()):
                    self._kill()
            except BaseException:
                self._kill()
                raise
            finally:
                self._watch = None
                watch.close()

    def ask_stop(self) -> None:
        """As the first SIGTERM of a `stoppable` run, but `stop_asked` stays as it is."""
        if self._watch is not None:
            self._watch.ask_stop()

    @contextlib.contextmanager
    def _server_lives(self) -> Iterator[None]:
        """Tell of a server that is gone in its own words."""
        try:
            yield
        except (BrokenPipeError, ConnectionError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._server.wait(1.0)
            if self._server.returncode is None:
                raise  # the server is well: it was a pipe of the listener's, as under `| head`
            self._fail()
        except RankFailure as error:
            if "fork server ended" in error.message:
                self._fail()
            raise

    def _fail(self) -> NoReturn:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._server.wait(5.0)
        code = self._server.returncode
        size = os.fstat(self._words).st_size
        words = os.pread(self._words, size, 0).decode(errors="replace").rstrip()
        how = failure.end_of(None if code == UNKNOWN else code)
        text = f"the fork server (process {self._server.pid}) {how}; its ranks ended with it"
        error = RankFailure(f"{text}\n{words}".rstrip(), hint=failure.HINTS.get(code))
        error.rank, error.cause = None, how  # type: ignore[attr-defined]
        raise error

    def _kill(self) -> None:
        self._server.kill()
        self._server.wait()

    @property
    def alive(self) -> bool:
        """Whether the server could start another run."""
        return self._control.fileno() >= 0 and self._server.poll() is None

    def kill(self, *, for_good: bool = True) -> None:
        """End the server and its ranks at once; from any thread, and while another one runs.

        That one's `run` then raises RankFailure. `close` still has to be called. Unless it is
        `for_good`, `revive` starts another server.
        """
        self._ended = self._ended or for_good
        self._kill()

    def revive(self) -> bool:
        """Take the spare, or start another server, where this one was killed from outside or
        failed; whether there is one. One that `kill` or `close` ended stays so."""
        if not self._ended and not self.alive and self._server.returncode != 0:
            self._kill()
            self._control.close()
            spare, self._spare = self._spare, None
            server = None if spare is None else take_spare(spare)
            if spare is not None and server is not None:
                self._control, self._server = spare, server
                modules, self._modules = self._modules, []
                self.preload(modules)  # some may have come after the spare was made
            else:
                os.close(self._words)
                self._start()
        return self.alive

    def close(self) -> None:
        """End the server, and with it any rank. May be called twice."""
        if self._control.fileno() < 0:
            return
        self._ended = True
        servers = [self._server]
        if self._spare is not None and (spare := take_spare(self._spare)) is not None:
            servers.append(spare)
            self._spare.close()
        self._control.close()
        for server in servers:
            try:
                # While it imports it cannot listen, and nothing is lost by killing it.
                server.wait(0.5)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()
        os.close(self._words)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextlib.contextmanager
def raising_on_sigterm(ask: Callable[[], None] | None = None) -> Iterator[None]:
    """Within, SIGTERM and a closed terminal raise Terminated instead of ending the process on
    the spot. A SIGHUP that is ignored (nohup) stays ignored, and without `ask` a handler of
    SIGTERM with an attribute `raises` stays in place.

    `ask`, where given, is called at the first SIGTERM and at each SIGUSR1 (which batch systems send
    ahead of their time limit) instead.

    Raises:
        Terminated: `lost` of the handler in place, which a package that was imported has caught.
    """
    asked = False

    def handler(number: int, frame: object) -> None:
        nonlocal asked
        if ask is None or number == signal.SIGHUP or (asked and number == signal.SIGTERM):
            raise Terminated(number)
        asked = True
        ask()

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    lost = getattr(signal.getsignal(signal.SIGTERM), "lost", None)
    if lost is not None:
        raise lost
    numbers = [signal.SIGTERM] if ask is None else [signal.SIGTERM, signal.SIGUSR1]
    if ask is None and getattr(signal.getsignal(signal.SIGTERM), "raises", False):
        numbers = []  # the caller's handler ends the ranks as well, with an exit code of its own
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
        numbers.append(signal.SIGHUP)
    before = [(number, signal.signal(number, handler)) for number in numbers]
    try:
        yield
    finally:
        for number, old in before:
            signal.signal(number, old)
