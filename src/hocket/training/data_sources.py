"""Data sources: documents out of text files, JSON lines, CSV, parquet and Arrow.

    source -> documents (str)
           -> records (dict), and where each is in the source

Never imports torch; pyarrow is loaded only for what it reads: CSV, parquet, Arrow, zstd, lz4.
"""

from __future__ import annotations

import codecs
import dataclasses
import gzip
import io
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from hocket.spec.errors import DataError, nearest
from hocket.spec.install import install_line
from hocket.training.corrupt import CorruptRecords
from hocket.training.data_paths import Source, compression, suffix_of
from hocket.training.file_contents import encoding_hint, not_utf8, other_contents
from hocket.training.hub_data import TRAIN

_PIECE = 1 << 20
"""Bytes that are read at once of a compressed file, to come to a place in it."""


@dataclasses.dataclass(frozen=True)
class DocumentPlace:
    """Where a document is, so that reading can begin there.

    Attributes:
        source: its number, parts of a directory counted. number: of JSON lines its line, of others
            the documents of the source before it. byte: of JSON lines, where its line begins.
    """

    source: int = 0
    number: int = 0
    byte: int = 0


def source_documents(
    sources: Iterable[Source], text_field: str = "text", corrupt: CorruptRecords | None = None
) -> Iterator[str]:
    """Every document with some text in it, source by source; as `placed_documents`."""
    return (text for text, _ in placed_documents(sources, text_field, corrupt))


def placed_documents(
    sources: Iterable[Source],
    text_field: str = "text",
    corrupt: CorruptRecords | None = None,
    start: DocumentPlace = DocumentPlace(),
) -> Iterator[tuple[str, DocumentPlace]]:
    """Every document with some text in it, and where it is, source by source.

    Args:
        corrupt: skips records that cannot be read; None: the first raises.
        start: of the first document; sources before it, and JSON lines, are not read.

    Raises:
        DataError: a file that cannot be read or decoded, or records without the text field.
    """
    corrupt = corrupt or CorruptRecords()
    for index, source in enumerate(_leaves(sources)):
        if index < start.source:
            continue
        first = start if index == start.source else DocumentPlace(index)
        try:
            if source.kind == "json" and source.limit is None:
                for record, number, byte in _json_records(source, corrupt, first):
                    for text in _field(source, text_field, record, _where(number, byte), corrupt):
                        yield text, DocumentPlace(index, number, byte)
            else:
                texts = _texts(source, text_field, corrupt)
                for number, text in itertools.islice(enumerate(texts), first.number, None):
                    yield text, DocumentPlace(index, number)
        except OSError as error:
            reason = error.strerror or str(error) or type(error).__name__
            raise DataError(f"data {source.path} cannot be read: {reason}") from error


def _leaves(sources: Iterable[Source]) -> Iterator[Source]:
    """The sources, each directory of which all is read as its parts."""
    for source in sources:
        if source.kind == "files" and source.limit is None:
            yield from _leaves(source.parts)
        else:
            yield source


def _texts(source: Source, text_field: str, corrupt: CorruptRecords) -> Iterator[str]:
    """The documents of a source that is not read by lines."""
    if source.limit is not None:
        field = "text" if source.parts[0].kind == "text" else text_field
        for record, where in source_records(source, corrupt):
            yield from _field(source, field, record, where, corrupt)
    elif source.kind == "text":
        yield from _text(source)
    else:
        yield from _columns(source, text_field)


def fields(source: Source) -> frozenset[str]:
    """The names that the first record of a source has; none of a text file, or where nothing can
    be read (which reading it will say)."""
    if source.parts:
        return fields(source.parts[0])
    if source.kind == "text":
        return frozenset()
    try:
        if source.kind == "json":
            first: Any = next(_json_records(source, CorruptRecords(math.inf)), ({},))[0]
            return frozenset(first) if isinstance(first, dict) else frozenset()
        return frozenset(next(_tables(source)).schema.names)
    except (OSError, DataError, StopIteration):
        return frozenset()


