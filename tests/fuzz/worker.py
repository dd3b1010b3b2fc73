"""Worker: a process that reads one mutated input after the other, and is watched."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import random
import resource
import select
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

from hocket.cli.main import _THE_FILE_SYSTEMS
from hocket.spec.errors import HocketError
from tests.fuzz import hub  # noqa: F401  (registers its kind)
from tests.fuzz.kinds import KINDS, Kind

MOST_BYTES = 2_000_000_000
"""Growth of a process's peak memory by one input."""

MOST_SECONDS = 10.0
"""Of processor time for one input."""

SILENCE = 120.0
"""Seconds without an answer after which a worker is ended: it waits for something."""


class TooLong(BaseException):
    """An input took its seconds."""


@dataclasses.dataclass
class Outcome:
    """What became of the inputs of one kind.

    Attributes:
        right: read, and the result used. errors: HocketErrors. failures: number and what happened.
        seconds: longest processor time of an input. grown: most memory of an input, bytes.
    """

    kind: str
    right: int = 0
    errors: int = 0
    failures: list[tuple[int, str]] = dataclasses.field(default_factory=list)
    seconds: float = 0.0
    grown: int = 0

    @property
    def inputs(self) -> int:
        return self.right + self.errors + len(self.failures)


def fuzz(name: str, inputs: int, seed: int, first: int = 0) -> Outcome:
    """Read `inputs` mutated inputs of one kind in worker processes, one after the other."""
    found = Outcome(name)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with tempfile.TemporaryDirectory(prefix="hocket-fuzz-") as there:
        if not KINDS[name].calls:
            # Before the forks, which share what this makes and imports; the good file is read.
            KINDS[name].prepare(Path(there))
            with open(os.devnull, "w") as null, contextlib.redirect_stdout(null):
                KINDS[name].read(Path(there))
    at, last = first, first + inputs
    while at < last and len(found.failures) < 100:
        ours, theirs = os.pipe()
        child = os.fork()
        if not child:
            os.close(ours)
            try:
                if KINDS[name].calls:
                    _start(name, at, last, seed, theirs)
                _work(KINDS[name], range(at, last), seed, theirs)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        os.close(theirs)
        at = _listen(ours, child, at, found)
    return found


def _listen(pipe: int, child: int, at: int, found: Outcome) -> int:
    """Hear a worker to its end; the number of the next input."""
    held, silent = b"", False
    while True:
        ready, _, _ = select.select([pipe], [], [], SILENCE)
        if not ready:
            os.kill(child, signal.SIGKILL)
            silent = True
        part = os.read(pipe, 65536) if ready else b""
        if not part:
            break
        *lines, held = (held + part).split(b"\n")
        for line in lines:
            row = json.loads(line)
            at = row["number"] + 1
            found.seconds = max(found.seconds, row["seconds"])
            found.grown = max(found.grown, row["grown"])
            if row["failure"]:
                found.failures.append((row["number"], row["failure"]))
            elif row["error"]:
                found.errors += 1
            else:
                found.right += 1
    os.close(pipe)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if code or silent:
        why = "no answer" if silent else f"signal {-code}" if code < 0 else f"exit code {code}"
        found.failures.append((at, why))
        at += 1
    return at


def _start(name: str, at: int, last: int, seed: int, pipe: int) -> None:
    """Be a new interpreter that works: a fork of threads and connections can wait for a lock whose
    owner it does not have."""
    os.set_inheritable(pipe, True)
    numbers = ", ".join(map(str, (at, last)))
    code = f"""if True:
        from tests.fuzz import worker
        worker._work(worker.KINDS[{name!r}], range({numbers}), {seed!r}, {pipe})
    """
    path = os.pathsep.join(map(os.path.abspath, sys.path))
    os.execve(sys.executable, [sys.executable, "-c", code], {**os.environ, "PYTHONPATH": path})


def _work(kind: Kind, numbers: range, seed: int, pipe: int) -> None:
    """In a worker: read the inputs, and say what became of each."""
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory(prefix="hocket-fuzz-") as there:
        folder = Path(there)
        os.environ["HOME"] = os.environ["HOCKET_CACHE"] = there
        os.chdir(folder)
        kind.prepare(folder)
        file = folder / kind.file
        whole = file.read_bytes()
        watched = Watch(folder)
        signal.signal(signal.SIGPROF, _too_long)
        for number in numbers:
            rng = random.Random(f"{seed}/{kind.name}/{number}")
            if whole != file.read_bytes() or file.is_symlink():
                kind.prepare(folder)
            file.write_bytes(kind.mutate(whole, rng))
            row = watched.one(kind, folder)
            file.write_bytes(whole)
            os.write(pipe, json.dumps({"number": number, **row}).encode() + b"\n")
            if row["grown"] > MOST_BYTES:
                os._exit(0)  # the peak never falls: the next worker begins again


