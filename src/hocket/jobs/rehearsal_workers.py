"""Worker processes of a rehearsal: each executes ranks, one after the other, and sends JSON lines.

They are separate processes because the fake CUDA device has to be loaded before torch is imported.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import IO, Any, Self

from hocket.spec import errors
from hocket.spec.errors import HocketError, ModelError
from hocket.spec.layout import Layout
from hocket.spec.rehearsal import RankRehearsal

MOST = 2
"""Processes at once: each holds about 1 GB."""
_RAISED = re.compile(r"[\w.]*(Error|Exception|Interrupt|Exit)\b: ")
"""The line of a traceback that names the exception."""
LINES = 20
"""Lines of progress at most, while ranks are executed."""
LAST_WORDS = 5.0
"""Seconds to read what a worker wrote before it ended; a process that it started may hold it."""
COMMAND = (sys.executable, "-m", "hocket.rehearsal.worker")


def equal_ranks(
    layout: Layout, vocabulary: int, *, first: bool, data: bool = False
) -> dict[int, int]:
    """Every rank to the first that does the same.

    Args:
        vocabulary: its rows, which tp divides into shards of which the last may be smaller.
        first: tensor rank 0 does more than the others. data: ranks of dp differ.
    """
    most = -(-vocabulary // layout.tp)
    earliest: dict[tuple[int, ...], int] = {}
    found = {}
    for rank in range(layout.world_size):
        where = layout.coordinate(rank)
        rows = min(most, max(0, vocabulary - most * where["tp"]))
        own = int(first and where["tp"] == 0)
        key = (where["pp"], where["cp"], rows, own, where["dp"] * data)
        found[rank] = earliest.setdefault(key, rank)
    return found


def report_executed(done: int, count: int, say: Callable[[str], None]) -> None:
    """A line of progress after as many ranks as keep them to `LINES`."""
    if done % -(-count // LINES) == 0:
        say(f"executed {done} of these {count}")


class RehearsalWorkers:
    """A few worker processes, as a context manager that ends them; for any number of jobs.

    Args:
        num_tasks: no more processes than that. None: as many as there may be.
    """

    def __init__(self, num_tasks: int | None = None) -> None:
        from hocket.runtime.host_cores import usable_cores

        self._count = max(1, min(MOST, usable_cores(), num_tasks or MOST))
        self._processes: list[subprocess.Popen[str]] = []
        self._events: queue.Queue[tuple[int, dict[str, Any] | None]] = queue.Queue()
        self._stderr: list[deque[str]] = []
        self._readers: list[threading.Thread] = []

    def __enter__(self) -> Self:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        folder = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
        paths = [folder, *filter(None, [environment.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
        for index in range(self._count):
            process = subprocess.Popen(
                (*COMMAND, str(os.getpid())),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=environment,
            )
            lines: deque[str] = deque(maxlen=40)
            self._processes.append(process)
            self._stderr.append(lines)
            assert process.stdout is not None
            assert process.stderr is not None
            for target, arguments in (
                (_listen, (index, process.stdout, self._events)),
                (lines.extend, (process.stderr,)),
            ):
                reader = threading.Thread(target=target, args=arguments, daemon=True)
                reader.start()
            self._readers.append(reader)  # of stderr
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in self._processes:
            if kind is not None:
                process.kill()
            elif process.stdin is not None:
                with contextlib.suppress(BrokenPipeError):  # of one that is gone
                    process.stdin.close()
        for process in self._processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def run(self, tasks: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """The results of tasks, in the order in which they come.

        Raises:
            HocketError: what a task raised, of its kind; or the end of a worker's stderr.
        """
        left = deque(tasks)
        failure: HocketError | None = None
        busy = 0
        for process in self._processes:
            busy += self._give(process, left)
        while busy:
            index, event = self._events.get()
            process = self._processes[index]
            if event is None and failure is not None:
                raise failure  # of a worker that reported it and ended, while others are busy
            if event is None:
                code = process.wait()
                self._readers[index].join(LAST_WORDS)
                raise worker_ended(code, "".join(self._stderr[index]))
            if "error" in event:
                left.clear()
                failure = failure or _error(event)
            if "done" in event:
                busy -= 1
                busy += self._give(process, left)
            elif failure is None and "error" not in event:
                yield event
        if failure is not None:
            raise failure

    @staticmethod
    def _give(process: subprocess.Popen[str], left: deque[dict[str, Any]]) -> int:
        if not left:
            return 0
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(left.popleft()) + "\n")
            process.stdin.flush()
        except BrokenPipeError:  # it said why on its stdout
            pass
        return 1


def _listen(index: int, stdout: IO[str], events: Any) -> None:
    for line in stdout:
        events.put((index, json.loads(line)))
    events.put((index, None))


def _error(event: dict[str, Any]) -> HocketError:
    kind = getattr(errors, event.get("kind") or "", HocketError)
    return kind(event["error"], hint=event.get("hint"))  # type: ignore[no-any-return]


def worker_ended(code: int, stderr: str) -> HocketError:
    """The error of a worker that is gone: how it ended and the last thing it said; all it said is
    a note of the exception."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"code {code}"
    last = f": {_message(lines)}" if lines else ""
    memory = code == -signal.SIGKILL or "MemoryError" in last or "allocate memory" in last
    failed = HocketError(
        f"a process of the rehearsal ended with {how}{last}",
        hint=f"free memory (each of up to {MOST} such processes takes about 1 GB), and run it again"
        if memory
        else "hocket doctor, which lists what is missing here",
    )
    failed.add_note(stderr)
    return failed


class StepFailed(ModelError):
    """A rank's step raised what is not an error of ours."""


def step_failed(model: str, found: RankRehearsal) -> ModelError:
    """The error of a rank whose step raised: the exception's own line, and where in the model's
    code; sizes that contradict each other in a configuration are found there.

    A ModelError that is no StepFailed is a property of the model: its code takes one dtype alone,
    or makes shapes of values that it reads from the GPU.
    """
    lines = [line.strip() for line in found.error.splitlines() if line.strip()]
    frames = [line for line in lines if line.startswith("File ")]
    own = [line for line in frames if "modeling_" in line]
    place = (own or frames or [""])[-1].rpartition("/")[2].replace('"', "")
    message = _message(lines)
    failed: ModelError
    if "expected scalar type" in message or "same dtype" in message:
        failed = ModelError(
            f"{model} computes in one dtype alone: {message} (raised below {place})",
            hint="--dtype fp32, which the model's own code needs",
        )
    elif found.host_reads and own:
        where = found.host_reads[0]["where"]
        failed = ModelError(
            f"{model} cannot be rehearsed: its code reads values of the GPU at {where} and makes "
            f"shapes of them, which a rehearsal does not have: {message} (raised below {place})",
            hint="a model whose shapes do not depend on values; training waits for the GPU there, "
            "too",
        )
    else:
        sizes = re.search(r"size|shape|dimension|split|expand", message)
        failed = StepFailed(
            f"rank {found.rank} cannot execute a step of {model}: {message} (raised below {place})",
            hint="make the sizes in config.json fit each other: head_dim, num_attention_heads, "
            "hidden_size, num_experts and num_experts_per_tok"
            if sizes
            else "report it with what hocket doctor prints: hocket or torch cannot do this here",
        )
    failed.add_note(found.error)
    return failed


def _message(lines: Sequence[str]) -> str:
    """The exception's own line of a traceback: what follows it is more of its message."""
    raised = [line for line in lines if _RAISED.match(line)]
    return raised[-1] if raised else (lines[-1] if lines else "no message")