def source_records(
    source: Source, corrupt: CorruptRecords | None = None
) -> Iterator[tuple[dict[str, Any], str]]:
    """Every record of a source, and where it is there; of a text file its text, as a record.

    Args:
        corrupt: as `source_documents`.

    Raises:
        DataError: a file that cannot be read, or a record that is no object.
    """
    corrupt = corrupt or CorruptRecords()
    if source.kind == "files":
        yield from itertools.islice(
            (one for part in source.parts for one in source_records(part, corrupt)), source.limit
        )
        return
    try:
        if source.kind == "text":
            yield from (({"text": text}, "its text") for text in _text(source))
            return
        lines = ((one, _where(*at)) for one, *at in _json_records(source, corrupt))
        for record, where in lines if source.kind == "json" else _rows(source):
            if isinstance(record, dict):
                yield record, where
                continue
            kind = type(record).__name__
            corrupt.skip(DataError(f"data {source.path}, {where}: a {kind}, not an object"))
    except OSError as error:
        reason = error.strerror or str(error) or type(error).__name__
        raise DataError(f"data {source.path} cannot be read: {reason}") from error


# --- reading -------------------------------------------------------------------------------


def _open(source: Source) -> IO[bytes]:
    codec, file = compression(source.path), source.opened()
    if codec is None:
        return file
    if codec == "gzip":  # the common one, without pyarrow
        return gzip.open(file)  # type: ignore[return-value]
    stream: IO[bytes] = _pyarrow(source.path).input_stream(file, compression=codec)
    return stream


def _pyarrow(path: Path) -> Any:
    try:
        import pyarrow
        import pyarrow.csv
        import pyarrow.parquet
    except ModuleNotFoundError:
        raise DataError(f"data {path} needs pyarrow", hint=install_line("train")) from None
    return pyarrow


def _text(source: Source) -> Iterator[str]:
    """A text file is one document. In a walked directory, what is no text is passed over."""
    with _open(source) as file:
        raw = file.read()
    try:
        text = raw.decode("utf-8-sig")
        if "\0" in text:
            raise UnicodeDecodeError("utf-8", raw, raw.index(0), raw.index(0) + 1, "a zero byte")
    except UnicodeDecodeError as error:
        if not source.named:
            return
        raise other_contents(source.path, raw) or not_utf8(source.path, "", error) from None
    if text.strip():
        yield text


def _json_records(
    source: Source,
    corrupt: CorruptRecords,
    start: DocumentPlace = DocumentPlace(),
) -> Iterator[tuple[Any, int, int]]:
    """JSON lines, or one JSON array of objects; each with its line and the byte where that begins,
    or its number in the array and -1."""
    with _open(source) as raw:
        file = io.BufferedReader(raw)  # type: ignore[type-var]
        number, byte = max(start.number, 1), max(start.byte, 0)
        if byte and file.seekable():
            file.seek(byte)
        else:
            for passed in range(0, byte, _PIECE):
                file.read(min(_PIECE, byte - passed))
        begun = byte > 0
        if not begun and (other := other_contents(source.path, file.peek())):
            raise other
        for line in file:
            # As in a text file, a carriage return alone ends a line too.
            for each in line.splitlines(keepends=True) if b"\r" in line else (line,):
                if not begun and each.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
                    yield from _array(source, line[line.index(each) :] + file.read(), start.number)
                    return
                if each.strip():
                    begun = True
                    try:
                        text = each.decode("utf-8" if byte else "utf-8-sig")
                        yield json.loads(text), number, byte
                    except UnicodeDecodeError as error:
                        corrupt.skip(not_utf8(source.path, f", line {number},", error))
                    except (ValueError, RecursionError) as error:
                        corrupt.skip(
                            DataError(
                                f"data {source.path}, line {number} is not JSON: {error}",
                                hint="one JSON object a line; rename the file to .txt if it is "
                                "plain text; --max-corrupt-records 10 skips such lines",
                            )
                        )
                number, byte = number + 1, byte + len(each)


