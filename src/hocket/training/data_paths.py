"""Data paths: the files behind `--data`, and how each is read.

    path[:split][[:N]] -> file, `datasets` directory, or directory -> sources, and what was left out
    org/name[/subset][:split][[:N]][@revision] -> the files of a split of a data set of the Hub
    either, and :weight -> a source of a mixture (`mixture`), which is found as without it

A directory of records (JSON lines, CSV, TSV, parquet, Arrow) is read as `datasets.load_dataset`
reads it: by the card's `data_files`, or by the names of files and folders, one split of it, `train`
by default. A directory without records is walked for text. A file of the Hub is downloaded when it
is read. Never imports torch; `datasets` is imported for directories of records only.
"""

from __future__ import annotations

import dataclasses
import glob
import os
import shlex
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from hocket.models import hub, repo_id
from hocket.spec.errors import CUTOFF, DataError, nearest
from hocket.spec.units import format_bytes
from hocket.training import hub_data
from hocket.training.hub_data import TRAIN
from hocket.training.mixture import unweighted

KINDS = {
    ".jsonl": "json", ".ndjson": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv",
    ".tsv": "csv", ".arrow": "arrow", ".feather": "arrow",
}  # fmt: skip
"""Suffixes of records, and how they are read. Every other file is text."""

PLACEHOLDER = "DATA"
"""What printed commands have in place of data that hocket does not know."""
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


@dataclasses.dataclass(frozen=True)
class Source:
    """A file or `datasets` directory to read documents from.

    Attributes:
        path: a file, or a `datasets` directory; of a file of the Hub its name there, after that of
            the data set.
        kind: `text`, `json`, `csv`, `parquet`, `arrow`, `datasets`, or `files`: its parts, one
            after the other.
        named: whether the user named this very path: then nothing in it is skipped.
        split: of a `datasets` directory.
        limit: records that are read, from the beginning; None: all.
        parts: files of one split.
        repo: the data set of the Hub at a commit, None of a file here. name: of the file there.
        streaming: read the file where it is, without storing it. size: of the file there, in bytes.
        label: what is written down of where the data came from; empty: the path.
    """

    path: Path
    kind: str
    named: bool
    split: str = TRAIN
    limit: int | None = None
    parts: tuple[Source, ...] = ()
    repo: repo_id.RepoId | None = None
    name: str = ""
    streaming: bool = False
    size: int = 0
    label: str = ""

    @property
    def bytes(self) -> int:
        """Size on disk."""
        if self.parts:
            return sum(part.bytes for part in self.parts)
        if self.repo is not None:
            return self.size
        if self.path.is_dir():
            return sum(p.stat().st_size for p in self.path.rglob("*.arrow"))
        return self.path.stat().st_size

    @property
    def stamp(self) -> tuple[tuple[str, int, int], ...]:
        """What changes with the contents: of each file its path, size and time of change; of the
        Hub nothing, as a commit stays as it is. Raises OSError."""
        if self.repo is not None or self.label:
            return ()
        if self.parts:
            return tuple(row for part in self.parts for row in part.stamp)
        files = sorted(self.path.rglob("*.arrow")) if self.path.is_dir() else [self.path]
        return tuple((str(p), p.stat().st_size, p.stat().st_mtime_ns) for p in files)

    @property
    def shown(self) -> str:
        """Where it is, from any folder."""
        return self.label or str(self.path.resolve())

    def here(self) -> Path:
        """The file on this machine; one of the Hub is downloaded, if need be. Raises DataError."""
        if self.repo is None:
            return self.path
        return hub.snapshot(self.repo, [self.name], required=[self.name]) / self.name

    def opened(self) -> IO[Any]:
        """The file's bytes. Raises DataError, OSError."""
        if self.streaming and self.repo is not None:
            file: IO[Any] = hub.hub_file_opened(self.repo, self.name)
            return file
        return self.here().open("rb")


@dataclasses.dataclass(frozen=True)
class Selection:
    """The sources behind some paths.

    Attributes:
        sources: in the order of the paths; a directory's by name.
        notices: one line for each directory of records: what is read and what is left out.
    """

    sources: tuple[Source, ...]
    notices: tuple[str, ...] = ()


