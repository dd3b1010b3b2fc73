"""File contents: the encoding or format of data that is not UTF-8 text, and what converts it."""

from __future__ import annotations

import codecs
import shlex
from pathlib import Path

from hocket.spec.errors import DataError

_ENCODINGS = (
    (codecs.BOM_UTF32_LE, "UTF-32"), (codecs.BOM_UTF32_BE, "UTF-32"),
    (codecs.BOM_UTF16_LE, "UTF-16"), (codecs.BOM_UTF16_BE, "UTF-16"),
)  # fmt: skip
_FORMATS = (
    (b"\x1f\x8b", "gzip", ".gz"), (b"\x28\xb5\x2f\xfd", "zstd", ".zst"),
    (b"BZh", "bzip2", ".bz2"), (b"\x04\x22\x4d\x18", "lz4", ".lz4"),
    (b"PAR1", "parquet", ".parquet"), (b"ARROW1", "Arrow", ".arrow"),
    (b"PK\x03\x04", "zip", ""), (b"\xfd7zXZ\0", "xz", ""), (b"%PDF-", "PDF", ""),
    (b"SQLite format 3", "SQLite", ""),
)  # fmt: skip
"""First bytes, names, and the suffix with which the format is read; empty: it is not."""
_CONVERTED = {
    "zip": "unzip {file} -d {stem}, and --data {stem}",
    "xz": "xz -dc {file} > {stem}.raw.txt",
    "PDF": "pdftotext {file} {stem}.txt",
    "SQLite": "sqlite3 -json {file} 'SELECT ...' > {stem}.json",
}
_TOOLS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bzip2", ".lz4": "lz4"}
_ZEROS = 0.3
"""Of every other byte in the beginning of UTF-16 text without a byte order mark, at least so many
are zeros: spaces, line ends, digits and Latin letters."""


def other_contents(path: Path, head: bytes) -> DataError | None:
    """The error of a file whose first bytes are of another encoding or format than UTF-8 text, None
    where they are of none that is known."""
    file, stem = shlex.quote(str(path)), shlex.quote(str(path.with_suffix("")))
    encoding = next((name for mark, name in _ENCODINGS if head.startswith(mark)), None)
    if encoding is None and len(start := head[:4096]) >= 4:
        zeros = [start[first::2].count(0) * 2 / len(start) for first in (0, 1)]
        if max(zeros) >= _ZEROS and min(zeros) < max(zeros) / 4:
            encoding = "UTF-16BE" if zeros[0] > zeros[1] else "UTF-16LE"
    if encoding is not None:
        return DataError(
            f"data {path} is {encoding} text; text is read as UTF-8", hint=_iconv(path, encoding)
        )
    for magic, name, suffix in _FORMATS:
        if head.startswith(magic):
            message = f"data {path} holds {name}, and its name is that of another format"
            if not suffix:
                hint = _CONVERTED[name].format(file=file, stem=stem)
            elif name in ("parquet", "Arrow"):
                hint = f"mv {file} {stem}{suffix}"
            else:
                hint = f"mv {file} {file}{suffix}"
            return DataError(message, hint=hint)
    return None


def not_utf8(path: Path, where: str, error: UnicodeDecodeError) -> DataError:
    """The error of text in an encoding that is not known. `where`: in the file."""
    return DataError(
        f"data {path}{where} is not UTF-8 text: {error.reason} at byte {error.start}",
        hint=encoding_hint(path),
    )


def encoding_hint(path: Path) -> str:
    """The command that converts text in an encoding that is not known."""
    return f"{_iconv(path, 'cp1252')}  (or cp949, shift_jis, gb18030: as it was written)"


def _iconv(path: Path, encoding: str) -> str:
    if tool := _TOOLS.get(path.suffix):
        inside = str(path).removesuffix(path.suffix)
        return f"{tool} -dk {shlex.quote(str(path))}, and --data {shlex.quote(inside)}"
    to = path.with_name(f"{path.stem}.utf8{path.suffix or '.txt'}")
    return f"iconv -f {encoding} -t UTF-8 {shlex.quote(str(path))} > {shlex.quote(str(to))}"