def _array(source: Source, raw: bytes, first: int) -> Iterator[tuple[Any, int, int]]:
    try:
        records = json.loads(raw.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise not_utf8(source.path, "", error) from None
    except ValueError as error:
        raise DataError(f"data {source.path} is not JSON: {error}") from None
    for number, record in enumerate(records, 1):
        if number >= first:
            yield record, number, -1


def _where(number: int, byte: int) -> str:
    return f"line {number}" if byte >= 0 else f"record {number}"


def _field(
    source: Source, field: str, record: Any, where: str, corrupt: CorruptRecords
) -> Iterator[str]:
    text = record.get(field) if isinstance(record, dict) else None
    if isinstance(text, str):
        if text.strip():
            yield text if text.isascii() else text.encode("utf-8", "replace").decode()
        return
    if isinstance(record, dict) and field in record and text is None:
        return  # an explicit null is an empty document
    fields = sorted(record) if isinstance(record, dict) else []
    corrupt.skip(_wrong_field(source, field, fields, where))


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
    """CSV, parquet and Arrow files and `datasets` directories (Arrow streams), batch by batch.

    `check` is shown each file's schema; of parquet only `columns` are read (None: all).
    """
    pyarrow = _pyarrow(source.path)
    try:
        if source.kind == "csv":
            reader = _csv(source, pyarrow)
            if check is not None:
                check(reader.schema)
            yield from reader
            return
        if source.kind == "parquet":
            with source.opened() as file:
                table = pyarrow.parquet.ParquetFile(file)
                if check is not None:
                    check(table.schema_arrow)
                yield from table.iter_batches(batch_size=1024, columns=columns)
            return
        files = (
            [source.here()] if source.kind == "arrow" else _arrow_files(source.path, source.split)
        )
        for path in files:
            with pyarrow.memory_map(str(path)) as memory:
                reader, batches = _arrow(memory, pyarrow)
                if check is not None:
                    check(reader.schema)
                yield from batches
    except (pyarrow.ArrowException, KeyError, TypeError, ValueError) as error:
        encoded = source.kind == "csv" and "UTF8" in str(error)
        raise DataError(
            f"data {source.path} cannot be read: {error}",
            hint=encoding_hint(source.path) if encoded else None,
        ) from error


def _csv(source: Source, pyarrow: Any) -> Any:
    """A reader of CSV or TSV whose columns are all strings: none is parsed as numbers or dates."""
    with _open(source) as file:
        if other := other_contents(source.path, file.read(4096)):
            raise other
    tabs = suffix_of(source.path) == ".tsv"
    parse = pyarrow.csv.ParseOptions(delimiter="\t" if tabs else ",", newlines_in_values=True)
    with pyarrow.csv.open_csv(_open(source), parse_options=parse) as first:
        names = first.schema.names
    convert = pyarrow.csv.ConvertOptions(column_types=dict.fromkeys(names, pyarrow.string()))
    return pyarrow.csv.open_csv(_open(source), parse_options=parse, convert_options=convert)


def _arrow(memory: Any, pyarrow: Any) -> tuple[Any, Iterator[Any]]:
    """(reader, its batches) of an Arrow file, or of an Arrow stream as `datasets` writes it."""
    if bytes(memory.read(6)) == b"ARROW1":
        memory.seek(0)
        reader = pyarrow.ipc.open_file(memory)
        return reader, (reader.get_batch(i) for i in range(reader.num_record_batches))
    memory.seek(0)
    reader = pyarrow.ipc.open_stream(memory)
    return reader, iter(reader)


def _arrow_files(path: Path, split: str) -> list[Path]:
    """The Arrow files that a `datasets` directory names in its state; of a dict, of one split, or
    of all where it has no `train` and no other was asked for."""
    splits = path / "dataset_dict.json"
    if splits.is_file():
        names = json.loads(splits.read_text())["splits"]
        if split in names:
            names = [split]
        elif split != TRAIN:
            raise DataError(
                f"data {path} holds no split {split!r}; its splits: {', '.join(names)}",
                hint=f"--data {path}:{nearest(split, names) or names[0]}",
            )
        return [file for name in names for file in _arrow_files(path / name, split)]
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
    if {"chosen", "rejected"} <= set(fields):
        return DataError(
            f"data {source.path} holds preferences (chosen, rejected), which are not supported",
            hint='the chosen answers as records: {"prompt": ..., "completion": ...}',
        )
    near = nearest(field, fields) or (fields[0] if len(fields) == 1 else None)
    return DataError(
        f"data {source.path}: {where} has no text field {field!r}"
        + (f"; it has {', '.join(map(repr, fields))}" if fields else ""),
        hint=f"--text-field {near}" if near else "--text-field NAME",
    )
