"""Frames: whole messages over a stream of bytes; the one form that parent and ranks speak in.

    | bytes of payload, u32 little-endian | payload |

A payload is JSON text between parent and driver, and a binary plan or result between ranks
(`scheduling.step`); never anything that could be executed. A length above the reader's limit ends
the connection before anything is allocated for it.
"""

from __future__ import annotations

import json
import struct
from typing import Any

Message = dict[str, Any]

TOKEN_BYTES = 32
"""Of the secret that opens a connection."""

MAX_COMMAND = 1 << 25
"""Most bytes of what the parent asks of a driver: a request with its prompt."""
MAX_EVENT = 1 << 28
"""Most bytes of what a driver tells: the outputs of one step, with log-probabilities."""

HELLO = struct.Struct(f"<{TOKEN_BYTES}sI")
"""What a connection begins with: the secret, and the rank that speaks."""
_LENGTH = struct.Struct("<I")
HEADER = _LENGTH.size


class FrameTooLong(ConnectionError):
    """The other side announced more bytes than it may send."""


def hello(token: bytes, rank: int = 0) -> bytes:
    """The first bytes of a connection; they are no frame."""
    assert len(token) == TOKEN_BYTES
    return HELLO.pack(token, rank)


def pack(payload: bytes) -> bytes:
    return _LENGTH.pack(len(payload)) + payload


def encode(message: Message) -> bytes:
    return pack(json.dumps(message, separators=(",", ":")).encode())


def decode_frame(payload: bytes) -> Message:
    """The message of a payload.

    Raises:
        ValueError: it is not a JSON object in UTF-8.
    """
    message = json.loads(payload)
    if not isinstance(message, dict):
        raise ValueError(f"a message must be an object, not {type(message).__name__}")
    return message


class FrameReader:
    """Payloads out of pieces of a stream.

    Args:
        limit: most bytes of one payload.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._buffer = bytearray()

    @property
    def inside(self) -> bool:
        """Whether a frame has begun and not ended."""
        return bool(self._buffer)

    def feed(self, data: bytes) -> list[bytes]:
        """The payloads that are whole now that `data` has come.

        Raises:
            FrameTooLong: a payload longer than the limit is announced.
        """
        buffer = self._buffer
        buffer += data
        found: list[bytes] = []
        at = 0
        while len(buffer) - at >= HEADER:
            (size,) = _LENGTH.unpack_from(buffer, at)
            if size > self.limit:
                raise FrameTooLong(f"a frame of {size} bytes; at most {self.limit} are read")
            if len(buffer) - at - HEADER < size:
                break
            at += HEADER
            found.append(bytes(buffer[at : at + size]))
            at += size
        del buffer[:at]
        return found
