"""The fingerprint of a base: of its values, whatever files they are in."""

from __future__ import annotations

from pathlib import Path

import pytest

from hocket.models import base_weights
from hocket.models.base_weights import base_fingerprint, require_base
from hocket.spec.errors import WeightsError
from hocket.spec.tensor_file import TensorEntry, write_tensors

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


@pytest.mark.parametrize("sampled", [False, True])
def test_other_values_of_the_same_shape_have_another(
    sampled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if sampled:
        monkeypatch.setattr(base_weights, "_READ", 3000)
        monkeypatch.setattr(base_weights, "_LEAST", 1000)
    first = base_fingerprint(write(tmp_path / "one", values()))
    assert base_fingerprint(write(tmp_path / "two", values(), shards=2)) == first
    for name, size in zip(NAMES, SIZES, strict=True):
        changed = base_fingerprint(write(tmp_path / "other", values(**{name: b"\7" * (4 * size)})))
        assert changed != first, name
    turned = values()
    turned[NAMES[0]], turned[NAMES[1]] = turned[NAMES[1]], turned[NAMES[0]]
    assert base_fingerprint(write(tmp_path / "other", turned)) != first
    require_base("it", first, tmp_path / "one")
    require_base("it", None, tmp_path / "other")  # of an adapter that does not name one
    with pytest.raises(WeightsError, match="was trained on other weights") as caught:
        require_base("it", first, tmp_path / "other")
    assert first in caught.value.message
    assert base_fingerprint(tmp_path / "other") in caught.value.message
