"""Manifest: what one checkpoint holds, and the folder of checkpoints; standard library only.

CHECKPOINTS/
  step-000100/
    manifest.json             this file's words, checksummed
    rank-00000.safetensors    one file per rank: all that the rank holds
  step-000200/ ...
  latest                      the name of the folder to resume from

A folder carries its final name only when all of it is on the disk, so a half-written one is never
seen. The manifest knows the global shape of every tensor and the boxes that each rank holds
(Placement), so that a whole tensor can be assembled from the files without any rank.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from hocket.spec import renamed
from hocket.spec.errors import CheckpointError
from hocket.spec.files import MALFORMED, json_crc32, parse_json, read_text
from hocket.spec.placement import Placement
from hocket.spec.tensor_file import TensorFile

FORMAT = "hocket checkpoint"
VERSION = 1
MANIFEST = "manifest.json"
LATEST = "latest"
MOST_MANIFEST = 1_000_000_000
"""Largest manifest that is read, in bytes: some 200 a tensor of each rank."""

_FOLDER = re.compile(r"step-([0-9]{6,})")
_SHARD = re.compile(r"rank-[0-9]{5,}\.safetensors")
_VOLATILE = ("_name_or_path", "transformers_version", "torch_dtype", "dtype")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorRecord:
    """One tensor of one rank's file.

    Attributes:
        key: its name in the file.
        kind: `parameter`, `optimizer`, `buffer` or `random`.
        name: global name of the parameter it is or belongs to; of a random state, its own name.
        state: of an optimizer tensor, which (`exp_avg`, `exp_avg_sq`, `step`, `master` ...).
        dtype, shape: of the local tensor, in safetensors' words.
        placed: whether the blocks of the parameter's Placement hold for it.
        crc32: checksum of its bytes.
    """

    key: str
    kind: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    crc32: int
    state: str | None = None
    placed: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shard:
    """All that one rank wrote: where each parameter lies in the whole, and its tensors."""

    rank: int
    file: str
    placements: Mapping[str, Placement]
    tensors: tuple[TensorRecord, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "rank": self.rank,
            "file": self.file,
            "placements": [p.to_json() for p in self.placements.values()],
            "tensors": [dict(vars(t)) for t in self.tensors],
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Shard:
        """The inverse of `to_json`. Raises ValueError for records that contradict each other."""
        if not _SHARD.fullmatch(data["file"]):
            raise ValueError(f"{data['file']!r} is not the name of a shard")
        placements = [Placement.from_json(p) for p in data["placements"]]
        tensors = tuple(TensorRecord(**{**t, "shape": tuple(t["shape"])}) for t in data["tensors"])
        found = cls(
            rank=int(data["rank"]),
            file=data["file"],
            placements={p.name: p for p in placements},
            tensors=tensors,
        )
        for record in tensors:
            texts = (record.key, record.kind, record.name, record.dtype, record.state or "")
            if not all(isinstance(text, str) for text in texts) or type(record.placed) is not bool:
                raise ValueError(f"the record of {record.key!r:.60} holds values of other types")
            if record.kind == "parameter" or (record.kind == "optimizer" and record.placed):
                placement = found.placements.get(record.name)
                if placement is None or placement.local_shape != record.shape:
                    raise ValueError(f"{record.key!r:.60} is of another shape than its blocks")
        return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """What one checkpoint holds. JSON form with an exact inverse.

    Attributes:
        step: optimizer steps done.
        layout: text form of the layout that wrote it.
        model: `config_hash` of the model's configuration.
        cursor: where the data stands.
        extra: whatever else the loop needs to go on (JSON values).
        versions: of what wrote it.
        shards: one per rank, in order of rank.
    """

    step: int
    layout: str
    model: str
    cursor: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    shards: tuple[Shard, ...] = ()

    def to_json(self) -> str:
        body = {
            "step": self.step,
            "layout": self.layout,
            "model": self.model,
            "cursor": dict(self.cursor),
            "extra": dict(self.extra),
            "versions": dict(self.versions),
            "shards": [s.to_json() for s in self.shards],
        }
        head = {"format": FORMAT, "version": VERSION, "crc32": json_crc32(body), "manifest": body}
        return json.dumps(head, separators=(",", ":"), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """The inverse of `to_json`. Raises ValueError for anything damaged or foreign."""
        head = parse_json(text)
        if not isinstance(head, dict) or head.get("format") != FORMAT:
            raise ValueError("it is not a checkpoint manifest")
        if head.get("version") != VERSION:
            raise ValueError(f"it is of version {head.get('version')}, this one reads {VERSION}")
        body = head["manifest"]
        if json_crc32(body) != head["crc32"]:
            raise ValueError("its checksum differs")
        shards = tuple(Shard.from_json(s) for s in body.pop("shards"))
        if [s.rank for s in shards] != list(range(len(shards))):
            raise ValueError("its ranks are not complete")
        found = cls(**body, shards=shards)
        texts, tables = (found.layout, found.model), (found.cursor, found.extra, found.versions)
        if (
            type(found.step) is not int
            or found.step < 0
            or not all(isinstance(text, str) for text in texts)
            or not all(isinstance(table, dict) for table in tables)
        ):
            raise ValueError("it holds values of other types")
        return dataclasses.replace(found, layout=renamed.layout_text(found.layout))

    def whole(self, kind: str = "parameter") -> dict[str, Placement]:
        """Every parameter once, by name: the placement of the first rank that holds it."""
        found: dict[str, Placement] = {}
        for shard in self.shards:
            for record in shard.tensors:
                if record.kind == kind and record.placed:
                    found.setdefault(record.name, shard.placements[record.name])
        return found


def config_hash(config: Mapping[str, Any]) -> str:
    """A name for a model's configuration that ignores where and by what version it was written."""
    kept = {k: v for k, v in config.items() if k not in _VOLATILE}
    return hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()[:32]


