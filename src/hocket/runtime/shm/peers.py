"""Peers: whether the processes of a group live, and what to say when one does not come."""

from __future__ import annotations

import os
import select


class PeerLost(RuntimeError):
    """Another rank died, or did not come in time. Never the cause of a run's failure.

    Attributes:
        lost_peer: tells the launcher that the cause lies with another rank.
    """

    lost_peer = True


class PeerTimeout(PeerLost):
    """A rank that lives did not come within the group's time-out."""


class Mismatch(RuntimeError):
    """Ranks of one group called different collectives, or with different sizes."""


class Peers:
    """The other processes of a group, held by descriptors that tell of their ends.

    A process id may be given to another process; a pidfd never is.
    """

    def __init__(self, pids: list[int]) -> None:
        self.pids = pids
        self._fds: dict[int, int] = {}
        for rank, pid in enumerate(pids):
            if pid != os.getpid():
                try:
                    self._fds[rank] = os.pidfd_open(pid)
                except OSError:
                    self._fds[rank] = -1  # gone already

    def dead(self, ranks: list[int]) -> list[int]:
        """Those of `ranks` whose process has ended."""
        return [rank for rank in ranks if rank in self._fds and self._ended(self._fds[rank])]

    @staticmethod
    def _ended(fd: int) -> bool:
        if fd < 0:
            return True
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        return bool(poll.poll(0))

    def describe(self, rank: int) -> str:
        """A rank's process and what the kernel says it does."""
        words = {"R": "running", "S": "asleep", "D": "waiting for a device", "T": "stopped"}
        try:
            with open(f"/proc/{self.pids[rank]}/stat") as file:
                letter = file.read().rsplit(")", 1)[1].split()[0]
        except OSError:
            letter = "gone"
        return f"process {self.pids[rank]}, {words.get(letter, letter)}"

    def close(self) -> None:
        for fd in self._fds.values():
            if fd >= 0:
                os.close(fd)
        self._fds.clear()
