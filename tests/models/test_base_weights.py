"""The fingerprint of a base: of its values, whatever files they are in."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from hocket.models.base_weights import base_fingerprint, require_base
from hocket.spec.errors import WeightsError
from hocket.spec.tensor_file import TensorEntry, TensorFile, write_tensors

pytestmark = pytest.mark.train
NAMES = ("a.weight", "b.weight", "norm.weight")
SIZES = (4000, 8000, 16)


def write(folder: Path, values: dict[str, bytes], shards: int = 1) -> Path:
    import json

    folder.mkdir(exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    names = list(values)
    weight_map = {}
    for shard in range(shards):
        mine = names[shard::shards]
        file = "model.safetensors" if shards == 1 else f"model-{shard}.safetensors"
        weight_map |= dict.fromkeys(mine, file)
        entries = [TensorEntry(name=n, dtype="F32", shape=(len(values[n]) // 4,)) for n in mine]
        write_tensors(folder / file, entries, [values[n] for n in mine])
    if shards > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def values(**changed: bytes) -> dict[str, bytes]:
    sizes = enumerate(zip(NAMES, SIZES, strict=True), 1)
    found = {name: bytes([i]) * (4 * size) for i, (name, size) in sizes}
    return found | {name.replace("_", "."): value for name, value in changed.items()}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "hocket" / "checksums"


def changed_byte(values: dict[str, bytes], name: str, at: int) -> dict[str, bytes]:
    """With one bit of one byte turned."""
    data = bytearray(values[name])
    data[at] ^= 1
    return values | {name: bytes(data)}


def test_every_byte_counts(tmp_path: Path) -> None:
    first = base_fingerprint(write(tmp_path / "one", values()))
    assert first.startswith("3 tensors, 48,064 bytes, ")
    assert base_fingerprint(write(tmp_path / "two", values(), shards=2)) == first
    for name, size in zip(NAMES, SIZES, strict=True):
        for at in (0, 4 * size - 1):
            other = write(tmp_path / "other", changed_byte(values(), name, at))
            assert base_fingerprint(other) != first, (name, at)
    turned = values()
    turned[NAMES[0]], turned[NAMES[1]] = turned[NAMES[1]], turned[NAMES[0]]
    assert base_fingerprint(write(tmp_path / "other", turned)) != first


def test_an_adapter_knows_its_base(tmp_path: Path) -> None:
    first = base_fingerprint(write(tmp_path / "one", values()))
    other = write(tmp_path / "other", changed_byte(values(), NAMES[1], 7))
    require_base("it", first, tmp_path / "one")
    require_base("it", None, other)  # of an adapter that does not name one
    with pytest.raises(WeightsError, match="was trained on other weights") as caught:
        require_base("it", first, other)
    assert first in caught.value.message
    assert base_fingerprint(other) in caught.value.message


def test_a_sampled_fingerprint_of_an_earlier_version_counts_sizes(tmp_path: Path) -> None:
    base = write(tmp_path / "one", values())
    require_base("it", "3 tensors, 48,064 bytes, crc32 0badf00d", base)
    with pytest.raises(WeightsError, match="was trained on other weights"):
        require_base("it", "3 tensors, 48,060 bytes, crc32 0badf00d", base)


def test_a_file_is_read_once_for_each_version_of_it(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[str] = []
    crc32 = TensorFile.crc32
    monkeypatch.setattr(
        TensorFile, "crc32", lambda file, name: (reads.append(name), crc32(file, name))[1]
    )
    now = time.time_ns
    base = write(tmp_path / "one", values(), shards=2)
    first = base_fingerprint(base)
    assert sorted(reads) == sorted(NAMES)
    assert not cache.exists()  # files this new may still change within one tick of their times
    monkeypatch.setattr(time, "time_ns", lambda: now() + 60_000_000_000)
    for expected in (NAMES, ()):
        reads.clear()
        assert base_fingerprint(base) == first
        assert sorted(reads) == sorted(expected)
    shard = base / "model-0.safetensors"
    before = shard.stat()
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns))  # its time can be put back
    assert shard.stat().st_mtime_ns == before.st_mtime_ns
    reads.clear()
    assert base_fingerprint(base) != first
    assert sorted(reads) == sorted(NAMES[::2])  # of that file alone
    for note in cache.iterdir():
        note.write_text("{")
    reads.clear()
    base_fingerprint(base)
    assert sorted(reads) == sorted(NAMES)
