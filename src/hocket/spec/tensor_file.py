"""A safetensors file, written in a stream and read with suspicion; standard library only.

The format is eight bytes of little-endian header length, a JSON header (name to dtype, shape and
byte offsets), then the bytes of the tensors. Reading and writing it here, on plain buffers, lets a
checkpoint be assembled one tensor at a time, checksummed as it goes, without torch, and bounds
what a malformed header can cost before it is parsed.

Bytes are read where they are asked for and never mapped: a mapped file is read in pages around
what is touched, stays in the process's memory, and ends the process if somebody cuts it short.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import stat
import struct
import weakref
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from hocket.spec.errors import CheckpointError
from hocket.spec.files import named

ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "U16": 2, "I16": 2,
    "F16": 2, "BF16": 2, "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip
"""Bytes of one element, by the format's name of its dtype."""

MOST_TENSORS = 1_000_000
_MOST_HEADER = 100_000_000
_METADATA = "__metadata__"
_AT_ONCE = 4 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """One tensor of a file: its name, dtype (an `ITEM_BYTES` name) and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def write_tensors(
    path: Path,
    entries: Sequence[TensorEntry],
    buffers: Iterable[Any],
    metadata: Mapping[str, str] | None = None,
) -> list[int]:
    """Write a file and flush it to the disk; returns the crc32 of each tensor's bytes.

    `buffers` yields one contiguous buffer per entry, in order; only one is held at a time.
    """
    header: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
    at = 0
    for entry in entries:
        assert entry.name not in header, entry.name
        end = at + entry.num_bytes
        header[entry.name] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": [at, end],
        }
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    sums = []
    with named(path), path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for entry, buffer in zip(entries, buffers, strict=True):
            view = memoryview(buffer).cast("B")
            assert len(view) == entry.num_bytes, (entry, len(view))
            file.write(view)
            sums.append(zlib.crc32(view))
        file.flush()
        os.fsync(file.fileno())
    return sums


class TensorFile:
    """A safetensors file, open: names to bytes. Use as a context manager, or let it go.

    Attributes:
        entries: by name, in the order of their bytes.
        metadata: the header's own texts.
        bytes_read: bytes taken from the file so far, its header among them.

    Raises:
        CheckpointError: a header that is too long, malformed, or does not tile the file.
    """

    def __init__(self, path: str | os.PathLike[str], *, most_tensors: int = MOST_TENSORS) -> None:
        self.path = Path(path)
        self.entries: dict[str, TensorEntry] = {}
        self.metadata: dict[str, str] = {}
        self.bytes_read = 0
        self._offsets: dict[str, int] = {}
        try:
            if not stat.S_ISREG(os.stat(self.path).st_mode):  # opening a pipe would wait for ever
                raise self._damaged("it is not a regular file")
            self._handle = os.open(self.path, os.O_RDONLY)
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {error.strerror}") from None
        except ValueError as error:  # a name that no file can have
            raise CheckpointError(f"{str(self.path)!r} cannot be read: {error}") from None
        self._close = weakref.finalize(self, os.close, self._handle)
        size = os.fstat(self._handle).st_size
        if size < 8:
            raise self._damaged(f"it has {size} bytes")
        (length,) = struct.unpack("<Q", self._read(0, 8))
        if length > min(size - 8, _MOST_HEADER, 4096 + 2048 * most_tensors):
            raise self._damaged(f"its header claims {length} bytes of {size}")
        self._start = 8 + length
        self._read_header(self._read(8, length), size - self._start, most_tensors)

    def _damaged(self, why: str) -> CheckpointError:
        return CheckpointError(f"{self.path} is not a whole safetensors file: {why}")

    def _read_header(self, text: bytearray, size: int, most_tensors: int) -> None:
        def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
            found = dict(pairs)
            if len(found) != len(pairs):
                raise ValueError("a name occurs twice")
            return found

        # Before it is parsed: a million rows take half a minute.
        count = text.count(b'"data_offsets"')
        if count > most_tensors:
            raise self._damaged(f"it holds {count} tensors, more than {most_tensors}")
        try:
            header = json.loads(text, object_pairs_hook=once)
            if not isinstance(header, dict) or len(header) > most_tensors + 1:
                raise ValueError(f"it holds {len(header)} tensors")
            self.metadata = header.pop(_METADATA, {})
            if not isinstance(self.metadata, dict):
                raise ValueError("its metadata is not a table of texts")
            at = 0
            for name, row in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
                first, end = row["data_offsets"]
                if not all(type(n) is int and n >= 0 for n in (*row["shape"], first, end)):
                    raise ValueError(f"{name!r} has a size that is not an integer")
                if row["dtype"] not in ITEM_BYTES:
                    raise ValueError(f"{name!r} has the unknown dtype {row['dtype']!r}")
                entry = TensorEntry(name=name, dtype=row["dtype"], shape=tuple(row["shape"]))
                if first != at or end - first != entry.num_bytes:
                    raise ValueError(f"{name!r} is at {first}..{end}")
                self.entries[name] = entry
                self._offsets[name] = first
                at = end
            if at != size:
                raise ValueError(f"its tensors are {at} bytes, the file holds {size}")
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise self._damaged(str(error)[:300] or type(error).__name__) from None

    def read_into(self, name: str, first: int, view: memoryview) -> None:
        """Fill `view` (writable, of bytes) with the tensor's bytes from `first` on.

        Raises:
            CheckpointError: the file has become shorter, or the disk does not answer.
        """
        last = first + len(view)
        assert 0 <= first <= last <= self.entries[name].num_bytes, (name, first, last)
        self._fill(self._start + self._offsets[name] + first, view)

    def buffer(self, name: str) -> bytearray:
        """The bytes of one tensor, as the caller's own."""
        return self._read(self._start + self._offsets[name], self.entries[name].num_bytes)

    def crc32(self, name: str) -> int:
        """The checksum of one tensor's bytes, of which few are held at a time."""
        left, at = self.entries[name].num_bytes, self._start + self._offsets[name]
        piece = memoryview(bytearray(min(left, _AT_ONCE)))
        found = 0
        while left:
            part = piece[: min(left, _AT_ONCE)]
            self._fill(at, part)
            found = zlib.crc32(part, found)
            at, left = at + len(part), left - len(part)
        return found

    def version(self) -> list[int]:
        """What changes with the file: its device, number, size, and times in nanoseconds."""
        now = os.fstat(self._handle)
        return [now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns, now.st_ctime_ns]

    def _read(self, at: int, count: int) -> bytearray:
        found = bytearray(count)
        self._fill(at, memoryview(found))
        return found

    def _fill(self, at: int, view: memoryview) -> None:
        while len(view):
            try:
                got = os.preadv(self._handle, [view], at)
            except OSError as error:
                raise CheckpointError(f"{self.path} cannot be read: {error.strerror}") from None
            if not got:
                raise self._damaged(f"it ends before byte {at}")
            self.bytes_read += got
            view, at = view[got:], at + got

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let the file go; what was read stays."""
        self._close()