def step_folder(folder: Path, step: int) -> Path:
    """The folder of one step's checkpoint."""
    return folder / f"step-{step:06d}"


def shard_file(rank: int) -> str:
    """The name of one rank's file."""
    return f"rank-{rank:05d}.safetensors"


def checkpoints(folder: Path) -> list[Path]:
    """Every finished checkpoint below `folder`, the newest first."""
    if not folder.is_dir():
        return []
    found = [(int(m[1]), p) for p in folder.iterdir() if (m := _FOLDER.fullmatch(p.name))]
    return [path for _, path in sorted(found, reverse=True) if path.is_dir()]


def delete_old(
    folder: Path, step: int, keep: int, keep_every: int = 0, damaged: Collection[str] = ()
) -> None:
    """Delete checkpoints older than that of `step` and the `keep` - 1 before it, but for those of
    multiples of `keep_every` steps.

    Args:
        damaged: names of those that could not be resumed from. They are old and not counted: where
            saves are by time, no later one has their step and replaces them.
    """
    newest = step_folder(folder, step)
    found = checkpoints(folder)
    spoiled = [path for path in found if path.name in damaged and path != newest]
    whole = [path for path in found if path not in spoiled]
    for path in spoiled + whole[whole.index(newest) + max(keep, 1) :]:
        if keep_every and int(path.name.removeprefix("step-")) % keep_every == 0:
            continue
        # The manifest goes first: a folder half deleted must not look like a checkpoint.
        (path / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(path, ignore_errors=True)


def resumable_checkpoints(folder: Path) -> Iterator[Path]:
    """The checkpoints to try on resuming: the one `latest` names, then older ones in turn."""
    found = checkpoints(folder)
    try:
        name = (folder / LATEST).read_text().strip()
    except (OSError, UnicodeDecodeError):
        name = ""
    match = _FOLDER.fullmatch(name)
    for path in found:
        at = _FOLDER.fullmatch(path.name)
        if match is None or (at is not None and int(at[1]) <= int(match[1])):
            yield path


def read_manifest(path: Path) -> Manifest:
    """The manifest of one checkpoint's folder. Raises CheckpointError if it is not whole."""
    try:
        return Manifest.from_json(read_text(path / MANIFEST, most_bytes=MOST_MANIFEST))
    except OSError as error:
        raise CheckpointError(f"{path} is incomplete: no {MANIFEST} ({error.strerror})") from None
    except (*MALFORMED, AssertionError) as error:
        raise CheckpointError(f"{path / MANIFEST} is damaged: {error}") from None


def open_shard(path: Path, shard: Shard, *, verify: bool = True) -> TensorFile:
    """One rank's file of the checkpoint `path`, held against its manifest.

    Raises:
        CheckpointError: the file is missing, holds other tensors than the manifest says, or
            (with `verify`) bytes whose checksum differs.
    """
    file = TensorFile(path / shard.file, most_tensors=len(shard.tensors))
    records = {r.key: r for r in shard.tensors}
    if set(records) != set(file.entries):
        odd = sorted(set(records) ^ set(file.entries))
        raise CheckpointError(f"{file.path} holds other tensors than the manifest: {odd[:4]}")
    for key, record in records.items():
        entry = file.entries[key]
        if (entry.dtype, entry.shape) != (record.dtype, record.shape):
            raise CheckpointError(
                f"{file.path}: {key} is {entry.dtype} {entry.shape}, "
                f"the manifest specifies {record.dtype} {record.shape}"
            )
        if verify and file.crc32(key) != record.crc32:
            raise CheckpointError(f"{file.path} is damaged: the checksum of {key} differs")
    return file


def verify_checkpoint(path: Path) -> Manifest:
    """Read every byte of one checkpoint. Raises CheckpointError if anything is not as written."""
    manifest = read_manifest(path)
    for shard in manifest.shards:
        with open_shard(path, shard):
            pass
    return manifest


def newest_whole(folder: Path) -> tuple[Path, Manifest, list[str]]:
    """The checkpoint to resume from, all of its bytes verified, and a note per one passed over.

    Raises:
        CheckpointError: there is none, or none is whole.
    """
    notes: list[str] = []
    for path in resumable_checkpoints(folder):
        try:
            return path, verify_checkpoint(path), notes
        except CheckpointError as error:
            notes.append(error.message)
    if notes:
        raise CheckpointError(f"no checkpoint in {folder} is whole: " + "; ".join(notes))
    raise CheckpointError(f"{folder} holds no checkpoint", hint="--save-every N saves them")


def sync_folder(path: Path) -> None:
    """Make the names in a folder last through a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
