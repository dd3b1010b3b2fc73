"""Base weights: the fingerprint by which an adapter knows the weights that it was trained on.

    names, dtypes, shapes and bytes of all tensors -> "291 tensors, 16,060,522,496 bytes, crc32s .."

It does not depend on folders, files or their times: the same weights in other shards, or in another
folder, have the same one. Every byte is read once for each version of a file: the checksums of its
tensors are kept in the user's cache. Never imports torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hocket.models.weight_headers import headers
from hocket.spec import downloads
from hocket.spec.errors import CheckpointError, WeightsError
from hocket.spec.files import MALFORMED, parse_json, read_text, write_text
from hocket.spec.tensor_file import TensorFile
from hocket.spec.user_cache import cache_folder

METADATA = "hocket_base"
"""The key of an adapter file's own metadata that holds the fingerprint of its base."""
_THREADS = 8
_SETTLED = 2_000_000_000
"""Nanoseconds that a file must be old for its checksums to be kept: a change within the clock tick
of its times leaves them as they are."""
_SAMPLED = re.compile(r", crc32 [0-9a-f]{8}$")
"""Ends a fingerprint of an earlier version, which read a part of each tensor."""


def base_fingerprint(directory: Path) -> str:
    """Number and size of the tensors of a directory, and a checksum of them all.

    Raises:
        WeightsError: a file is missing or damaged.
    """
    began = time.time_ns()
    where = headers(directory)
    files = {file.path: file for file in where.values()}
    versions = {path: file.version() for path, file in files.items()}
    kept = {path: _kept(file) for path, file in files.items()}
    absent = [(name, file) for name, file in where.items() if not kept[file.path]]
    for path, sums in _read(directory, absent).items():
        kept[path] = sums
        version = files[path].version()
        if version == versions[path] and began - max(version[-2:]) >= _SETTLED:
            _keep(files[path], sums)
    whole, total = 0, 0
    for name, file in sorted(where.items()):
        entry = file.entries[name]
        row = (name, entry.dtype, tuple(entry.shape), kept[file.path][name])
        whole, total = zlib.crc32(repr(row).encode(), whole), total + entry.num_bytes
    return f"{len(where):,} tensors, {total:,} bytes, crc32s {whole:08x}"


def _read(directory: Path, tensors: list[tuple[str, TensorFile]]) -> dict[Path, dict[str, int]]:
    """The checksums of tensors, by file. In threads: reads and checksums run without the GIL."""
    total = sum(file.entries[name].num_bytes for name, file in tensors)
    found: dict[Path, dict[str, int]] = {file.path: {} for _, file in tensors}
    done = 0
    with (
        downloads.following(f"{directory}: checksums", brief=True) as follow,
        ThreadPoolExecutor(_THREADS) as pool,
    ):
        sums = pool.map(lambda one: one[1].crc32(one[0]), tensors)
        for name, file in tensors:
            try:
                found[file.path][name] = next(sums)
            except CheckpointError as error:
                raise WeightsError(error.message) from None
            done += file.entries[name].num_bytes
            follow(done, total)
    return found


def _note(file: TensorFile) -> Path:
    place = hashlib.sha256(str(file.path.resolve()).encode()).hexdigest()[:32]
    return cache_folder("checksums") / f"{place}.json"


def _kept(file: TensorFile) -> dict[str, int]:
    """The checksums of a file's tensors from the cache; empty where it has none of this version."""
    with contextlib.suppress(OSError, *MALFORMED):
        note = parse_json(read_text(_note(file)))
        sums = {name: int(note["crc32"][name]) for name in file.entries}
        return sums if note["version"] == file.version() else {}
    return {}


def _keep(file: TensorFile, sums: dict[str, int]) -> None:
    note = _note(file)
    with contextlib.suppress(OSError):  # a cache that cannot be written: all is read next time
        note.parent.mkdir(parents=True, exist_ok=True)
        write_text(note, json.dumps({"version": file.version(), "crc32": sums}))


def require_base(adapter: object, recorded: str | None, directory: Path) -> None:
    """Raise WeightsError where a directory's weights are not those that an adapter was trained on.

    Args:
        adapter: names it, and what holds it.
        recorded: the fingerprint of its base, of one of an earlier version sizes alone; None: of an
            adapter that has none.
    """
    if recorded is None:
        return
    there = base_fingerprint(directory)
    if sampled := _SAMPLED.search(recorded):
        recorded, there = recorded[: sampled.start()], there.rpartition(",")[0]
    if there != recorded:
        raise WeightsError(
            f"{adapter} was trained on other weights than {directory} holds now\n"
            f"  trained on: {recorded}\n  there now:  {there}",
            hint=f"put the earlier weights back into {directory}, or train a new adapter on these",
        )