def find_sources(paths: Sequence[str | os.PathLike[str]], *, streaming: bool = False) -> Selection:
    """The sources behind some paths.

    Args:
        streaming: read data sets of the Hub without storing them; done too where the disk has no
            room for their files.

    Raises:
        DataError: no path, a path that does not exist, a file of a format that is not read, a
            directory without data, without the split, or of both records and text; a data set of
            the Hub that is not there or cannot be reached.
    """
    if not paths:
        raise DataError("no data is given", hint="--data FILE_OR_DIRECTORY...")
    sources: list[Source] = []
    notices: list[str] = []
    for weighted in paths:
        given = unweighted(weighted)[0]
        path, split, limit = _selected(given)
        if not os.fspath(given) or not path.exists():
            data = hub_data.parse_data(os.fspath(given)) if not _looks_like_a_file(path) else None
            if data is not None:
                source, notice = _of_hub(data, streaming)
                sources.append(source)
                notices.append(notice)
                continue
            there = path.parent.iterdir() if path.parent.is_dir() else iter(())
            near = nearest(path.name, (p.name for p in there), cutoff=CUTOFF)
            if "://" in os.fspath(given):
                raise DataError(
                    f"data {given}: addresses are not read, but for data sets of the Hub "
                    "(hf://datasets/ORG/NAME, https://huggingface.co/datasets/ORG/NAME)",
                    hint=f"curl -LO {given}, and --data {path.name}",
                )
            if os.fspath(given) == PLACEHOLDER:
                raise DataError(
                    f"{PLACEHOLDER} stands for your data: files, a directory, or ORG/NAME",
                    hint="--data 'roneneldan/TinyStories[:2000]'",
                )
            raise DataError(
                f"data {given}: there is no such file or directory",
                hint=f"did you mean {path.parent / near}?"
                if near
                else "--data FILE, a directory, or a data set of the Hub: ORG/NAME",
            )
        if not path.is_dir() and not path.is_file():
            raise DataError(
                f"data {given} is a device or a pipe, which may never end; it is read twice",
                hint="write it into a file first",
            )
        if path.is_file():
            if split is not None:
                raise DataError(f"data {given}: a file has no splits", hint=f"--data {path}")
            found = [_named(path)]
        elif _saved_to_disk(path):
            found = [Source(path, "datasets", True, split=split or TRAIN)]
        else:
            found, said = _directory(path, split)
            notices += said
        if limit is not None:
            found = [Source(path, "files", True, limit=limit, parts=tuple(found))]
        sources += found
    return Selection(tuple(sources), tuple(notices))


def reject_changed(sources: Sequence[Source], stamps: Sequence[object]) -> None:
    """Raise DataError where files are not what they were when their stamps were taken."""
    for source, before in zip(sources, stamps, strict=True):
        try:
            now: object = source.stamp
        except OSError as error:
            now = error.strerror
        if now != before:
            raise DataError(
                f"data {source.path} was changed while it was read: {_difference(before, now)}",
                hint=f"cp -r {shlex.quote(str(source.path))} COPY, and --data COPY; or wait until "
                "its writer is done",
            )


def _difference(before: Any, now: Any) -> str:
    """The first file that differs between two stamps, and how."""
    if isinstance(now, str):
        return now
    for path, _, _ in sorted(set(now) ^ set(before)):
        there = next((row[1] for row in now if row[0] == path), None)
        was = next((row[1] for row in before if row[0] == path), None)
        if there is None or was is None:
            return f"{path} was {'removed' if there is None else 'added'}"
        if there != was:
            return f"{path} had {was:,} bytes and has {there:,}"
    return f"{path} has as many bytes as before, and was written again"


def reject_repeated(data: Selection, held_out: Selection | None = None) -> None:
    """Raise DataError for a file that is read twice: what is held out of it would be trained on.

    Args:
        data: of `--data`, of which a fraction is held out where there is no `--eval-data`.
        held_out: of `--eval-data`.
    """
    trained: set[object] = set()
    for part in _files(data):
        if _file(part) in trained:
            raise DataError(
                f"{part.path} is in --data twice: what is held out of one copy is trained on in "
                "the other",
                hint="name it once, with --epochs 2; or with weights: --data A.jsonl:2 B.jsonl:1",
            )
        trained.add(_file(part))
    for part in _files(held_out) if held_out else ():
        if _file(part) in trained:
            raise DataError(
                f"{part.path} is both in --data and in --eval-data: what is trained on is not held "
                "out",
                hint="--eval-fraction 0.02 instead of --eval-data",
            )


def _files(selection: Selection) -> Iterator[Source]:
    for source in selection.sources:
        yield from source.parts or (source,)


def _file(source: Source) -> object:
    """What is the same of two sources that read the same file."""
    return source.repo or source.path.resolve(), source.name, source.split


def expanded_paths(paths: Sequence[str | os.PathLike[str]]) -> tuple[str, ...]:
    """The paths, with the files that a pattern (`*`, `?`, `[ab]`, `**`) matches in its place, by
    name.

    Raises:
        DataError: a pattern that matches no file.
    """
    found: list[str] = []
    for path in paths:
        given = os.fspath(path)
        data = None if "://" in given else hub_data.parse_data(given)
        base = hub_data.selected(given)[0] if data is None else ""
        if not any(sign in base for sign in "*?[") or Path(given).exists() or "://" in given:
            found.append(given)
            continue
        if unweighted(given)[1]:
            raise DataError(
                f"data {given}: a pattern has no weight; the sources of a mixture are files, "
                "directories and data sets",
                hint=f"--data {Path(given).parent}:{unweighted(given)[1]}",
            )
        matches = sorted(glob.glob(str(Path(given).expanduser()), recursive=True))
        files = [match for match in matches if Path(match).is_file()]
        if not files:
            raise DataError(
                f"data {given}: the pattern matches no file", hint=f"ls {Path(given).parent}"
            )
        found += files
    return tuple(found)


