"""Runner: executes rows of the table, one after the other, within a time limit.

    on a GPU       each check in a forked process of its own, on the GPU
    without one    each check's rehearsals; its line is `cannot`, with their outcome
    without torch  the checks of the host alone

The runner does not import torch: a worker does (`doctor.worker`), one for real tensors, one for
fake CUDA tensors.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import IO, Any, Self

from hocket.doctor.check import CPU, FAKE, GPU, GpuCheck
from hocket.doctor.present import NO_GPU, PresentGpus, present
from hocket.spec.doctor import CANNOT, FAIL, PASS, CardLine, ReportCard, Value

Result = dict[str, Any]
Listener = Callable[[CardLine], None]

START = 300.0
"""Seconds in which a worker is to be ready: it imports torch, beyond 120 s on a loaded machine."""
GRACE = 15.0
"""Seconds beyond a check's own limit after which its worker is taken for dead."""
_TAIL = 500
"""Bytes of a worker's stderr that a lost worker's line repeats."""
REHEARSAL = 120.0
"""Seconds that one rehearsal may take."""


class WorkerLost(Exception):
    """A worker died, or did not answer."""


class Worker:
    """A worker's process, started when it is first asked for something."""

    def __init__(self, *, fake: bool = False) -> None:
        self.fake = fake
        self._process: subprocess.Popen[str] | None = None
        self._errors: IO[bytes] | None = None

    def run(self, name: str, form: str, timeout: float) -> Result:
        """The result of one check; never raises for what a check does."""
        for _ in range(2):
            try:
                if self._process is None:
                    self._start()
                return self._ask({"id": name, "form": form, "timeout": timeout}, timeout + GRACE)
            except WorkerLost as lost:
                reason = str(lost)
                self.close()
        return {"ok": False, "cannot": False, "values": {}, "predicted": {}, "seconds": 0.0,
                "reason": reason}  # fmt: skip

    def _start(self) -> None:
        command = [sys.executable, "-m", "hocket.doctor.worker", *(["--fake"] if self.fake else [])]
        environment = dict(os.environ)
        folders = [str(folder) for folder in sys.path if folder]
        environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(folders))
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  as long as the process
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True,
            env=environment,
        )  # fmt: skip
        self._answer(START)

    def _ask(self, request: dict[str, Any], timeout: float) -> Result:
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise WorkerLost(f"the worker's process ended{self._tail()}") from None
        return self._answer(timeout)

    def _answer(self, timeout: float) -> Result:
        assert self._process is not None
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], timeout)
        if not ready:
            raise WorkerLost(
                f"the worker's process did not answer for {timeout:.0f} s{self._tail()}"
            )
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            raise WorkerLost(f"the worker's process ended (exit code {code}){self._tail()}")
        found: Result = json.loads(line)
        return found

    def _tail(self) -> str:
        """The last lines of the process's stderr."""
        assert self._errors is not None
        size = os.fstat(self._errors.fileno()).st_size
        text = os.pread(self._errors.fileno(), _TAIL, max(0, size - _TAIL)).decode(errors="replace")
        return f": ...{text.strip()}" if text.strip() else ""

    def close(self) -> None:
        """End the worker, and with it the check that it executes."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout, self._errors):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self.close()


class CheckRunner:
    """Executes checks and makes their lines.

    Args:
        here: what is present.
        limit: seconds for all checks on a GPU together; None: none.
    """

    def __init__(self, here: PresentGpus, limit: float | None) -> None:
        self.here = here
        self.limit = limit
        self._begun = time.monotonic()
        self._real, self._fake = Worker(), Worker(fake=True)

    def lines(self, checks: Sequence[GpuCheck]) -> Iterator[CardLine]:
        """The line of each check, as soon as it is known."""
        try:
            for check in checks:
                yield self._line(check)
        finally:
            self._real.close()
            self._fake.close()

    def _line(self, check: GpuCheck) -> CardLine:
        blank = CardLine(
            id=check.id, group=check.group, what=check.what, criterion=check.criterion,
            status=CANNOT, command=check.command, limit=check.timeout,
        )  # fmt: skip
        if not check.gpus:
            return self._host(check, blank)
        if self.here.gpus or (check.driver and self.here.machine["gpus"]):
            return self._on_gpu(check, blank)
        return self._rehearsed(check, blank)

    def _host(self, check: GpuCheck, blank: CardLine) -> CardLine:
        from hocket.doctor.worker import perform

        return _finished(blank, perform(check.id, CPU))

    def _on_gpu(self, check: GpuCheck, blank: CardLine) -> CardLine:
        count = len(self.here.gpus) or int(self.here.machine["gpus"])
        if count < check.gpus:
            text = f"needs {check.gpus} GPUs, {count} {'is' if count == 1 else 'are'} here"
            return dataclasses.replace(blank, reason=text)
        timeout = check.timeout
        if self.limit is not None:
            left = self.limit - (time.monotonic() - self._begun)
            if left < check.seconds:
                text = (
                    f"out of time: takes about {check.seconds:.0f} s, {max(0.0, left):.0f} s of "
                    f"{self.limit:.0f} s are left; run it alone"
                )
                return dataclasses.replace(blank, reason=text)
            timeout = min(timeout, max(left, check.seconds))
        found = self._real.run(check.id, GPU, timeout)
        return _finished(dataclasses.replace(blank, limit=timeout), found)

    def _rehearsed(self, check: GpuCheck, blank: CardLine) -> CardLine:
        waits = "needs a GPU" if check.gpus == 1 else f"needs {check.gpus} GPUs"
        if self.here.why_none != NO_GPU:
            waits += f" ({self.here.why_none})"
        if not check.rehearsals:
            text = f"{waits}; cannot be rehearsed: {check.unrehearsed}"
            return dataclasses.replace(blank, reason=text)
        if not self.here.torch:
            return dataclasses.replace(blank, reason=waits)
        outcomes: dict[str, str] = {}
        values: dict[str, Value] = {}
        seconds = 0.0
        failed: list[str] = []
        missing: list[str] = []
        for form in check.rehearsals:
            worker = self._fake if form == FAKE else self._real
            found = worker.run(check.id, form, max(REHEARSAL, check.timeout))
            seconds += found["seconds"]
            if found["cannot"]:
                missing.append(found["reason"])
                continue
            outcomes[form] = "ok" if found["ok"] else found["reason"]
            if not found["ok"]:
                failed.append(f"rehearsal ({form}) failed: {found['reason']}")
            if form == CPU:
                values = found["values"]
        if failed:
            text, status = "; ".join(failed), FAIL
        elif outcomes:
            text, status = f"{waits}; rehearsed: ok", CANNOT
        else:
            text, status = f"{waits}; not rehearsed: {'; '.join(dict.fromkeys(missing))}", CANNOT
        return dataclasses.replace(
            blank, status=status, reason=text, values=values, rehearsals=outcomes, seconds=seconds
        )


def _finished(line: CardLine, found: Result) -> CardLine:
    status = CANNOT if found["cannot"] else PASS if found["ok"] else FAIL
    return dataclasses.replace(
        line, status=status, reason=found["reason"], values=found["values"],
        predicted=found["predicted"], seconds=found["seconds"],
    )  # fmt: skip


def report_card(
    checks: Sequence[GpuCheck],
    *,
    limit: float | None = None,
    on_line: Listener | None = None,
    here: PresentGpus | None = None,
) -> ReportCard:
    """Execute or rehearse checks.

    Args:
        checks: rows of the table, in their order.
        limit: seconds for all of them on a GPU; None: each check's own limit alone.
        on_line: called with each line as soon as it is known.
        here: what is present. None: look.
    """
    here = present() if here is None else here
    begun = time.monotonic()
    lines = []
    for line in CheckRunner(here, limit).lines(checks):
        lines.append(line)
        if on_line is not None:
            on_line(line)
    return ReportCard(
        date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        lines=tuple(lines), machine=here.machine, versions=here.versions,
        executed_on_gpu=bool(here.gpus), seconds=time.monotonic() - begun,
    )  # fmt: skip
