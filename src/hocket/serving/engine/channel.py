"""Channels: the sockets between a replica's ranks, and from its driver to the parent.

    parent   --commands-->  driver  --plans-->  follower
             <--outputs---          <--results--

All are Unix stream sockets in a folder that only this user may enter; between hosts they are TCP
(`TcpListener`). A connection begins with a secret of 32 bytes, compared in constant time, and the
rank that connects; one without the secret is closed. Frames (`front.frames`) have a size limit and
are data, never pickled.

A channel never blocks its owner unless asked to: what the socket does not take is kept, and both
`flush` and `receive` sleep in the kernel.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import select
import socket
import time
from collections import deque
from pathlib import Path

from hocket.serving.front.frames import HELLO, TOKEN_BYTES, FrameReader, hello, pack
from hocket.spec.errors import OptionError

MAX_FRAME = 1 << 26
"""Most bytes of a plan or a result."""

_CHUNK = 1 << 18
_BOTH = select.POLLIN | select.POLLOUT
_CONNECT = 30.0
"""Seconds until a connection to another host is given up."""
_PATIENCE = 5.0
"""Seconds that a stranger has to say who it is."""


class ChannelClosed(ConnectionError):
    """The other side is gone."""


class Channel:
    """One end of a connection, for whole frames both ways.

    Args:
        connection: a connected stream socket; the channel owns it.
        limit: most bytes of a payload that is received.
    """

    def __init__(self, connection: socket.socket, limit: int = MAX_FRAME) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._reader = FrameReader(limit)
        self._arrived: deque[bytes] = deque()
        self._unsent: deque[memoryview] = deque()
        self.unsent_bytes = 0
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)

    def fileno(self) -> int:
        return self._connection.fileno()

    # --- sending -----------------------------------------------------------------------------

    def send(self, payload: bytes) -> bool:
        """Send a frame, or keep what the socket does not take now; whether nothing is left.

        Raises:
            ChannelClosed: the other side is gone.
        """
        return self.write(pack(payload))

    def write(self, frame: bytes) -> bool:
        """As `send`, of bytes that are a frame already."""
        if not self._unsent:
            sent = self._put(frame)
            if sent == len(frame):
                return True
            frame = frame[sent:]
        self._unsent.append(memoryview(frame))
        self.unsent_bytes += len(frame)
        return False

    def push(self) -> bool:
        """Send more of what is left, without waiting; whether nothing is left."""
        while self._unsent:
            piece = self._unsent[0]
            sent = self._put(piece)
            self.unsent_bytes -= sent
            if sent < len(piece):
                self._unsent[0] = piece[sent:]
                return False
            self._unsent.popleft()
        return True

    def flush(self) -> None:
        """Wait until all is sent. Raises ChannelClosed."""
        while not self.push():
            poll = select.poll()
            poll.register(self._connection, select.POLLOUT)
            poll.poll()

    def _put(self, data: bytes | memoryview) -> int:
        try:
            return self._connection.send(data)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise ChannelClosed(f"the other side is gone: {error}") from None

    # --- receiving ---------------------------------------------------------------------------

    def receive(self) -> bytes:
        """The next payload; sleeps until it is there, and sends meanwhile what is left to send.

        Raises:
            ChannelClosed: the other side is gone.
            FrameTooLong: it announced more than it may send.
        """
        while not self._arrived:
            if self._read():
                continue
            self.push()
            self._poll.modify(self, _BOTH if self._unsent else select.POLLIN)
            self._poll.poll()
        return self._arrived.popleft()

    def take(self) -> list[bytes]:
        """The payloads that are there; does not wait. Raises as `receive`."""
        self._read()
        found = list(self._arrived)
        self._arrived.clear()
        return found

    def _read(self) -> bool:
        """Read what has arrived; whether anything had."""
        try:
            data = self._connection.recv(_CHUNK)
        except BlockingIOError:
            return False
        except OSError as error:
            raise ChannelClosed(f"the other side is gone: {error}") from None
        if not data:
            raise ChannelClosed("the other side has closed the connection")
        self._arrived.extend(self._reader.feed(data))
        return True

    def close(self) -> None:
        """Hang up. May be called twice."""
        self._connection.close()


class ChannelListener:
    """Where a driver waits for those who know the secret.

    Args:
        path: of the socket; its folder must be this user's alone.
        token: the secret.

    Raises:
        OptionError: the path is longer than a socket's may be.
    """

    path: Path | None

    def __init__(self, path: str | os.PathLike[str], token: bytes) -> None:
        assert len(token) == TOKEN_BYTES
        self.path, self.token = Path(path), token
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # Connected to as soon as it is seen: it gets its name when it listens already.
        aside = f"{self.path}~"
        try:
            self._socket.bind(aside)
            os.chmod(aside, 0o600)
            self._socket.listen(64)
            os.rename(aside, self.path)
        except OSError as error:
            self._socket.close()
            if "too long" in str(error):
                raise OptionError(
                    f"the path of a socket may have about 100 characters: {self.path}",
                    hint="TMPDIR=/tmp",
                ) from None
            raise

    def fileno(self) -> int:
        return self._socket.fileno()

    def accept(self, seconds: float, limit: int = MAX_FRAME) -> tuple[Channel, int] | None:
        """The next one who knows the secret, and the rank it says it is; None after `seconds`."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self._socket.settimeout(left)
            try:
                connection, _ = self._socket.accept()
            except TimeoutError:
                return None
            _prompt(connection)
            rank = self._known(connection)
            if rank is not None:
                return Channel(connection, limit), rank
            connection.close()
        return None

    def _known(self, connection: socket.socket) -> int | None:
        connection.settimeout(_PATIENCE)
        data = b""
        end = time.monotonic() + _PATIENCE
        try:
            while len(data) < HELLO.size and time.monotonic() < end:
                piece = connection.recv(HELLO.size - len(data))
                if not piece:
                    return None
                data += piece
        except OSError:
            return None
        if len(data) < HELLO.size:
            return None
        token, rank = HELLO.unpack(data)
        return int(rank) if hmac.compare_digest(token, self.token) else None

    def close(self) -> None:
        """Let nobody else in. May be called twice."""
        self._socket.close()
        if self.path is not None:
            with contextlib.suppress(OSError):
                self.path.unlink()


