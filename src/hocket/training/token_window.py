"""Token window: text of any size, tokenized while a run consumes it, of which little is on disk.

    stream     held out | documents, one after the other ...      | those again, from the first
    windows               0        | 1        | 2        | ...    N samples of S tokens in each
    on disk                          j - 1      j  j + 1  j + 2   at most: a rank is in window j

Global index i is a sample of window i div N, and its place there is a function of the seed and i:
so any rank of any layout finds it, and a resume on other data ranks repeats and skips none. A rank
that comes to a window asks for it by an empty file and waits for its tokens; one process of the run
makes it, and the next one ahead of time. `windows.json` has of each window where it begins in the
stream and its checksum: one that a restart needs again is made again, and is the same, or the run
ends. Never imports torch.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hocket.spec.errors import DataError, HocketError
from hocket.spec.files import (
    MALFORMED,
    file_crc32,
    json_crc32,
    named,
    parse_json,
    read_text,
    write_text,
)
from hocket.spec.run import CHECKSUM
from hocket.training.data_sources import DocumentPlace
from hocket.training.token_files import encoded_documents
from hocket.training.tokenizer import Tokenizer

MARKS = "windows.json"
BEFORE, AFTER = 1, 2
"""Windows that stay on disk before and after the one that a rank is in."""
PARTS = BEFORE + 1 + AFTER
"""Windows on disk at most."""
_WANTED, _FAILED = ".wanted-", ".window-failed"
_PIECE = 1 << 20
"""Tokens that are written at once."""

Ids = npt.NDArray[Any]


class Ended(Exception):
    """The run is over, and the window that is being made is needed no more."""


@dataclasses.dataclass(frozen=True)
class Mark:
    """Where a window begins: tokens of a document of the stream (counted from 0, those that are
    held out included); once it was made, its checksum; and a document at or before it, with its
    source, its number there and its byte, from where reading begins."""

    document: int
    offset: int
    crc32: int | None = None
    near: int = 0
    place: Sequence[int] = (0, 0, 0)


def window_file(folder: Path, window: int) -> Path:
    return folder / f"window-{window:06d}.bin"


def window_samples(size: int, itemsize: int, seq_len: int) -> int:
    """Samples of one window, so that `PARTS` of them take `size` bytes at most."""
    return max(0, (size // PARTS // itemsize - 1) // seq_len)


class TokenStream:
    """Tokens of documents one after the other, without end: behind the last one the first follows.

    Args:
        texts: begins to read the documents, with the place of each, at a place. held: the first of
            them, which are left out.

    Attributes:
        document, offset: of the next token. passes: over all documents that have ended.
    """

    def __init__(
        self,
        texts: Callable[[DocumentPlace], Iterator[tuple[str, DocumentPlace]]],
        tokenizer: Tokenizer,
        held: int = 0,
    ) -> None:
        self._texts, self._tokenizer, self._held = texts, tokenizer, held
        self.passes = 0
        self.seek(Mark(held, 0))

    @property
    def mark(self) -> Mark:
        """Of the next token."""
        return Mark(self.document, self.offset, None, self._near, dataclasses.astuple(self._place))

    def seek(self, mark: Mark) -> None:
        """Go to a token of a document; those before it are read only where they follow the place
        of the mark, and not tokenized."""
        self.document, self.offset = mark.document, mark.offset
        self._near, self._place = mark.near, DocumentPlace(*mark.place)
        ahead: collections.deque[DocumentPlace] = collections.deque()

        def texts() -> Iterator[str]:
            read = self._texts(DocumentPlace(*mark.place))
            for text, place in itertools.islice(read, mark.document - mark.near, None):
                ahead.append(place)
                yield text

        self._documents = zip(
            encoded_documents(texts(), self._tokenizer), iter(ahead.popleft, None), strict=False
        )
        self._ids: Ids | None = None
        self._nothing = mark.document <= self._held and not mark.offset

    def take(self, most: int) -> Ids:
        """The next tokens, of one document: at least one, at most so many. Raises DataError where
        there is none in all of the documents."""
        while True:
            if self._ids is None:
                following = next(self._documents, None)
                if following is None:
                    if self._nothing:
                        raise DataError(
                            "the data holds no text behind what is held out of it",
                            hint="more data, or a smaller --eval-fraction",
                        )
                    self.passes += 1
                    self.seek(Mark(self._held, 0))
                    continue
                self._ids, self._place = following
                self._near = self.document
            ids = self._ids[self.offset : self.offset + most]
            self.offset += ids.size
            if self.offset >= self._ids.size:
                self.document, self.offset, self._ids = self.document + 1, 0, None
            if ids.size:
                self._nothing = False
                return ids


def hold_out(stream: TokenStream, path: Path, least: int, dtype: np.dtype[Any]) -> tuple[int, int]:
    """Write the first documents of a stream that together have `least` tokens; (tokens, documents).

    Raises:
        DataError: all of the documents have fewer.
    """
    tokens = 0
    with named(path), path.open("wb") as file:
        while tokens < least or (stream.offset and least):
            ids = stream.take(_PIECE)
            file.write(ids.astype(dtype).tobytes())
            tokens += ids.size
            if stream.passes:
                raise DataError(
                    f"the data holds fewer tokens than the {least:,} that are held out of it",
                    hint="more data, a smaller --eval-fraction, or leave --token-window out",
                )
    return tokens, stream.document


class WindowMaker:
    """Makes the windows of one data folder, and deletes them.

    Args:
        stream: of the documents that are not held out, at its beginning.
        samples: of each window. first, last: windows in which the run continues, and ends.
        ended: asked while a window is made; then it raises Ended.
    """

    def __init__(
        self,
        folder: Path,
        stream: TokenStream,
        *,
        samples: int,
        seq_len: int,
        dtype: str,
        first: int,
        last: int,
        ended: Callable[[], bool] = lambda: False,
    ) -> None:
        self._folder, self._stream = folder, stream
        self._tokens, self._dtype = samples * seq_len, np.dtype(dtype)
        self._last, self._ended = last, ended
        self._current = first
        self._next: int | None = None
        """The window whose first token is `_head`, and whose others the stream is at."""
        self._head = np.zeros(0, self._dtype)
        self.marks = _marks(folder) or {0: stream.mark}

    def clean(self) -> None:
        """Delete what an earlier process left: requests, half-made windows, and those that are not
        as they were written. Before the ranks start."""
        self.tidy()
        for path in self._there().values():
            mark = self.marks.get(int(path.stem.partition("-")[2]))
            whole = path.stat().st_size == (self._tokens + 1) * self._dtype.itemsize
            if mark is None or not whole or file_crc32(path) != mark.crc32:
                path.unlink()

    def tidy(self) -> None:
        """Delete requests, half-made windows and the error. While no rank runs."""
        for pattern in (f"{_WANTED}*", f"{_FAILED}*", ".window-*"):
            for path in self._folder.glob(pattern):
                path.unlink(missing_ok=True)

    def serve(self) -> bool:
        """Make a window that a rank has asked for, else the next one; False where there is nothing
        to do now."""
        wanted = sorted(int(p.name[len(_WANTED) :]) for p in self._folder.glob(f"{_WANTED}*"))
        if wanted:
            self._current = wanted[0]
            self.make(self._current)
            (self._folder / f"{_WANTED}{self._current}").unlink(missing_ok=True)
            return True
        for ahead in range(self._current, min(self._current + 1, self._last) + 1):
            if not window_file(self._folder, ahead).exists():
                self.make(ahead)
                return True
        return False

    def fail(self, error: HocketError) -> None:
        """Have the ranks raise this error where they wait for a window."""
        body = {"message": error.message, "hint": error.hint}
        write_text(self._folder / _FAILED, json.dumps(body))

    def make(self, window: int) -> None:
        """Write a window, unless it is there. Others that are far from the current one go first.

        Raises:
            DataError: the documents cannot be read, or are not what they were.
            Ended: it is needed no more.
        """
        path = window_file(self._folder, window)
        first, last = self._current - BEFORE, self._current + AFTER
        for number, there in self._there().items():
            if not first <= number <= last:
                there.unlink(missing_ok=True)
        if path.exists():
            return
        start = max(number for number in self.marks if number <= window)
        if self._next is None or not start <= self._next <= window:
            self._stream.seek(self.marks[start])
            self._head = self._stream.take(1).astype(self._dtype)
            self._next = start
        while self._next < window:  # where a window between has no mark, as none was made yet
            self._write(None, self._next)
        aside = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            self._write(aside, window)
            os.replace(aside, path)
        finally:
            aside.unlink(missing_ok=True)

    def _write(self, aside: Path | None, window: int) -> None:
        """Take a window of the stream, which is behind its first token, and note the next one."""
        crc32, left = zlib.crc32(self._head.tobytes()), self._tokens - 1
        with named(aside or self._folder), open(aside or os.devnull, "wb") as file:
            file.write(self._head.tobytes())
            while left:
                if self._ended():
                    self._next = None
                    raise Ended
                ids = self._stream.take(min(left, _PIECE)).astype(self._dtype)
                crc32 = zlib.crc32(ids.tobytes(), crc32)
                file.write(ids.tobytes())
                left -= ids.size
            following = self._stream.mark
            self._head = self._stream.take(1).astype(self._dtype)
            crc32 = zlib.crc32(self._head.tobytes(), crc32)
            file.write(self._head.tobytes())
        mark = self.marks[window]
        if mark.crc32 not in (None, crc32):
            raise DataError(
                f"window {window} of the streamed tokens is not what it was: its documents have "
                "changed since the run began",
                hint="the data as it was, or a new run from the data: another --run",
            )
        self._next = window + 1
        self.marks[window] = dataclasses.replace(mark, crc32=crc32)
        self.marks.setdefault(window + 1, following)
        body: dict[str, Any] = {
            str(number): dataclasses.asdict(each) for number, each in self.marks.items()
        }
        text = json.dumps({**body, CHECKSUM: json_crc32(body)})
        write_text(self._folder / MARKS, text)

    def _there(self) -> dict[int, Path]:
        return {
            int(path.stem.partition("-")[2]): path
            for path in sorted(self._folder.glob("window-*.bin"))
        }


def _marks(folder: Path) -> dict[int, Mark]:
    """What `windows.json` has; empty where it cannot be read, so that all is made again."""
    try:
        body = parse_json(read_text(folder / MARKS))
        if body.pop(CHECKSUM) != json_crc32(body):
            return {}
        found = {int(number): Mark(**mark) for number, mark in body.items()}
    except (OSError, *MALFORMED):
        return {}
    return found if 0 in found and all(map(_possible, found.values())) else {}


def _possible(mark: Mark) -> bool:
    """Whether the numbers of a mark can be those of a place."""
    place = mark.place if isinstance(mark.place, list) else []
    counts = [mark.document, mark.offset, mark.near, *place]
    return (
        len(place) == 3
        and all(type(count) is int and 0 <= count < 1 << 62 for count in counts)
        and mark.near <= mark.document
        and type(mark.crc32) in (int, type(None))
    )


def ask(folder: Path, window: int) -> None:
    """Ask for a window, on behalf of a rank."""
    (folder / f"{_WANTED}{window}").touch()


def failure_of(folder: Path) -> DataError | None:
    """Why no window is made any more, if so."""
    try:
        body = parse_json((folder / _FAILED).read_text())
    except OSError:
        return None
    return DataError(body["message"], hint=body["hint"])
