"""JSON lines over a file descriptor: the only language between parent, server and ranks.

Nothing is pickled: what a rank says is data, never code.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from typing import Any

Message = dict[str, Any]
_CHUNK = 1 << 18


class LineReader:
    """Whole lines out of a descriptor that does not block and delivers pieces.

    Attributes:
        ended: the other side is closed and all that it wrote has been read.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.ended = False
        self._rest = b""

    def read(self, num_chunks: int = 16) -> list[bytes]:
        """The lines that have arrived, at most so many chunks of them.

        Where the stream ends in the middle of a line, that piece is its last line.
        """
        found: list[bytes] = []
        for _ in range(num_chunks):
            try:
                data = os.read(self.fd, _CHUNK)
            except BlockingIOError:
                break
            except ConnectionError:
                data = b""
            if not data:
                self.ended = True
                if self._rest:
                    found.append(self._rest)
                    self._rest = b""
                break
            *whole, self._rest = (self._rest + data).split(b"\n")
            found += whole
        return found


class LineWriter:
    """Messages as JSON lines into a socket, whole even where several threads write."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def write(self, message: Message) -> None:
        line = json.dumps(message, separators=(",", ":")).encode() + b"\n"
        with self._lock:
            self._connection.sendall(line)


def send(connection: socket.socket, message: Message, fds: list[int] | None = None) -> None:
    """One small message as one packet, with descriptors."""
    data = json.dumps(message).encode()
    if fds:
        socket.send_fds(connection, [data], fds)
    else:
        connection.send(data)


def receive(connection: socket.socket) -> tuple[Message, list[int]] | None:
    """One packet and its descriptors; None once the other side is gone."""
    try:
        data, fds, _, _ = socket.recv_fds(connection, _CHUNK, 8)
    except ConnectionError:
        return None
    if not data:
        return None
    message: Message = json.loads(data)
    return message, fds
