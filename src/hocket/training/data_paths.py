"""Data paths: the files behind `--data`, and how each is read.

    path -> file, `datasets` directory, or directory -> sources, and what was left out

A directory of records (JSON lines, CSV, TSV, parquet, Arrow) is read as `datasets.load_dataset`
reads it: by the card's `data_files`, or by the names of files and folders, the `train` split
alone. A directory without records is walked for text. Never imports torch; `datasets` is imported
for directories of records only.
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from hocket.spec.errors import DataError, nearest

KINDS = {
    ".jsonl": "json", ".ndjson": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv",
    ".tsv": "csv", ".arrow": "arrow", ".feather": "arrow",
}  # fmt: skip
"""Suffixes of records, and how they are read. Every other file is text."""

COMPRESSED = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2", ".lz4": "lz4"}
"""Suffixes of compression, and pyarrow's names of the codecs."""

_NOT_DATA = (
    ".pyc", ".so", ".o", ".a", ".exe", ".dll", ".zip", ".whl", ".png", ".jpg", ".jpeg", ".gif",
    ".pdf", ".safetensors", ".gguf", ".bin", ".pt", ".pth", ".npy", ".npz", ".tar", ".tgz", ".xz",
    ".7z", ".rar", ".ico", ".xlsx", ".xls", ".ods", ".docx", ".doc", ".odt", ".epub", ".orc",
    ".avro", ".pkl", ".pickle", ".h5", ".hdf5", ".db", ".sqlite", ".sqlite3",
)  # fmt: skip
_SKIPPED_FOLDERS = ("__pycache__", "node_modules", "site-packages", "dist-packages")
_DOCUMENTATION = (
    "readme", "license", "licence", "citation", "notice", "changelog", "contributing",
    "code_of_conduct", "security", "authors",
)  # fmt: skip
_SETTINGS = (".py", ".sh", ".yaml", ".yml", ".toml", ".cfg", ".ini", ".lock")
TRAIN = "train"


@dataclasses.dataclass(frozen=True)
class Source:
    """A file or `datasets` directory to read documents from.

    Attributes:
        path: a file, or a `datasets` directory.
        kind: `text`, `json`, `csv`, `parquet`, `arrow` or `datasets`.
        named: whether the user named this very path: then nothing in it is skipped.
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


@dataclasses.dataclass(frozen=True)
class Selection:
    """The sources behind some paths.

    Attributes:
        sources: in the order of the paths; a directory's by name.
        notices: one line for each directory of records: what is read and what is left out.
    """

    sources: tuple[Source, ...]
    notices: tuple[str, ...] = ()


def find(paths: Sequence[str | os.PathLike[str]]) -> Selection:
    """The sources behind some paths.

    Raises:
        DataError: no path, a path that does not exist, a file of a format that is not read, a
            directory without data, without a `train` split, or of both records and text.
    """
    if not paths:
        raise DataError("no data is given", hint="--data FILE_OR_DIRECTORY...")
    sources: list[Source] = []
    notices: list[str] = []
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
        if path.is_file():
            sources.append(_named(path))
        elif _saved_to_disk(path):
            sources.append(Source(path, "datasets", True))
        else:
            inside, notice = _directory(path)
            sources += inside
            notices += notice
    return Selection(tuple(sources), tuple(notices))


def compression(path: Path) -> str | None:
    """pyarrow's name of the codec a file is compressed with, by its suffix."""
    return COMPRESSED.get(path.suffix.lower())


def suffix_of(path: Path) -> str:
    """The suffix that says the format: in front of one of compression."""
    return Path(path.stem).suffix.lower() if compression(path) else path.suffix.lower()


def _named(path: Path) -> Source:
    suffix = suffix_of(path)
    if suffix in _NOT_DATA:
        raise DataError(
            f"data {path}: files of {suffix} are not read; the rule is text, or records in "
            f"{', '.join(KINDS)}",
            hint=f"convert it first, and then --data {path.with_suffix('.jsonl')}",
        )
    return Source(path, KINDS.get(suffix, "text"), True)


