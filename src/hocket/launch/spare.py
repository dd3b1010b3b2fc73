"""The spare of a fork server: a copy of the warm server, which takes its place when it is killed.

    server (imported) --fork--> spare      waits on a control socket of its own; shares all pages
    server is killed                       the launcher speaks to the spare, which forks the ranks

Another server would import for seconds. Nothing of the spare is written to, so it costs page tables
and no memory. It is no child of the launcher: the kernel gives it to another process when the
server ends, so it is watched through a descriptor, and ends when its control socket is closed.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
from pathlib import Path

from hocket.launch import lines

NAME = "hocket-spare"
"""Of its process, by which ps and top tell it from a rank, until it is the server."""

UNKNOWN = 1 << 16
"""Stands for the exit code of a process whose parent is another one."""
_ANSWER = 5.0


def is_spare(pid: int) -> bool:
    """Whether a process is a spare that waits."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip() == NAME
    return False


class SpareServer:
    """What `subprocess.Popen` is for a child, for a process that is none.

    Attributes:
        returncode: None while it runs, `UNKNOWN` afterwards.
    """

    def __init__(self, pid: int, pidfd: int) -> None:
        self.pid, self._pidfd = pid, pidfd
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Its `returncode` now."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Until it has ended. Raises subprocess.TimeoutExpired after `timeout` seconds."""
        if self.returncode is None:
            poll = select.poll()
            poll.register(self._pidfd, select.POLLIN)
            if not poll.poll(None if timeout is None else 1000 * timeout):
                raise subprocess.TimeoutExpired("the fork server", timeout or 0.0)
            os.close(self._pidfd)
            self.returncode = UNKNOWN
        return self.returncode

    def kill(self) -> None:
        """End it at once."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)


def ask_for_spare(control: socket.socket) -> socket.socket | None:
    """Have the server behind `control` make a spare; the launcher's end of the spare's control
    socket. None: the server is gone."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        try:
            lines.send(control, {"do": "spare"}, [theirs.fileno()])
        except (BrokenPipeError, ConnectionError):
            ours.close()
            return None
    return ours


def take_spare(control: socket.socket) -> SpareServer | None:
    """The spare that answers on `control`; None, and `control` is closed, where there is none."""
    found = None
    with contextlib.suppress(OSError):
        control.settimeout(_ANSWER)
        answer = lines.receive(control)
        if answer is not None:
            pid = int(answer[0]["pid"])
            pidfd = os.pidfd_open(pid)
            # A number that was used again meanwhile is another process.
            if b"hocket.launch.server" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found = SpareServer(pid, pidfd)
            else:
                os.close(pidfd)
        control.settimeout(None)
    if found is None:
        control.close()
    return found
