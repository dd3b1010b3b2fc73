"""Worker: a process that imported torch and forks a child for each check it is asked for.

    runner  -- {"id", "form", "timeout"} ->  worker  -- fork -->  child: the check
            <- {"id", "ok", "values", "reason", "cannot", "seconds"} --

A crash (an illegal memory access, an abort of NCCL) ends the child alone; a child that runs too
long is killed with all processes of its group. The worker itself never touches a device, so that
its children can; where a driver rejects a forked process, the check is executed again in a fresh
interpreter.

    python -m hocket.doctor.worker                   serves requests from standard input
    python -m hocket.doctor.worker --fake            the same, for fake CUDA tensors
    python -m hocket.doctor.worker --once ID FORM    one check in this process

Not executed on a GPU yet.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import IO, Any

from hocket.doctor.check import FAKE, GPU, Cannot, GpuCheck
from hocket.doctor.place import Place
from hocket.doctor.table import by_id
from hocket.launch.rank import renew_threads
from hocket.spec.parent_process import die_with
from hocket.spec.units import format_bytes

Result = dict[str, Any]

_FORK_REJECTED = ("re-initialize CUDA in forked", "initialization error")
SMALL = 40e9
"""Bytes of GPU memory below which a check that runs out of memory cannot be executed."""
_TAIL = 2000
"""Characters of a child's output that a failure repeats."""


def perform(name: str, form: str) -> Result:
    """Execute one check in this process."""
    check = by_id(name)
    begun = time.perf_counter()
    found: Result = {"ok": False, "values": {}, "predicted": {}, "reason": "", "cannot": False}
    place = Place(form)
    try:
        missing(check, form)
        with _surroundings(check, form):
            outcome = check.resolve(form)(place, **check.arguments)
        found |= {
            "ok": outcome.ok, "values": dict(outcome.values), "reason": outcome.reason,
            "predicted": dict(outcome.predicted),
        }  # fmt: skip
    except Cannot as reason:
        found |= {"cannot": True, "reason": str(reason), "values": dict(place.values)}
    # Whatever a check raises is its result: the worker goes on with the next one.
    except Exception as error:
        lines = traceback.format_exception(error)
        where = lines[-2].strip().splitlines()[0] if len(lines) > 2 else ""
        found["reason"] = f"{type(error).__name__}: {str(error).strip()} ({where})"
        if form == GPU and type(error).__name__ == "OutOfMemoryError" and _is_small():
            found |= {"cannot": True, "reason": f"needs more memory than this GPU has: {error}"}
        found["values"] = dict(place.values)
        traceback.print_exc()
    return {**found, "seconds": time.perf_counter() - begun}


def missing(check: GpuCheck, form: str) -> None:
    """Raises Cannot where the check needs what is not here: packages, GPUs, capability, memory."""
    for package in check.packages:
        if importlib.util.find_spec(package) is None:
            raise Cannot(f"needs the package {package}")
    if form != GPU or not check.gpus or check.driver or check.forks:
        return
    import torch

    count = torch.cuda.device_count()
    if count < check.gpus:
        raise Cannot(f"needs {check.gpus} GPUs, {count} {'is' if count == 1 else 'are'} here")
    try:
        least = min(torch.cuda.get_device_capability(i) for i in range(check.gpus))
    except RuntimeError as error:
        text = str(error).strip().splitlines()[0]
        # In a forked process the same check is executed again in a fresh one.
        if check.group == "environment" or any(words in text for words in _FORK_REJECTED):
            raise
        raise Cannot(f"CUDA does not start ({text}): hocket doctor --group environment") from None
    if least < check.capability:
        raise Cannot(
            f"needs compute capability {'.'.join(map(str, check.capability))}, this GPU has "
            f"{'.'.join(map(str, least))}"
        )
    if not check.memory:
        return
    free, _ = torch.cuda.mem_get_info(0)
    if free < check.memory:
        raise Cannot(
            f"needs {format_bytes(check.memory)} of GPU memory, {format_bytes(free)} is free"
        )


def _is_small() -> bool:
    """Whether GPU 0 has less memory than checks are made for that do not say how much they need."""
    import torch

    return torch.cuda.get_device_properties(0).total_memory < SMALL


