"""Frames between ranks: columns of little-endian numbers, read within bounds and never executed.

A reader knows every length before it makes anything, and refuses a buffer that ends early or late.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterable
from typing import Any

VERSION = 1
"""Of all frames; both ends run the same release."""

_LITTLE = sys.byteorder == "little"
assert array("i").itemsize == 4

Buffer = bytes | bytearray | memoryview


class FrameError(Exception):
    """A frame between ranks that is not what its sender's encoder makes: a fault of ours."""


def packed_numbers(numbers: Iterable[int] | Iterable[float]) -> bytes:
    """int32 of ints, float64 of floats; empty of nothing."""
    numbers = list(numbers)
    if not numbers:
        return b""
    made = array("d" if type(numbers[0]) is float else "i", numbers)  # type: ignore[arg-type,type-var]
    if not _LITTLE:
        made.byteswap()
    return made.tobytes()


class Reader:
    """A buffer read from its beginning.

    Args:
        buffer: the frame.
        what: its name in errors.
        form: its head, which begins with four bytes and the version.
        magic: the four bytes.

    Raises:
        FrameError: here and in every method.
    """

    def __init__(self, buffer: Buffer, what: str, form: struct.Struct, magic: bytes) -> None:
        self._view = memoryview(buffer).cast("B")
        self._at = 0
        self._what = what
        found, version, *rest = self.unpack(form)
        self.check(found == magic, f"it begins with {found!r}")
        self.check(version == VERSION, f"its version is {version}, not {VERSION}")
        self.head: list[int] = rest

    def check(self, good: bool, why: str) -> None:
        if not good:
            raise FrameError(f"the {self._what} is malformed: {why}")

    def take(self, count: int) -> memoryview:
        left = len(self._view) - self._at
        self.check(count <= left, f"{count} bytes are announced where {left} are left")
        self._at += count
        return self._view[self._at - count : self._at]

    def unpack(self, form: struct.Struct) -> tuple[Any, ...]:
        return form.unpack(self.take(form.size))

    def ints(self, count: int) -> list[int]:
        found: list[int] = self._numbers("i", count).tolist()
        return found

    def floats(self, count: int) -> list[float]:
        found: list[float] = self._numbers("d", count).tolist()
        return found

    def _numbers(self, code: Any, count: int) -> array[Any]:
        made: array[Any] = array(code)
        made.frombytes(self.take(count * made.itemsize))
        if not _LITTLE:
            made.byteswap()
        return made

    def text(self, length: int) -> str:
        try:
            return bytes(self.take(length)).decode()
        except UnicodeDecodeError:
            raise FrameError(f"the {self._what} is malformed: a text is not UTF-8") from None

    def end(self) -> None:
        left = len(self._view) - self._at
        self.check(left == 0, f"{left} bytes follow its end")
