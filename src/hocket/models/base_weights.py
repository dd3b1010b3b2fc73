"""Base weights: the fingerprint by which an adapter knows the weights that it was trained on.

    names, dtypes, shapes and bytes of all tensors -> "291 tensors, 16,060,522,496 bytes, crc32 ..."

It does not depend on folders, files or their times: the same weights in other shards, or in another
folder, have the same one. Never imports torch.
"""

from __future__ import annotations

import zlib
from pathlib import Path

from hocket.models.weight_headers import headers
from hocket.spec.errors import CheckpointError, WeightsError

METADATA = "hocket_base"
"""The key of an adapter file's own metadata that holds the fingerprint of its base."""
_READ, _LEAST = 256 << 20, 16 << 10
"""Bytes that are read in all: weights of more are sampled, in the middle of each tensor, of which
at least so much is read. Training moves every tensor, or all of a layer's."""


def base_fingerprint(directory: Path) -> str:
    """Size and checksum of the weights in a directory.

    Raises:
        WeightsError: a file is missing or damaged.
    """
    files = headers(directory)
    each, found = max(_LEAST, _READ // max(1, len(files))), 0
    entries = [(file.entries[name], file) for name, file in sorted(files.items())]
    whole = sum(entry.num_bytes for entry, _ in entries) <= _READ
    for entry, file in entries:
        size = entry.num_bytes if whole else min(each, entry.num_bytes)
        sample = bytearray(size)
        try:
            file.read_into(entry.name, (entry.num_bytes - size) // 2, memoryview(sample))
        except CheckpointError as error:
            raise WeightsError(error.message) from None
        header = repr((entry.name, entry.dtype, tuple(entry.shape))).encode()
        found = zlib.crc32(sample, zlib.crc32(header, found))
    total = sum(entry.num_bytes for entry, _ in entries)
    return f"{len(entries):,} tensors, {total:,} bytes, crc32 {found:08x}"


def require_base(adapter: object, recorded: str | None, directory: Path) -> None:
    """Raise WeightsError where a directory's weights are not those that an adapter was trained on.

    Args:
        adapter: names it, and what holds it.
        recorded: the fingerprint of its base; None: of an adapter that has none.
    """
    if recorded is None:
        return
    there = base_fingerprint(directory)
    if there != recorded:
        raise WeightsError(
            f"{adapter} was trained on other weights than {directory} holds now\n"
            f"  trained on: {recorded}\n  there now:  {there}",
            hint=f"put the earlier weights back into {directory}, or train a new adapter on these",
        )
