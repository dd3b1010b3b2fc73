"""The guard of a rank that torchrun or Slurm started: a process that ends it if it cannot itself.

A rank in a call in C that keeps the interpreter's lock runs no thread of its own (`launch.orphan`),
and a stopped one none at all. The kernel's signal at a parent's death would not wait for a rank
that prints why it ends and notifies the others, and would not see past a shell that wraps the
command. Run by its path, it imports nothing of hocket or torch.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterable

GRACE = 3.0
"""Seconds in which a rank whose launcher is gone ends by itself."""
_IGNORED = ("SIGHUP", "SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2")
"""Signals that reach all processes of a step or a terminal; the guard ends with its rank."""


def start_guard(rank: str, launchers: Iterable[int]) -> None:
    """Have a process guard this one, rank `rank`, against the end of one of the processes behind
    the descriptors `launchers`. Where no process can be started, the rank goes on without."""
    with contextlib.suppress(OSError):
        own, fds = os.pidfd_open(os.getpid()), list(launchers)
        words = [sys.executable, "-I", "-S", __file__, rank, *map(str, (own, *fds))]
        subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=(own, *fds)
        )
        os.close(own)


def _guard(rank: str, own: int, launchers: list[int]) -> None:
    for name in _IGNORED:
        signal.signal(signal.Signals[name], signal.SIG_IGN)
    poll, alone = select.poll(), select.poll()
    alone.register(own, select.POLLIN)
    for fd in (own, *launchers):
        poll.register(fd, select.POLLIN)
    if own not in dict(poll.poll()) and not alone.poll(1000 * GRACE):
        signal.pidfd_send_signal(own, signal.SIGKILL)
        text = f"rank {rank} was killed: its launcher is gone, and it did not end by itself"
        with contextlib.suppress(OSError):
            print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    _guard(sys.argv[1], int(sys.argv[2]), [int(word) for word in sys.argv[3:]])