def _surroundings(check: GpuCheck, form: str) -> contextlib.AbstractContextManager[None]:
    if form == FAKE and not check.fake:
        from hocket.doctor.fake import fake_cuda

        return fake_cuda()
    return contextlib.nullcontext()


def _in_child(name: str, form: str, result: int, output: int) -> None:
    """The child's whole life. Never returns."""
    code = 1
    try:
        os.setpgid(0, 0)
        die_with(os.getppid())
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        renew_threads()
        os.write(result, json.dumps(perform(name, form)).encode())
        code = 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def forked(name: str, form: str, timeout: float) -> Result:
    """Execute one check in a forked child, for at most `timeout` seconds."""

    def start(result: int, output: int) -> int:
        pid = os.fork()
        if pid == 0:
            _in_child(name, form, result, output)
        return pid

    return _watched(start, timeout)


def fresh(name: str, form: str, timeout: float) -> Result:
    """The same in a fresh interpreter."""

    def start(result: int, output: int) -> int:
        command = [sys.executable, "-m", "hocket.doctor.worker", "--once", name, form, str(result)]
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, pass_fds=[result],
            process_group=0,
        ).pid  # fmt: skip

    return _watched(start, timeout)


def _watched(start: Callable[[int, int], int], timeout: float) -> Result:
    with tempfile.TemporaryFile() as result, tempfile.TemporaryFile() as output:
        begun = time.monotonic()
        pid = start(result.fileno(), output.fileno())
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)  # parent or child, the first of the two
        status = _wait(pid, begun + timeout)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)  # ranks that the check started
        seconds = time.monotonic() - begun
        text = _read(result)
        if text:
            found: Result = json.loads(text)
            return found
        if status is None:
            reason = f"still running after {timeout:.0f} s, ended"
        elif os.WIFSIGNALED(status):
            reason = f"its process died by {signal.Signals(os.WTERMSIG(status)).name}"
        else:
            reason = f"its process ended with exit code {os.waitstatus_to_exitcode(status)}"
        tail = _read(output)[-_TAIL:].strip()
        reason += f": ...{tail}" if tail else ""
        return {"ok": False, "values": {}, "predicted": {}, "reason": reason, "cannot": False,
                "seconds": seconds}  # fmt: skip


def _wait(pid: int, deadline: float) -> int | None:
    """The child's status; None after it was killed for running too long."""
    pause = 0.002
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status
        if time.monotonic() > deadline:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return None
        time.sleep(pause)
        pause = min(0.05, 1.5 * pause)


def _read(file: IO[bytes]) -> str:
    size = os.fstat(file.fileno()).st_size
    return os.pread(file.fileno(), size, 0).decode(errors="replace")


def answer_requests(requests: IO[str], answers: IO[str]) -> None:
    for line in requests:
        request = json.loads(line)
        asked = request["id"], request["form"], float(request["timeout"])
        found = forked(*asked)
        rejected = any(words in found["reason"] for words in _FORK_REJECTED)
        if rejected and not by_id(asked[0]).forks:
            found = fresh(*asked)
        answers.write(json.dumps({"id": request["id"], **found}) + "\n")
        answers.flush()


def _warm() -> None:
    """Import what children need; nothing here may touch a device."""
    from hocket.launch.server import no_device_asked

    with contextlib.suppress(ImportError):
        import torch

        with no_device_asked():
            import torch._dynamo
            import torch.distributed

            import hocket.training.build
            import hocket.training.check  # noqa: F401

        torch.set_num_threads(1 if torch.version.cuda is None else torch.get_num_threads())


def main(arguments: list[str]) -> int:
    """Serve, or execute one check. Returns 0."""
    # torch asks NVML instead of CUDA whether there is a device: CUDA would not survive a fork.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if "--fake" in arguments or FAKE in arguments:
        from hocket.doctor.fake import load_fake

        load_fake()
    if arguments[:1] == ["--once"]:
        name, form, descriptor = arguments[1:4]
        os.write(int(descriptor), json.dumps(perform(name, form)).encode())
        return 0
    die_with(os.getppid())
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    _warm()
    answers.write(json.dumps({"ready": True}) + "\n")
    answers.flush()
    answer_requests(sys.stdin, answers)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
