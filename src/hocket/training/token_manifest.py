"""Tokens: the manifest of a run's token files, each number of it checked, each file by checksum.

    data/tokens.json   counts, dtype, packing;  files: name -> bytes, crc32;  its own crc32

A run folder may come from someone else, or from a copy that was cut short: nothing is read from a
token file before its size is what the manifest says. Never imports torch.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from hocket.spec.errors import DataError, HocketError
from hocket.spec.files import MALFORMED, file_crc32, json_crc32, parse_json, read_text, write_text
from hocket.spec.rows import require_types
from hocket.spec.run import CHECKSUM
from hocket.training.mixture import LONGEST, MixedSource
from hocket.training.packed_files import flags_file
from hocket.training.packing import ACROSS, DOCUMENTS, PACKINGS

TRAIN, VALID, MANIFEST = "tokens.bin", "valid.bin", "tokens.json"
VERSION = 1
DTYPES = ("uint16", "uint32")
_LARGEST = 2**62


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tokens:
    """The manifest of a run's tokens: `tokens.json`.

    Attributes:
        train_tokens, valid_tokens: tokens in the two files, end tokens included.
        train_documents, valid_documents: documents in each (a document cut at the end of the
            training part counts in both).
        dtype: `uint16` or `uint32`.
        tokenizer: hash of the tokenizer.
        vocab_size: of the tokenizer.
        largest: the largest token id.
        eos_id: the token after each document, or None.
        key: hash of everything that the tokens depend on; equal keys, equal files.
        sources: path, kind and bytes of each file read.
        eval_sources: as `sources`, of the files that are held out; empty: a fraction of them is.
        held: what each of all of them holds: `text`, `chat` or `completion`.
        packing: `across`, `documents` or `none`.
        flags: whether a file of flags exists.
        train_rows, valid_rows: rows of the files; 0 where documents follow each other.
        learned_tokens: training tokens that loss falls on; None: all.
        truncated_documents, truncated_tokens: cut at the length of a row, and what was cut off.
        unlearned_documents: left out, since nothing of them is learned.
        corrupt_records: skipped, since they cannot be read. corrupt: of the first of them, file,
            line and reason.
        mixture: the sources that are drawn from by weight, in the order of the training file; empty
            where it is one.
        partial: the sources were streamed, and read as far as the run's steps take them.
        window: samples of each window, where only some of the training tokens are on disk at a time
            (`token_window`); 0: all are in one file.
        files: of every other file of the folder, its bytes and their crc32. None: written by a
            version that did not list them.
    """

    train_tokens: int
    valid_tokens: int
    train_documents: int
    valid_documents: int
    dtype: str
    tokenizer: str
    vocab_size: int
    largest: int
    eos_id: int | None
    key: str
    sources: tuple[tuple[str, str, int], ...]
    eval_sources: tuple[tuple[str, str, int], ...] = ()
    held: tuple[str, ...] = ()
    packing: str = ACROSS
    flags: bool = False
    train_rows: int = 0
    valid_rows: int = 0
    learned_tokens: int | None = None
    truncated_documents: int = 0
    truncated_tokens: int = 0
    unlearned_documents: int = 0
    corrupt_records: int = 0
    corrupt: tuple[str, ...] = ()
    mixture: tuple[MixedSource, ...] = ()
    partial: bool = False
    window: int = 0
    version: int = VERSION
    files: Mapping[str, tuple[int, int]] | None = None

    def said(self, seq_len: int) -> str:
        """What the data came to, in one line for a person."""
        text = f"{self.train_tokens:,} tokens to train on, {self.valid_tokens:,} held out"
        if self.learned_tokens is not None and self.flags:
            share = self.learned_tokens / max(1, self.train_tokens)
            text += f"; loss falls on {share:.0%} of them"
        if self.train_rows:
            full = self.train_tokens / (self.train_rows * seq_len)
            kind = "several documents each" if self.packing == DOCUMENTS else "one document each"
            text += f"; rows ({kind}): {self.train_rows:,}, {full:.0%} full"
        if self.truncated_documents:
            text += (
                f"; documents cut at {seq_len} tokens: {self.truncated_documents:,}, which lost "
                f"{self.truncated_tokens:,} tokens"
            )
        if self.unlearned_documents:
            text += f"; {self.unlearned_documents:,} left out: nothing of them is learned"
        if self.window:
            text += f"; {self.window * seq_len:,} tokens in each window of the stream"
        if self.partial:
            text += "; of the streamed data as much as the steps take"
        if self.corrupt_records:
            text += f"; {self.corrupt_records:,} corrupt records skipped"
        return text

    @classmethod
    def load(cls, folder: Path) -> Tokens:
        """Read the manifest of a data folder, and check every value of it.

        Raises:
            DataError: it is missing, holds a value that cannot be, or was changed.
        """
        file = folder / MANIFEST
        try:
            data = parse_json(read_text(file))
            crc32 = data.pop(CHECKSUM, None)
            if crc32 is not None and crc32 != json_crc32(data):
                raise _changed(file, "its checksum differs")
            for name in ("sources", "eval_sources"):
                rows = data["sources"] if name == "sources" else data.get(name, ())
                data[name] = tuple((str(a), str(b), int(c)) for a, b, c in rows)
            data["held"] = tuple(map(str, data.get("held", ())))
            data["corrupt"] = tuple(map(str, data.get("corrupt", ())))
            data["mixture"] = tuple(_mixed(row) for row in data.get("mixture", ()))
            if data.get("files") is not None:
                data["files"] = {name: _record(name, row) for name, row in data["files"].items()}
            require_types(cls, data)
            found = cls(**data)
            found._check()
        except DataError:
            raise
        except OSError as error:
            raise DataError(
                f"{folder} holds no complete token files: {file} cannot be read ({error.strerror})"
            ) from None
        except (*MALFORMED, HocketError) as error:
            raise DataError(f"{file} is not a manifest of token files: {error}") from None
        return found

    def _check(self) -> None:
        """Raise ValueError for a value that no manifest has."""
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}; it is {' or '.join(DTYPES)}")
        if self.packing not in PACKINGS:
            raise ValueError(f"packing is {self.packing!r}; it is one of {', '.join(PACKINGS)}")
        if self.version != VERSION:
            raise ValueError(f"version is {self.version}; this hocket reads {VERSION}")
        for name in (
            "train_tokens", "valid_tokens", "train_documents", "valid_documents", "train_rows",
            "valid_rows", "learned_tokens", "truncated_documents", "truncated_tokens",
            "unlearned_documents", "corrupt_records", "window",
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and not 0 <= value <= _LARGEST:
                raise ValueError(f"{name} is {value}; it is a count")
        most = int(np.iinfo(self.dtype).max)
        for name in ("largest", "eos_id"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= most:
                raise ValueError(f"{name} is {value}; ids of {self.dtype} are 0 .. {most}")
        if not 1 <= self.vocab_size <= 2**32:
            raise ValueError(f"vocab_size is {self.vocab_size}; it is at least 1")
        if (self.packing == ACROSS) == bool(self.train_rows):
            raise ValueError(f"train_rows is {self.train_rows} with packing {self.packing!r}")
        if self.mixture:
            for name, total in (("tokens", self.train_tokens), ("rows", self.train_rows)):
                parts = sum(getattr(one, name) for one in self.mixture)
                if parts != total:
                    raise ValueError(f"the sources of the mixture have {parts} {name}, not {total}")
        if self.window and (
            self.packing != ACROSS or self.flags or self.mixture or self.train_documents
        ):
            raise ValueError(
                f"window is {self.window} with flags, rows, a mixture or counted documents"
            )
        if self.packing != ACROSS and not self.flags:
            raise ValueError(f"packing is {self.packing!r}, and there are no flags")

    def save(self, folder: Path) -> Tokens:
        """Write the manifest, with every other file of the folder by size and checksum."""
        files = {
            path.name: (path.stat().st_size, file_crc32(path))
            for path in sorted(folder.iterdir())
            if path.is_file() and path.name != MANIFEST and not path.name.startswith(".")
        }
        found = dataclasses.replace(self, files=files)
        body = parse_json(json.dumps(dataclasses.asdict(found)))
        text = json.dumps({**body, CHECKSUM: json_crc32(body)}, indent=1)
        write_text(folder / MANIFEST, text)
        return found

    def sizes(self, seq_len: int) -> dict[str, int]:
        """Bytes that each token file and its flags must have."""
        found, item = {}, np.dtype(self.dtype).itemsize
        for name, tokens, rows in (
            (TRAIN, self.train_tokens, self.train_rows),
            (VALID, self.valid_tokens, self.valid_rows),
        ):
            count = tokens if self.packing == ACROSS else rows * seq_len
            found[name] = count * item
            if name == TRAIN and self.window:
                del found[name]
            if self.flags:
                found[flags_file(Path(name)).name] = count
        return found

    def require_sizes(self, folder: Path, seq_len: int) -> None:
        """Refuse token files that are missing, cut short or grown. Raises DataError."""
        if self.window and (folder / TRAIN).exists():  # a rank would wait for a window that no
            # process makes: the run has none
            raise _changed(folder / MANIFEST, f"it has windows of a stream, and {TRAIN} is there")
        for name, size in self.sizes(seq_len).items():
            _require_size(folder / name, size)


def verify_tokens(folder: Path, seq_len: int, *, adopt: bool = True) -> str | None:
    """Read every file of a data folder once and compare it with the manifest.

    3.0 GB/s on one core: 10 GB of tokens take 3.4 s where the disk is as fast.

    Args:
        adopt: list the files of a folder whose manifest does not, as they are now.

    Returns:
        A note, if the files could not be verified.

    Raises:
        DataError: the manifest or a file is not as hocket wrote it.
    """
    tokens = Tokens.load(folder)
    tokens.require_sizes(folder, seq_len)
    if tokens.files is None:
        for name in (TRAIN, VALID):
            path = folder / name
            ids = np.memmap(path, tokens.dtype, "r") if path.stat().st_size else np.zeros(1)
            if int(ids.max()) > tokens.largest:
                raise _changed(path, f"it holds token id {ids.max()}, above {tokens.largest}")
        if adopt:
            tokens.save(folder)
        return (
            f"{folder} was written by a version without checksums: its files are used as they are"
            + (f", and are listed in {MANIFEST} from now on" if adopt else "")
        )
    for name in sorted(tokens.sizes(seq_len).keys() - tokens.files.keys()):
        raise _changed(folder / MANIFEST, f"it lists no {name}")
    for name, (size, crc32) in tokens.files.items():
        _require_size(folder / name, size)
        if file_crc32(folder / name) != crc32:
            raise _changed(folder / name, "its checksum differs")
    return None


def _require_size(path: Path, size: int) -> None:
    if not path.is_file():
        raise _changed(path, "it is not there")
    found = path.stat().st_size
    if found != size:
        raise _changed(path, f"it has {found:,} bytes, not {size:,}")


def _changed(path: Path, why: str) -> DataError:
    return DataError(
        f"{path} is not as hocket wrote it: {why}",
        hint=f"a copy of {path.parent} as it was, or a new run from the data: another --run",
    )


def _mixed(row: dict[str, object]) -> MixedSource:
    """One source of a mixture. Raises TypeError, ValueError."""
    found = MixedSource(**row)  # type: ignore[arg-type]
    require_types(MixedSource, dataclasses.asdict(found))
    if not 1 <= found.slots <= LONGEST or min(found.tokens, found.rows) < 0:
        raise ValueError(f"mixture holds {row!r:.80}, which cannot be")
    return found


def _record(name: str, row: object) -> tuple[int, int]:
    """Bytes and checksum of one listed file. Raises ValueError."""
    if not name or name.startswith(".") or Path(name).name != name:
        raise ValueError(f"{name!r} is not the name of a file of its folder")
    if (
        not isinstance(row, list | tuple)
        or len(row) != 2
        or not all(type(number) is int and 0 <= number <= _LARGEST for number in row)
    ):
        raise ValueError(f"{name!r} has {row!r:.60}, not bytes and crc32")
    return row[0], row[1]
