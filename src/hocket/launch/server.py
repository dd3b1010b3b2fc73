"""The fork server: a fresh process that has imported what is slow and forks ranks from it.

It never computes, draws or serves: a fork copies only the forking thread, so any lock or
thread pool that lived here would be broken in every rank. Its one thread waits for packets
of the parent and for the ends of its ranks.

    parent                         server                        rank r
    run (start, listener)   ->     keeps both
    rank r (events, ...)    ->     fork / spawn           ->     runs, speaks to the parent
                            <-     began r, pid                  directly
                            <-     ended r, status        <-     leaves
    begun, spare (control)  ->     fork a spare           ->     serves, when this one is killed
    signal n                ->     kill
    leave, or gone          ->     kills all, leaves
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import importlib
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from hocket.launch import lines
from hocket.launch.rank import run_rank
from hocket.launch.spare import NAME
from hocket.spec.parent_process import die_with

# The slow imports of every rank, in this order so that the costs can be separated.
SLOW = ("torch", "torch.distributed", "torch._dynamo", "transformers")
# What they leave to their first use; a name that a version lacks is passed over.
LATE = (
    "numpy.ma",
    "safetensors.torch",
    "torch.distributed.distributed_c10d",
    "torch.optim.adamw",
    "torch.utils.checkpoint",
    "transformers.generation.utils",
    "transformers.masking_utils",
    "transformers.modeling_layers",
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
    "transformers.processing_utils",
)


_LIBC = ctypes.CDLL(None)
_PR_SET_NAME = 15


def send_signal(pid: int, number: int) -> None:
    """Signal a process; SIGUSR2, which asks for a stack, goes to its main thread.

    Any thread of a process that was stopped takes a signal of the process, while the main thread
    goes on: its stack would be of a later place. Raises ProcessLookupError.
    """
    to_thread = getattr(_LIBC, "tgkill", None)  # glibc from 2.30 on
    if number != signal.SIGUSR2 or to_thread is None or to_thread(pid, pid, number) != 0:
        os.kill(pid, number)


class ForkServer:
    """The loop, and the ranks that live."""

    def __init__(self, control: socket.socket) -> None:
        self.control = control
        self.ranks: dict[int, tuple[int, int]] = {}  # rank -> (pid, pidfd)
        self.spawn = False
        self.start: int | None = None
        self.listener: int | None = None
        self.beats: int | None = None
        self.name: bytes | None = None  # of a spare, from when it is the server
        self.selector = selectors.PollSelector()
        self.selector.register(control, selectors.EVENT_READ)

    def loop(self) -> None:
        """Until the parent says leave, or is gone."""
        while True:
            for key, _ in self.selector.select():
                if key.fileobj is self.control:
                    packet = lines.receive(self.control)
                    if packet is None or packet[0]["do"] == "leave":
                        return self.end_all()
                    self.obey(*packet)
                else:
                    self.bury(key.data)

    def obey(self, message: lines.Message, fds: list[int]) -> None:
        if self.name is not None:
            _LIBC.prctl(_PR_SET_NAME, self.name)
            self.name = None
        match message["do"]:
            case "import":
                take_in(message["modules"])
            case "run":
                assert not self.ranks, "a run while ranks of the last one live"
                self.close_run()
                self.start, self.listener, self.beats = fds
                self.spawn = message["spawn"]
            case "rank":
                self.begin(message["rank"], *fds)
            case "begun":
                self.close_run()
            case "spare":
                self.split(*fds)
            case "signal":
                for rank in message["ranks"]:
                    # Only what has not been waited for: its number cannot have been reused.
                    if rank in self.ranks:
                        with contextlib.suppress(ProcessLookupError):
                            send_signal(self.ranks[rank][0], message["signal"])

    def begin(self, rank: int, events: int, output: int, stacks: int) -> None:
        assert self.start is not None
        assert self.listener is not None
        assert self.beats is not None
        server = os.getpid()
        if self.spawn:
            numbers = {
                "parent": server,
                "rank": rank,
                "events": events,
                "output": output,
                "stacks": stacks,
                "start": self.start,
                "listener": self.listener,
                "beats": self.beats,
            }
            words = [word for k, v in numbers.items() for word in (f"--{k}", str(v))]
            pid = subprocess.Popen(
                [sys.executable, "-m", "hocket.launch.rank", *words],
                pass_fds=(events, output, stacks, self.start, self.listener, self.beats),
            ).pid
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                pid = os.fork()
            if pid == 0:
                self.be(rank, server, events, output, stacks)
        pidfd = os.pidfd_open(pid)
        self.ranks[rank] = (pid, pidfd)
        self.selector.register(pidfd, selectors.EVENT_READ, rank)
        for fd in (events, output, stacks):
            os.close(fd)
        self.say({"did": "began", "rank": rank, "pid": pid, "time": time.monotonic()})

    def be(self, rank: int, server: int, events: int, output: int, stacks: int) -> None:
        """Never returns: this process is the rank now."""
        try:
            die_with(server)
            assert self.start is not None
            assert self.listener is not None
            assert self.beats is not None
            self.control.close()
            for _, pidfd in self.ranks.values():
                os.close(pidfd)
            if rank != 0:
                os.close(self.listener)
            run_rank(
                rank,
                events=events,
                output=output,
                stacks=stacks,
                start=self.start,
                listener=self.listener,
                beats=self.beats,
            )
        finally:
            os._exit(1)

    def split(self, control: int) -> None:
        """Fork a spare (`launch.spare`), which is the server of another control socket."""
        name = Path("/proc/self/comm").read_bytes().strip()
        # It is born with its name: until it had given it to itself it would pass for a rank.
        _LIBC.prctl(_PR_SET_NAME, NAME.encode())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid:
            _LIBC.prctl(_PR_SET_NAME, name)
            os.close(control)
            return
        try:
            self.control.close()
            self.close_run()
            for _, pidfd in self.ranks.values():
                os.close(pidfd)
            spare = ForkServer(socket.socket(fileno=control))
            spare.name = name
            spare.control.set_inheritable(False)
            spare.say({"did": "spare", "pid": os.getpid()})
            spare.loop()
        finally:
            os._exit(0)

    def bury(self, rank: int) -> None:
        pid, pidfd = self.ranks.pop(rank)
        self.selector.unregister(pidfd)
        os.close(pidfd)
        _, status = os.waitpid(pid, 0)
        code = os.waitstatus_to_exitcode(status)
        self.say({"did": "ended", "rank": rank, "code": code, "time": time.monotonic()})

    def say(self, message: lines.Message) -> None:
        # A parent that is gone shows as the end of its packets, which the loop handles.
        with contextlib.suppress(OSError):
            lines.send(self.control, message)

    def close_run(self) -> None:
        for fd in (self.start, self.listener, self.beats):
            if fd is not None:
                os.close(fd)
        self.start = self.listener = self.beats = None

    def end_all(self) -> None:
        for pid, _ in self.ranks.values():
            os.kill(pid, signal.SIGKILL)
        for rank in list(self.ranks):
            self.bury(rank)


@contextlib.contextmanager
def no_device_asked() -> Iterator[None]:
    """Within, torch answers what a device can do without initializing CUDA.

    Packages ask while they are imported (torchao, which transformers imports where it is
    installed), and a process that initialized CUDA cannot fork others that use it. torch asks the
    device whether its compute capability is 7.0 or higher, the least that is supported here, and
    that is the answer: torchao then defines no kernels of MX formats (10.0), which nothing here
    uses. Who bound a function meanwhile gets torch's own answer later.
    """
    import torch
    from torch.utils import _triton

    module: Any = _triton
    given, capability = module.has_triton, torch.cuda.get_device_capability
    within = True

    def has_triton() -> bool:
        if within and torch.cuda.is_available():
            return bool(module.has_triton_package())
        return bool(given())

    def get_device_capability(device: Any = None) -> tuple[int, int]:
        return (7, 0) if within else capability(device)

    has_triton.cache_clear = given.cache_clear  # type: ignore[attr-defined]
    module.has_triton, torch.cuda.get_device_capability = has_triton, get_device_capability
    try:
        yield
    finally:
        within = False
        module.has_triton, torch.cuda.get_device_capability = given, capability


def take_in(modules: Iterable[str]) -> tuple[dict[str, float], dict[str, str]]:
    """Import each, quietly: seconds by name, and by name what went wrong.

    What fails here fails again in the rank that needs it, with its own traceback.
    """
    seconds, wrong = {}, {}
    with warnings.catch_warnings(), contextlib.ExitStack() as stack:
        warnings.simplefilter("ignore")
        asking = True
        for name in modules:
            begin = time.perf_counter()
            if asking and "torch" in sys.modules:
                asking = False
                stack.enter_context(no_device_asked())
            try:
                importlib.import_module(name)
            except Exception as error:
                wrong[name] = f"{type(error).__name__}: {error}"
            seconds[name] = time.perf_counter() - begin
    # Kept out of every later collection: one in a rank would touch, and so copy, all pages. None
    # comes before: it takes as long as importing transformers, and finds no memory to speak of.
    gc.freeze()
    return seconds, wrong


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--control", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--cold", action="store_true", help="import nothing slow")
    args = parser.parse_args()
    if args.parent:
        die_with(args.parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control = socket.socket(fileno=args.control)
    control.set_inheritable(False)
    server = ForkServer(control)
    begin = time.perf_counter()
    seconds: dict[str, float] = {}
    if not args.cold:
        gc.disable()
        seconds, wrong = take_in(SLOW)
        if wrong:
            server.say({"did": "failed", "wrong": wrong})
            return
        take_in(LATE)
        gc.enable()
    seconds["all"] = time.perf_counter() - begin
    num_threads = len(os.listdir("/proc/self/task"))
    server.say({"did": "warmed", "seconds": seconds, "threads": num_threads})
    server.loop()


if __name__ == "__main__":
    main()
