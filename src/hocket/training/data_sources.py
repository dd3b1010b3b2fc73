"""Data sources: documents out of text files, JSON lines, parquet and `datasets` directories.

    path -> file or `datasets` directory (a plain directory is walked) -> documents (str)
                                                                       -> records (dict), where

Never imports torch; pyarrow is loaded only for parquet and `datasets` directories.
"""

from __future__ import annotations

import dataclasses
import gzip
import io
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from hocket.spec.errors import DataError, nearest

JSON_LINES = (".jsonl", ".ndjson", ".json")
PARQUET = (".parquet",)
_SKIPPED_FOLDERS = ("__pycache__", "node_modules", "site-packages", "dist-packages")
_NOT_WALKED = (
    ".json",  # in a directory more often settings than data: name such a file to have it read
    ".pyc", ".so", ".o", ".a", ".exe", ".dll", ".zip", ".whl", ".png", ".jpg", ".jpeg", ".gif",
    ".pdf", ".safetensors", ".bin", ".pt", ".npy", ".npz", ".tar", ".xz", ".bz2", ".zst", ".ico",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Source:
    """One thing to read documents from.

    Attributes:
        path: a file, or a `datasets` directory.
        kind: `text`, `json`, `parquet` or `datasets`.
        named: the user named this very path, so that nothing about it is skipped in silence.
    """

    path: Path
    kind: str
    named: bool

    @property
    def bytes(self) -> int:
        """Size on disk."""
        if self.path.is_dir():
            return sum(p.stat().st_size for p in self.path.rglob("*.arrow"))
        return self.path.stat().st_size


def find(paths: Sequence[str | os.PathLike[str]]) -> list[Source]:
    """The sources behind some paths, in order; a directory's in the order of their names.

    Raises:
        DataError: no path, a path that does not exist, a directory without anything to read.
    """
    if not paths:
        raise DataError("no data is given", hint="--data FILE_OR_DIRECTORY...")
    found: list[Source] = []
    for given in paths:
        path = Path(given)
        if not os.fspath(given) or not path.exists():
            there = path.parent.iterdir() if path.parent.is_dir() else iter(())
            near = nearest(path.name, (p.name for p in there))
            raise DataError(
                f"data {given}: there is no such file or directory",
                hint=f"did you mean {path.parent / near}?" if near else None,
            )
        if not path.is_dir() and not path.is_file():
            raise DataError(
                f"data {given} is a device or a pipe, which may never end; it is read twice",
                hint="write it into a file first",
            )
        if path.is_dir() and not _is_dataset(path):
            inside = list(_walk(path))
            if not inside:
                raise DataError(f"data {given}: the directory holds no readable data")
            found += inside
        else:
            found.append(Source(path, _kind(path), True))
    return found


def documents(sources: Iterable[Source], text_field: str = "text") -> Iterator[str]:
    """Every document with some text in it, source by source.

    Raises:
        DataError: a file that cannot be read or decoded, or records without the text field.
    """
    for source in sources:
        try:
            if source.kind == "text":
                yield from _text(source)
            elif source.kind == "json":
                yield from _json(source, text_field)
            else:
                yield from _columns(source, text_field)
        except OSError as error:
            reason = error.strerror or str(error) or type(error).__name__
            raise DataError(f"data {source.path} cannot be read: {reason}") from error


def fields(source: Source) -> frozenset[str]:
    """The names that the first record of a source has; none of a text file, or where nothing can
    be read (which reading it will say)."""
    if source.kind == "text":
        return frozenset()
    try:
        if source.kind == "json":
            first: Any = next(_json_records(source), ({}, ""))[0]
            return frozenset(first) if isinstance(first, dict) else frozenset()
        return frozenset(next(_tables(source)).schema.names)
    except (OSError, DataError, StopIteration):
        return frozenset()


def records(source: Source) -> Iterator[tuple[dict[str, Any], str]]:
    """Every record of a JSON, parquet or `datasets` source, and where it stands there.

    Raises:
        DataError: a file that cannot be read, or a record that is no object.
    """
    assert source.kind != "text", source
    try:
        for record, where in _json_records(source) if source.kind == "json" else _rows(source):
            if not isinstance(record, dict):
                raise DataError(
                    f"data {source.path}, {where}: a {type(record).__name__}, not an object"
                )
            yield record, where
    except OSError as error:
        reason = error.strerror or str(error) or type(error).__name__
        raise DataError(f"data {source.path} cannot be read: {reason}") from error


# --- what a path is ------------------------------------------------------------------------


def _suffix(path: Path) -> str:
    return Path(path.stem).suffix.lower() if path.suffix == ".gz" else path.suffix.lower()


def _kind(path: Path) -> str:
    if path.is_dir():
        return "datasets"
    suffix = _suffix(path)
    return "json" if suffix in JSON_LINES else "parquet" if suffix in PARQUET else "text"


def _is_dataset(path: Path) -> bool:
    """Whether `datasets.save_to_disk` wrote this directory."""
    return (path / "state.json").is_file() or (path / "dataset_dict.json").is_file()


def _walk(path: Path) -> Iterator[Source]:
    for entry in sorted(path.iterdir()):
        if entry.name.startswith(".") or entry.is_symlink():
            continue
        if entry.is_dir():
            if _is_dataset(entry):
                yield Source(entry, "datasets", False)
            elif entry.name not in _SKIPPED_FOLDERS:
                yield from _walk(entry)
        elif entry.is_file() and _suffix(entry) not in _NOT_WALKED:
            yield Source(entry, _kind(entry), False)


# --- reading -------------------------------------------------------------------------------


def _open(path: Path) -> IO[bytes]:
    return gzip.open(path) if path.suffix == ".gz" else path.open("rb")  # type: ignore[return-value]


def _text(source: Source) -> Iterator[str]:
    """A text file is one document. In a walked directory, what is no text is passed over."""
    with _open(source.path) as file:
        raw = file.read()
    try:
        text = raw.decode("utf-8-sig")
        if "\0" in text:
            raise UnicodeDecodeError("utf-8", raw, raw.index(0), raw.index(0) + 1, "a zero byte")
    except UnicodeDecodeError as error:
        if not source.named:
            return
        raise DataError(
            f"data {source.path} is not UTF-8 text: {error.reason} at byte {error.start}",
            hint=f"iconv -f latin1 -t utf-8 {source.path} > text.txt",
        ) from None
    if text.strip():
        yield text


def _json(source: Source, field: str) -> Iterator[str]:
    for record, where in _json_records(source):
        yield from _field(source, field, record, where)


def _json_records(source: Source) -> Iterator[tuple[Any, str]]:
    """JSON lines, or one JSON array of objects; each with the line or number it has."""
    with _open(source.path) as raw:
        file = io.TextIOWrapper(raw, encoding="utf-8-sig", errors="replace")
        first = file.read(1)
        number = 1
        while first.isspace():
            number += first == "\n"
            first = file.read(1)
        if first == "[":
            try:
                records = json.loads(first + file.read())
            except ValueError as error:
                raise DataError(f"data {source.path} is not JSON: {error}") from None
            for number, record in enumerate(records, 1):
                yield record, f"record {number}"
            return
        line = first + file.readline()
        while line:
            if line.strip():
                try:
                    record = json.loads(line)
                except ValueError as error:
                    raise DataError(
                        f"data {source.path}, line {number} is not JSON: {error}",
                        hint="one JSON object a line; rename the file to .txt if it is plain text",
                    ) from None
                yield record, f"line {number}"
            line, number = file.readline(), number + 1


def _field(source: Source, field: str, record: Any, where: str) -> Iterator[str]:
    text = record.get(field) if isinstance(record, dict) else None
    if isinstance(text, str):
        if text.strip():
            yield text if text.isascii() else text.encode("utf-8", "replace").decode()
        return
    if isinstance(record, dict) and field in record and text is None:
        return  # an explicit null is an empty document
    fields = sorted(record) if isinstance(record, dict) else []
    raise _wrong_field(source, field, fields, where)


def _columns(source: Source, field: str) -> Iterator[str]:
    """The texts of parquet files and `datasets` directories."""
    for batch in _tables(source, lambda schema: _check_column(source, field, schema), [field]):
        yield from _strings(batch.column(field))


def _rows(source: Source) -> Iterator[tuple[Any, str]]:
    number = 0
    for batch in _tables(source):
        for record in batch.to_pylist():
            number += 1
            yield record, f"row {number}"


def _tables(
    source: Source,
    check: Callable[[Any], None] | None = None,
    columns: list[str] | None = None,
) -> Iterator[Any]:
    """Parquet files and `datasets` directories (Arrow stream files), batch by batch.

    `check` is shown each file's schema; of parquet only `columns` are read (None: all).
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError:
        raise DataError(
            f"data {source.path} needs pyarrow", hint='pip install "hocket[train]"'
        ) from None
    try:
        if source.kind == "parquet":
            table = pyarrow.parquet.ParquetFile(source.path)
            if check is not None:
                check(table.schema_arrow)
            yield from table.iter_batches(batch_size=1024, columns=columns)
            return
        for file in _arrow_files(source.path):
            with pyarrow.memory_map(str(file)) as memory:
                reader = pyarrow.ipc.open_stream(memory)
                if check is not None:
                    check(reader.schema)
                yield from reader
    except (pyarrow.ArrowException, KeyError, TypeError, ValueError) as error:
        raise DataError(f"data {source.path} cannot be read: {error}") from error


def _arrow_files(path: Path) -> list[Path]:
    """The Arrow files that a `datasets` directory names in its state; all splits of a dict."""
    splits = path / "dataset_dict.json"
    if splits.is_file():
        names = json.loads(splits.read_text())["splits"]
        if "train" in names:
            names = ["train"]
        return [file for name in names for file in _arrow_files(path / name)]
    state = json.loads((path / "state.json").read_text())
    if state.get("_indices_files") or state.get("_indices_data_files"):
        raise DataError(
            f"data {path}: the dataset keeps an index over its rows",
            hint="dataset.flatten_indices().save_to_disk(...)",
        )
    return [path / entry["filename"] for entry in state["_data_files"]]


def _check_column(source: Source, field: str, schema: Any) -> None:
    if field not in schema.names:
        raise _wrong_field(source, field, list(schema.names), "the table")
    kind = str(schema.field(field).type)
    if kind not in ("string", "large_string", "string_view"):
        raise DataError(f"data {source.path}: the field {field!r} holds {kind}, not text")


def _strings(column: Any) -> Iterator[str]:
    for text in column.to_pylist():
        if text and text.strip():
            yield text


def _wrong_field(source: Source, field: str, fields: Sequence[str], where: str) -> DataError:
    if field in fields:
        return DataError(f"data {source.path}: {where} holds no text in its field {field!r}")
    near = nearest(field, fields) or (fields[0] if len(fields) == 1 else None)
    return DataError(
        f"data {source.path}: {where} has no text field {field!r}"
        + (f"; it has {', '.join(map(repr, fields))}" if fields else ""),
        hint=f"--text-field {near}" if near else "--text-field NAME",
    )