def pinned_path(given: str | os.PathLike[str]) -> str:
    """A path that holds from any working folder; of a data set of the Hub its id at the commit.

    Raises:
        DataError: the Hub cannot be reached.
    """
    plain, weight = unweighted(given)
    path, _, _ = _selected(plain)
    if not path.exists() and not _looks_like_a_file(path) and hub_data.parse_data(plain):
        return fixed(given)
    return os.fspath(path.resolve()) + plain.removeprefix(os.fspath(path)) + _colon(weight)


def fixed(given: str | os.PathLike[str]) -> str:
    """A path as it is given; of a data set of the Hub its id at the commit.

    Raises:
        DataError: the Hub cannot be reached.
    """
    plain, weight = unweighted(given)
    path, _, _ = _selected(plain)
    if path.exists() or _looks_like_a_file(path):
        return os.fspath(given)
    data = hub_data.parse_data(plain)
    return os.fspath(given) if data is None else str(hub_data.pinned_data(data)) + _colon(weight)


def local_path(given: str) -> str:
    """As `pinned_path`, without asking the Hub: a name there stays as it is given."""
    plain, _ = unweighted(given)
    return pinned_path(given) if _selected(plain)[0].exists() else given


def _colon(weight: str) -> str:
    return f":{weight}" if weight else ""


def _selected(given: str | os.PathLike[str]) -> tuple[Path, str | None, int | None]:
    """(path, split, N) of `PATH[:split][[:N]]`; a path that exists as it is written is one."""
    if Path(given).exists():
        return Path(given), None, None
    base, split, limit = hub_data.selected(os.fspath(given))
    return (Path(base), split, limit) if Path(base).exists() else (Path(given), None, None)


def _looks_like_a_file(path: Path) -> bool:
    """Whether a path that is not there has a suffix that a data set's name does not have."""
    return suffix_of(path) in (*KINDS, ".txt", ".md", *_NOT_DATA, *_SETTINGS)


def _of_hub(data: hub_data.DataId, streaming: bool) -> tuple[Source, str]:
    suffixes = [s + c for s in (*KINDS, ".txt") for c in ("", *COMPRESSED)]
    data, names, rest = hub_data.files(data, suffixes)
    sizes = hub.listed(data.repo)
    total = sum(sizes.get(name, 0) for name in names)
    streaming = streaming or (data.limit is None and total > _room())
    parts = tuple(
        Source(
            Path(data.repo.id) / name, KINDS.get(suffix_of(Path(name)), "text"), True,
            repo=data.repo, name=name, streaming=streaming, size=sizes.get(name, 0),
        )
        for name in names
    )  # fmt: skip
    source = Source(
        Path(data.repo.id), "files", True, limit=data.limit, parts=parts, label=str(data)
    )
    root = Path(data.repo.id)
    notice = f"{data}: {_names(root, [part.path for part in parts])}, {format_bytes(total)}"
    if streaming:
        notice += ", streamed"
    if rest:
        notice += f"; left out: {_names(root, [root / name for name in rest])}"
    return source, notice


def _room() -> float:
    """Bytes that files of the Hub may take of the disk that its cache is on."""
    folder = repo_id.cache_folder()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    return 0.8 * shutil.disk_usage(there).free


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


def _directory(path: Path, split: str | None) -> tuple[list[Source], list[str]]:
    found = list(_walk(path))
    # Next to other files, a JSON file is more often settings than data.
    settings = [s for s in found if suffix_of(s.path) == ".json"]
    others = [s for s in found if s not in settings]
    records = [s for s in others if s.kind not in ("text", "datasets")]
    if not records and others:
        if split is not None:
            raise DataError(
                f"data {path} is a directory of text, which has no splits", hint=f"--data {path}"
            )
        return others, []
    records = records or settings
    if not records:
        raise DataError(
            f"data {path}: the directory holds no readable data (text, {', '.join(KINDS)})",
            hint="--data FILE...",
        )
    taken, rest = _split(path, split or TRAIN)
    text = [s.path for s in found if s.kind == "text" and s.path not in taken]
    prose = [p for p in text if not _documentation(p)]
    if prose:
        raise DataError(
            f"data {path} holds both records ({records[0].path.relative_to(path)}) and text "
            f"({prose[0].relative_to(path)}); a directory is read as one or the other",
            hint=f"--data {records[0].path}",
        )
    sources = [Source(p, KINDS.get(suffix_of(p), "text"), False) for p in taken]
    left = sorted({*rest, *text} - set(taken))
    notice = f"{path}: {_names(path, taken)} (split {split or TRAIN!r})"
    if left:
        notice += f"; left out: {_names(path, left)}"
    return sources, [notice]


def _split(path: Path, split: str) -> tuple[list[Path], list[Path]]:
    """(files of a split, files of the other splits), as `datasets` resolves them."""
    splits = hub_data.splits_of(path, None, os.fspath(path))
    if split not in splits:
        other = ", ".join(splits) or "none"
        raise DataError(
            f"data {path} holds no split {split!r}; its splits: {other}",
            hint=f"--data {path}:{next(iter(splits))}" if splits else f"--data {path}/FILE...",
        )
    return splits[split], [f for name, v in splits.items() if name != split for f in v]


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
