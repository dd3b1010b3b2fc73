"""Peer files: a rank serves the files of one folder, and ranks of other hosts read them from it.

    request     one line of JSON: token, name           answer     8 bytes of length, the bytes

A length of -1: there is no such file. The token comes from the store that the ranks share; a name
that the server does not expect, such as one that leads out of the folder, is that of no file.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import re
import socket
import struct
import threading
from pathlib import Path

TIMEOUT = 60.0
"""Seconds without a byte after which a transfer fails."""
_AT_ONCE = 4 << 20
_LENGTH = struct.Struct("!q")


class PeerServer:
    """Serves the files below a folder to ranks that know the token, until it is closed.

    Args:
        folder: whose files are served.
        names: what a name has to match.
        host: address to listen on.
        token: that every request has to hold.

    Attributes:
        address: host and port.
    """

    def __init__(self, folder: Path, names: re.Pattern[str], host: str, token: str) -> None:
        self._folder, self._names, self._token = folder, names, token
        self._listener = socket.create_server((host, 0), backlog=64)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        threading.Thread(target=self._accept, daemon=True, name="peer files").start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            connection.settimeout(TIMEOUT)
            with connection.makefile("rb") as stream:
                request = json.loads(stream.readline(10_000))
            name = str(request["name"])
            if not hmac.compare_digest(str(request["token"]), self._token):
                return
            path = self._folder / name
            if not self._names.fullmatch(name) or not path.is_file():
                connection.sendall(_LENGTH.pack(-1))
                return
            with path.open("rb") as file:
                connection.sendall(_LENGTH.pack(os.fstat(file.fileno()).st_size))
                connection.sendfile(file)

    def close(self) -> None:
        """Serve no further request."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()


def fetch_peer_file(address: tuple[str, int], token: str, name: str, target: Path) -> None:
    """Read a file of a peer into `target`, which appears only once it is complete.

    Raises:
        OSError: the peer cannot be reached, has no such file, or the connection ended early.
    """
    aside = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with socket.create_connection(address, TIMEOUT) as connection, aside.open("wb") as file:
            connection.sendall(json.dumps({"token": token, "name": name}).encode() + b"\n")
            with connection.makefile("rb") as stream:
                head = stream.read(_LENGTH.size)
                left = _LENGTH.unpack(head)[0] if len(head) == _LENGTH.size else -1
                if left < 0:
                    raise FileNotFoundError(2, f"{address[0]} does not have {name}", str(target))
                while left:
                    block = stream.read(min(left, _AT_ONCE))
                    if not block:
                        raise ConnectionError(f"{address[0]} ended while it sent {name}")
                    file.write(block)
                    left -= len(block)
        os.replace(aside, target)
    finally:
        aside.unlink(missing_ok=True)


def own_address(towards: str) -> str:
    """This host's address on the network that leads to another host, or to itself."""
    (family, kind, _, _, address), *_ = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # of a datagram socket: nothing is sent
        return str(probe.getsockname()[0])
