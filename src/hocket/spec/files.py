"""Files: a disk's errors with the file's name, checksums, and reading what others have written."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def named(path: str | os.PathLike[str]) -> Iterator[None]:
    """Within, a full disk is reported with `path`: writing into an open file names none by itself.

    Raises:
        OSError: as within, with its `filename`.
    """
    try:
        yield
    except OSError as error:
        if error.errno in _FULL and error.filename is None:
            error.filename = os.fspath(path)
        raise


LOCK = ".lock"
"""Name of the file of a run folder that names its one writer (`jobs.lock`)."""

MALFORMED = (ValueError, TypeError, AttributeError, LookupError, OverflowError)
"""What reading a JSON file of another shape than expected can raise."""

MOST_TEXT = 64_000_000
"""Largest JSON or text file that is read at once, in bytes."""

_AT_ONCE = 4 << 20
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def read_text(path: Path, *, most_bytes: int = MOST_TEXT) -> str:
    """A regular file as text.

    Raises:
        OSError: it is not there, or cannot be read.
        ValueError: it is a pipe or a device, larger than `most_bytes`, or not UTF-8.
    """
    status = os.stat(path)
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    if not stat.S_ISREG(status.st_mode):  # opening a pipe would wait for a writer
        raise ValueError("it is not a regular file")
    if status.st_size > most_bytes:
        raise ValueError(f"it has {status.st_size:,} bytes; at most {most_bytes:,} are read")
    return path.read_text(encoding="utf-8")


def write_text(path: Path, text: str) -> None:
    """Write aside, then rename: a reader sees the old file or the new one, never half. Nothing
    stays of what a full disk cut short."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with named(path):
            aside.write_text(text)
        os.replace(aside, path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise


def parse_json(
    text: str | bytes | bytearray, object_hook: Callable[[dict[str, Any]], Any] | None = None
) -> Any:
    """A JSON value; `object_hook` as in `json.loads`.

    Raises:
        ValueError: it is not JSON, is nested too deeply, or holds half of a surrogate pair, which
            no file name, terminal or page can show.
    """
    try:
        found = json.loads(text, object_hook=object_hook)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if _SURROGATE.search(text if isinstance(text, str) else bytes(text).decode()):
        json.dumps(found, ensure_ascii=False).encode()
    return found


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; an empty one where it is not there, is damaged, or is another
    value."""
    try:
        found = parse_json(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def json_crc32(body: Any) -> int:
    """The checksum of a JSON value, however it is laid out as text."""
    return zlib.crc32(json.dumps(body, separators=(",", ":"), sort_keys=True).encode())


def file_crc32(path: Path) -> int:
    """The checksum of a file's bytes, of which few are held at a time.

    3.0 GB/s on one core of an AMD EPYC, so that the disk is slower.
    """
    found, piece = 0, bytearray(_AT_ONCE)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(piece):
            found = zlib.crc32(memoryview(piece)[:count], found)
    return found
