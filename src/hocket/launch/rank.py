"""The rank's side: from a bare process to `entry(context, payload)`, and its last words.

1 die with the parent    2 own output and stacks    3 read the start message
4 import the entry       5 run it                   6 say how it ended, wait, leave

A rank leaves by `os._exit`: nothing at interpreter exit may hold up or confuse the others. NCCL's
communicators are destroyed before, in bounded time: all ranks do so together, when the parent asks
them to leave. After a failure the parent ends every rank, and nothing is waited for.

A thread answers the parent while the entry runs, whatever the main thread waits for.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import importlib
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any, NoReturn

from hocket.launch import symptoms
from hocket.launch.context import RankContext, loopback_store
from hocket.launch.heartbeat import Heart
from hocket.launch.lines import LineWriter
from hocket.launch.lost import peer_text
from hocket.spec import errors
from hocket.spec.parent_process import die_with


def load_entry(entry: str) -> Callable[..., Any]:
    """The function that `module:function` names.

    Raises:
        ImportError, AttributeError: there is no such module, or function in it.
    """
    module, _, name = entry.partition(":")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def lost_peer(error: BaseException) -> bool:
    """Whether `error` only says that another rank is gone or silent."""
    if getattr(error, "lost_peer", False):
        return True
    if isinstance(error, ConnectionError):
        return True
    if isinstance(error, errors.HocketError):
        return False
    return isinstance(error, RuntimeError) and symptoms.of_lost_peer(str(error))


def describe(error: BaseException) -> dict[str, Any]:
    """An exception as data: what the parent needs to show it or to raise it again."""
    kinds = [k.__name__ for k in type(error).__mro__ if k.__module__ == errors.__name__]
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    text = "".join(traceback.format_exception(type(error), error, frames))
    logging.getLogger(__name__).debug("a rank fails", exc_info=error)
    return {
        "launch": "failed",
        "time": time.monotonic(),
        "type": type(error).__name__,
        "hocket": kinds[0] if kinds else None,
        "message": getattr(error, "message", None) or peer_text(str(error)),
        "hint": getattr(error, "hint", None),
        "lost_peer": lost_peer(error),
        "traceback": peer_text(text).rstrip(),
    }


def run_rank(
    rank: int, *, events: int, output: int, stacks: int, start: int, listener: int, beats: int
) -> NoReturn:
    """Be rank `rank`: the descriptors are its event socket, its output, its stacks, the start
    message (shared by all ranks, so never seeked), the store's listening socket, and the memory of
    the heartbeats."""
    connection = socket.socket(fileno=events)
    writer = LineWriter(connection)
    answers = _Answers(connection, writer)
    code = 1
    try:
        _own_streams(output, stacks)
        answers.start()
        size = os.fstat(start).st_size
        message = json.loads(os.pread(start, size, 0))
        context = _context(rank, message, writer, listener)
        context.heart, context.stop_asked = Heart(beats, rank), answers.stop_asked
        answers.context = context
        code = _call(context, message, writer)
    except BaseException as error:
        code = _report(error, writer)
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    # Rank 0 serves the store and others may still read from any rank: leave together.
    if answers.leave.wait(60.0) and code == 0 and answers.context is not None and on_nccl():
        answers.context.destroy()
    os._exit(code)


class _Answers(threading.Thread):
    """Reads what the parent asks: `?` how far this rank has come, `s` to save and stop, a line's
    end to leave."""

    def __init__(self, connection: socket.socket, writer: LineWriter) -> None:
        super().__init__(daemon=True, name="answers")
        self.connection, self.writer = connection, writer
        self.context: RankContext | None = None
        self.leave = threading.Event()
        self.stop_asked = threading.Event()

    def run(self) -> None:
        with contextlib.suppress(OSError):
            while (asked := self.connection.recv(1)) in (b"?", b"s"):
                if asked == b"s":
                    self.stop_asked.set()
                    continue
                position = self.context.position if self.context is not None else None
                found: dict[str, Any] = {}
                with contextlib.suppress(Exception):  # the rank goes on whatever its position is
                    found = position() if position is not None else {}
                self.writer.write({"launch": "position", "position": found})
        self.leave.set()


def on_nccl() -> bool:
    """Whether the default process group is NCCL's (or stands for it), which leaves device memory
    and kernels behind unless it is destroyed."""
    dist = sys.modules.get("torch.distributed")
    return bool(dist and dist.is_initialized() and "nccl" in dist.get_backend())


def _own_streams(output: int, stacks: int) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    for fd in (null, output):
        if fd > 2:
            os.close(fd)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    # A terminal's Ctrl-C is the parent's to handle: it ends the ranks in good order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    faulthandler.enable(file=stacks)
    faulthandler.register(signal.SIGUSR2, file=stacks, all_threads=True)


def _context(rank: int, message: dict[str, Any], writer: LineWriter, listener: int) -> RankContext:
    return RankContext(
        rank=rank,
        world_size=message["world_size"],
        local_rank=rank,
        device_kind=message["device_kind"],
        one_machine=True,
        attempt=message["attempt"],
        _send=writer.write,
        _open_store=lambda timeout: loopback_store(
            rank, message["port"], listener if rank == 0 else None, timeout
        ),
    )


def renew_threads(number: int | None = None) -> None:
    """Give torch in a forked process a pool of `number` threads (None: as many as its parent had),
    if it was imported before the fork.

    torch replaces the pool that a fork leaves behind in the first call that sets the number,
    without a lock. The autograd engine's threads, one for each GPU that the machine has, would call
    it at once, and the process would abort ("Invalid thread pool!").
    """
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(number or torch.get_num_threads())


def _call(context: RankContext, message: dict[str, Any], writer: LineWriter) -> int:
    writer.write({"launch": "started", "time": time.monotonic(), "pid": os.getpid()})
    warnings.filterwarnings("ignore", module=r"(torch|transformers)\b")
    warnings.filterwarnings("ignore", category=FutureWarning)
    renew_threads(message["threads"])
    load_entry(message["entry"])(context, message["payload"])
    writer.write({"launch": "finished", "time": time.monotonic()})
    return 0


def _report(error: BaseException, writer: LineWriter) -> int:
    if isinstance(error, SystemExit) and error.code in (None, 0):
        writer.write({"launch": "finished", "time": time.monotonic()})
        return 0
    writer.write(describe(error))
    return error.exit_code if isinstance(error, errors.HocketError) else 1


def main() -> None:
    """A rank in a fresh interpreter (CUDA): `python -m hocket.launch.rank --parent PID ...`."""
    parser = argparse.ArgumentParser()
    for name in ("parent", "rank", "events", "output", "stacks", "start", "listener", "beats"):
        parser.add_argument(f"--{name}", type=int, required=True)
    args = parser.parse_args()
    die_with(args.parent)
    run_rank(
        args.rank,
        events=args.events,
        output=args.output,
        stacks=args.stacks,
        start=args.start,
        listener=args.listener,
        beats=args.beats,
    )


if __name__ == "__main__":
    main()