class TcpListener(ChannelListener):
    """A driver's listener for ranks and a front on other hosts.

    Args:
        host: the address of this host that the others reach; the kernel picks the port.
        token: the secret.

    Attributes:
        address: (host, port) to connect to.
    """

    def __init__(self, host: str, token: bytes) -> None:
        assert len(token) == TOKEN_BYTES
        self.path, self.token = None, token
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, 0), family=family, backlog=64)
        self.address: tuple[str, int] = self._socket.getsockname()[:2]


def connect(
    address: str | os.PathLike[str] | tuple[str, int], token: bytes, rank: int = 0
) -> Channel:
    """A channel to a listener: to the path of its socket, or to its host and port.

    Raises:
        ChannelClosed: no process listens there.
    """
    try:
        if isinstance(address, tuple):
            connection = socket.create_connection(address, timeout=_CONNECT)
            connection.settimeout(None)
            _prompt(connection)
        else:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                connection.connect(os.fspath(address))
            except OSError:
                connection.close()
                raise
    except OSError as error:
        raise ChannelClosed(f"no process listens at {address}: {error}") from None
    try:
        connection.sendall(hello(token, rank))
    except OSError as error:
        connection.close()
        raise ChannelClosed(f"no process listens at {address}: {error}") from None
    return Channel(connection)


def _prompt(connection: socket.socket) -> None:
    """Send small frames at once, and notice a host that is gone; Unix sockets need neither."""
    if connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
