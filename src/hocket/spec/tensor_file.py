"""A safetensors file, written in a stream and read with suspicion; standard library only.

The format is eight bytes of little-endian header length, a JSON header (name to dtype, shape and
byte offsets), then the bytes of the tensors. Reading and writing it here, on plain buffers, lets a
checkpoint be assembled one tensor at a time, checksummed as it goes, without torch, and bounds
what a malformed header can cost before it is parsed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import mmap
import os
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from hocket.spec.errors import CheckpointError

ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "U16": 2, "I16": 2, "F16": 2,
    "BF16": 2, "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip
"""Bytes of one element, by the format's name of its dtype."""

MOST_TENSORS = 1_000_000
_MOST_HEADER = 100_000_000
_METADATA = "__metadata__"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """One tensor of a file: its name, dtype (an `ITEM_BYTES` name) and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def write_tensors(
    path: Path,
    entries: Sequence[Entry],
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
    with path.open("wb") as file:
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
    """A safetensors file, mapped into memory: names to bytes. Use as a context manager.

    The buffers it gives are private copies-on-write of the file's pages; they stay valid as long
    as somebody holds them.

    Raises:
        CheckpointError: a header that is too long, malformed, or does not tile the file.
    """

    def __init__(self, path: str | os.PathLike[str], *, most_tensors: int = MOST_TENSORS) -> None:
        self.path = Path(path)
        self.entries: dict[str, Entry] = {}
        self.metadata: dict[str, str] = {}
        self._offsets: dict[str, tuple[int, int]] = {}
        try:
            with self.path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size < 8:
                    raise self._damaged(f"it has {size} bytes")
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {error.strerror}") from None
        (length,) = struct.unpack("<Q", self._map[:8])
        if length > min(size - 8, _MOST_HEADER, 4096 + 2048 * most_tensors):
            raise self._damaged(f"its header claims {length} bytes of {size}")
        self._start = 8 + length
        self._read_header(self._map[8 : self._start], size - self._start, most_tensors)

    def _damaged(self, why: str) -> CheckpointError:
        return CheckpointError(f"{self.path} is not a whole safetensors file: {why}")

    def _read_header(self, text: bytes, size: int, most_tensors: int) -> None:
        def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
            found = dict(pairs)
            if len(found) != len(pairs):
                raise ValueError("a name stands twice")
            return found

        try:
            header = json.loads(text, object_pairs_hook=once)
            if not isinstance(header, dict) or len(header) > most_tensors + 1:
                raise ValueError(f"{len(header)} tensors")
            self.metadata = header.pop(_METADATA, {})
            at = 0
            for name, row in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
                entry = Entry(
                    name=name, dtype=row["dtype"], shape=tuple(int(n) for n in row["shape"])
                )
                first, end = row["data_offsets"]
                if first != at or end - first != entry.num_bytes or min(entry.shape, default=0) < 0:
                    raise ValueError(f"{name!r} lies at {first}..{end}")
                self.entries[name] = entry
                self._offsets[name] = (first, end)
                at = end
            if at != size:
                raise ValueError(f"its tensors are {at} bytes, the file holds {size}")
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise self._damaged(str(error) or type(error).__name__) from None

    def buffer(self, name: str) -> memoryview:
        """The bytes of one tensor."""
        first, end = self._offsets[name]
        return memoryview(self._map)[self._start + first : self._start + end]

    def crc32(self, name: str) -> int:
        """The checksum of one tensor's bytes."""
        return zlib.crc32(self.buffer(name))

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with contextlib.suppress(BufferError):  # a held buffer keeps the map alive
            self._map.close()