def _saved_to_disk(path: Path) -> bool:
    """Whether `datasets.save_to_disk` wrote this directory."""
    return (path / "state.json").is_file() or (path / "dataset_dict.json").is_file()


def _directory(path: Path) -> tuple[list[Source], list[str]]:
    found = list(_walk(path))
    # Next to other files, a JSON file is more often settings than data.
    settings = [s for s in found if suffix_of(s.path) == ".json"]
    others = [s for s in found if s not in settings]
    records = [s for s in others if s.kind not in ("text", "datasets")]
    if not records and others:
        return others, []
    records = records or settings
    if not records:
        raise DataError(
            f"data {path}: the directory holds no readable data",
            hint="name files: --data FILE...",
        )
    taken, rest = _train_split(path)
    text = [s.path for s in found if s.kind == "text" and s.path not in taken]
    prose = [p for p in text if not _documentation(p)]
    if prose:
        raise DataError(
            f"data {path} holds both records ({records[0].path.relative_to(path)}) and text "
            f"({prose[0].relative_to(path)}); a directory is read as one or the other",
            hint=f"name the files: --data {records[0].path}",
        )
    sources = [Source(p, KINDS.get(suffix_of(p), "text"), False) for p in taken]
    left = sorted({*rest, *text} - set(taken))
    notice = f"{path}: {_names(path, taken)} (split {TRAIN!r})"
    if left:
        notice += f"; left out: {_names(path, left)}"
    return sources, [notice]


def _train_split(path: Path) -> tuple[list[Path], list[Path]]:
    """(files of the split `train`, files of the other splits), as `datasets` resolves them."""
    try:
        import datasets
    except ModuleNotFoundError:
        raise DataError(
            f"data {path}: a directory of records needs datasets",
            hint='pip install "hocket[train]"',
        ) from None
    datasets.disable_progress_bars()
    try:
        with tempfile.TemporaryDirectory(prefix="hocket-data-") as cache:
            builder = datasets.load_dataset_builder(str(path), cache_dir=cache)
            files = builder.config.data_files or {}
            splits = {str(k): sorted(map(_below(path), v)) for k, v in files.items()}
    except Exception as error:  # datasets raises many kinds, and documents none
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise DataError(
            f"data {path}: the datasets library cannot read this directory: {reason}",
            hint=f"name the files: --data {path}/FILE...",
        ) from error
    if TRAIN not in splits:
        other = ", ".join(splits) or "none"
        raise DataError(
            f"data {path} holds no split {TRAIN!r}; its splits: {other}",
            hint=f"name the files: --data {next((f for v in splits.values() for f in v), path)}",
        )
    return splits[TRAIN], [f for name, v in splits.items() if name != TRAIN for f in v]


def _below(folder: Path) -> Callable[[str], Path]:
    """Makes of an absolute path one below a folder, as the user wrote that."""
    root = os.path.abspath(folder)
    return lambda file: folder / os.path.relpath(file, root)


def _names(folder: Path, paths: Sequence[Path], most: int = 3) -> str:
    names = [str(p.relative_to(folder)) for p in paths[:most]]
    more = len(paths) - most
    return ", ".join(names) + (f" and {more:,} more" if more > 0 else "")


def _documentation(path: Path) -> bool:
    """Whether a file next to records tells about them rather than being data itself."""
    return path.stem.lower() in _DOCUMENTATION or path.suffix.lower() in _SETTINGS


def _walk(path: Path) -> Iterator[Source]:
    for entry in sorted(path.iterdir()):
        if entry.name.startswith("."):
            continue
        if entry.is_dir():
            if entry.is_symlink():  # it may lead back here
                continue
            if _saved_to_disk(entry):
                yield Source(entry, "datasets", False)
            elif entry.name not in _SKIPPED_FOLDERS:
                yield from _walk(entry)
        elif entry.is_file() and suffix_of(entry) not in _NOT_DATA:
            yield Source(entry, KINDS.get(suffix_of(entry), "text"), False)