def _too_long(number: int, frame: FrameType | None) -> None:
    raise TooLong


class Watch:
    """What a process does besides reading, and what it takes."""

    def __init__(self, folder: Path) -> None:
        self.allowed = (str(folder.resolve()), "/dev/null")
        self.seen: Counter[str] = Counter()
        self.on = self.calls = False
        sys.addaudithook(self._hear)

    def one(self, kind: Kind, folder: Path, show: bool = False) -> dict[str, Any]:
        """Read one input: `failure` (a text, or empty), `error`, `seconds`, `grown`."""
        before, began = _peak(), time.process_time()
        failure, error = "", False
        self.seen.clear()
        with open(os.devnull, "w") as null, contextlib.ExitStack() as stack:
            if not show:
                stack.enter_context(contextlib.redirect_stdout(null))
                stack.enter_context(contextlib.redirect_stderr(null))
            signal.setitimer(signal.ITIMER_PROF, MOST_SECONDS)
            self.on, self.calls = True, kind.calls
            try:
                kind.read(folder)
            except HocketError as found:
                error = True
                if len(found.message.strip()) < 8 or "Traceback" in str(found):
                    failure = f"an error without a message: {found!r}"
            except OSError as found:
                error = True
                if found.errno not in _THE_FILE_SYSTEMS:
                    failure = _shown(found)
            except TooLong as found:
                failure = f"more than {MOST_SECONDS:g} s: {_shown(found)}"
            except BaseException as found:
                if show:
                    traceback.print_exc()
                failure = _shown(found)
            finally:
                self.on = False
                signal.setitimer(signal.ITIMER_PROF, 0)
        grown = _peak() - before
        if grown > MOST_BYTES:
            failure = failure or f"it took {grown:,} bytes"
        if self.seen:
            failure = failure or f"it touched {', '.join(self.seen)}"
        return {
            "failure": failure,
            "error": error,
            "seconds": round(time.process_time() - began, 3),
            "grown": max(0, grown),
        }

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.on:
            return
        if event == "open":
            path, _, flags = arguments
            if isinstance(path, int) or not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                return
            self._path(event, path)
        elif event in _CHANGES:
            at, of_folder = _CHANGES[event]
            self._path(event, arguments[at], arguments[of_folder] if of_folder else -1)
        elif self.calls and event in _CALLS:
            address = arguments if event == "socket.getaddrinfo" else arguments[1]
            if address[0] not in ("127.0.0.1", b"127.0.0.1", "localhost", b"localhost"):
                raise OSError(errno.ECONNREFUSED, "another address than the server's")
        elif event in _NEVER:
            self.seen[f"{event} {arguments!r:.100}"] += 1

    def _path(self, event: str, path: Any, folder: int = -1) -> None:
        inside = os.readlink(f"/proc/self/fd/{folder}") if folder >= 0 else "."
        where = (
            ""
            if isinstance(path, int)
            else os.path.abspath(os.path.join(inside, os.fsdecode(path)))
        )
        real = os.path.realpath(where)
        if where and not any(real == one or real.startswith(f"{one}/") for one in self.allowed):
            self.seen[f"{event} {where}"] += 1


_CHANGES = {
    "os.remove": (0, 1), "os.rename": (1, 3), "os.rmdir": (0, 1), "os.mkdir": (0, 2),
    "os.link": (1, 3), "os.symlink": (1, 2), "os.truncate": (0, 0), "os.utime": (0, 3),
    "os.chmod": (0, 2), "os.chown": (0, 3), "shutil.rmtree": (0, 0), "shutil.move": (1, 0),
    "shutil.copyfile": (1, 0),
}  # fmt: skip
"""Audit events of changes: which argument is the path, and which its folder's descriptor."""

_CALLS = frozenset({"socket.connect", "socket.getaddrinfo", "socket.bind"})
_NEVER = _CALLS | {
    "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.kill",
}  # fmt: skip


def _shown(error: BaseException) -> str:
    """Kind, message and place of an exception, in one line."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "hocket/" in frame.filename]
    last = (ours or frames)[-1] if frames else None
    where = f" at {Path(last.filename).name}:{last.lineno}" if last else ""
    return f"{type(error).__name__}: {str(error)[:120]!r}{where}"


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
