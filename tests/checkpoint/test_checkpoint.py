"""A checkpoint comes back bit for bit, or says why it does not; half of one is never seen."""

from __future__ import annotations

import json
import os
import struct
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from hocket.spec import checkpoint as words
from hocket.spec.errors import CheckpointError, SaveError
from hocket.spec.files import json_crc32
from hocket.spec.placement import Placement, TensorBlock
from hocket.spec.tensor_file import TensorEntry, TensorFile, write_tensors

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from hocket.runtime.checkpoint import CheckpointWorld, latest, load_checkpoint, save_checkpoint  # noqa: E402

MODEL = words.config_hash({"hidden_size": 4, "_name_or_path": "here"})


class Held:
    """Two parameters as rank 1 of a tensor axis of 2 would hold them."""

    def __init__(self, seed: int, dtype: torch.dtype = torch.float32) -> None:
        generator = torch.Generator().manual_seed(seed)
        split = TensorBlock(start=(3, 0), local=(0, 0), size=(3, 4))
        self.placements = {
            "a.weight": Placement(
                name="a.weight", shape=(6, 4), local_shape=(3, 4), blocks=(split,), sharded=("tp",)
            ),
            "norm.weight": Placement.whole("norm.weight", (5,)),
        }
        self.tensors = {
            name: torch.randn(p.local_shape, generator=generator).to(dtype)
            for name, p in self.placements.items()
        }
        self.state = {
            name: {
                "exp_avg": torch.randn(t.shape, generator=generator),
                "exp_avg_sq": torch.rand(t.shape, generator=generator),
                "step": torch.tensor(float(seed)),
            }
            for name, t in self.tensors.items()
        }

    def named_parameters(self):
        return self.tensors.items()

    def groups(self) -> list[list[str]]:
        return [list(self.tensors)]

    def reading(self, group: list[str]) -> Any:
        """Nothing is on its way."""
        return nullcontext()

    writing = reading


def save(folder: Path, held: Held, step: int, **others):
    options = {"layout": "tp2", "model": MODEL, "cursor": {"sample": step * 8}}
    return save_checkpoint(
        folder, step=step, parallel=held, optimizer_state=held.state, **(options | others)
    )


def load(folder: Path, held: Held, **others):
    return load_checkpoint(folder, parallel=held, **({"layout": "tp2", "model": MODEL} | others))


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_bit_comes_back(tmp_path: Path, dtype: torch.dtype) -> None:
    held = Held(3, dtype)
    torch.manual_seed(11)
    save(tmp_path, held, 3, extra={"best": 1.25})
    drawn = torch.rand(4)

    other = Held(4, dtype)
    found = load(tmp_path, other)
    assert torch.equal(torch.rand(4), drawn)  # the generator stands where it stood
    assert found.step == 3
    assert found.cursor == {"sample": 24}
    assert found.extra == {"best": 1.25}
    assert found.notes == []
    for name, tensor in held.tensors.items():
        assert torch.equal(other.tensors[name], tensor)
        assert other.tensors[name].dtype == dtype
        for key, value in held.state[name].items():
            assert torch.equal(found.optimizer_state[name][key], value)


def test_the_files_are_ordinary_safetensors(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    held = Held(1, torch.bfloat16)
    path = save(tmp_path, held, 1)
    found = load_file(path / "rank-00000.safetensors")
    assert torch.equal(found["parameter/a.weight"], held.tensors["a.weight"])
    assert torch.equal(found["optimizer/exp_avg/a.weight"], held.state["a.weight"]["exp_avg"])


def test_manifest_knows_the_whole(tmp_path: Path) -> None:
    path = save(tmp_path, Held(1), 1)
    manifest = words.read_manifest(path)
    assert words.Manifest.from_json(manifest.to_json()) == manifest
    assert manifest.whole()["a.weight"].shape == (6, 4)
    assert manifest.whole()["a.weight"].blocks[0].start == (3, 0)


def test_last_two_stay(tmp_path: Path) -> None:
    for step in (2, 4, 6, 8):
        save(tmp_path, Held(step), step)
    assert [p.name for p in words.checkpoints(tmp_path)] == ["step-000008", "step-000006"]
    assert latest(tmp_path) == tmp_path / "step-000008"
    assert sorted(os.listdir(tmp_path)) == ["latest", "step-000006", "step-000008"]


def test_multiples_are_kept_for_good(tmp_path: Path) -> None:
    for step in range(1, 9):
        save(tmp_path, Held(step), step, keep=1, keep_every=3)
    assert [p.name[-1] for p in words.checkpoints(tmp_path)] == ["8", "6", "3"]


def test_a_damaged_checkpoint_is_not_one_of_those_that_stay(tmp_path: Path) -> None:
    """Else it would stay in place of the whole one, and the next damage would leave none. Saves by
    time do not come back to its step."""
    for step in (2, 4, 6):
        path = save(tmp_path, Held(step), step)
    flip(path / "rank-00000.safetensors", -1)
    found = load(tmp_path, Held(9))
    assert (found.step, list(found.damaged)) == (4, ["step-000006"])
    path = save(tmp_path, Held(7), 7, damaged=found.damaged)
    assert [p.name for p in words.checkpoints(tmp_path)] == ["step-000007", "step-000004"]
    flip(path / "rank-00000.safetensors", -1)
    assert load(tmp_path, Held(9)).step == 4
    save(tmp_path, Held(8), 7, damaged=["step-000007"])  # its step again: replaced, and whole
    assert load(tmp_path, Held(9)).step == 7


def test_a_damaged_checkpoint_newer_than_the_next_one_goes_too(tmp_path: Path) -> None:
    save(tmp_path, Held(1), 2)
    path = save(tmp_path, Held(2), 9)
    flip(path / "rank-00000.safetensors", -1)
    found = load(tmp_path, Held(9))
    save(tmp_path, Held(3), 5, damaged=found.damaged)
    assert [p.name for p in words.checkpoints(tmp_path)] == ["step-000005", "step-000002"]


def test_a_damaged_checkpoint_of_a_multiple_is_kept_for_good(tmp_path: Path) -> None:
    """A disk that could not be read once may be read again."""
    for step in (3, 4, 6, 7):
        save(tmp_path, Held(step), step, keep=1, keep_every=3, damaged=["step-000006"])
    assert [p.name[-1] for p in words.checkpoints(tmp_path)] == ["7", "6", "3"]


def test_a_step_saved_again_replaces_itself(tmp_path: Path) -> None:
    save(tmp_path, Held(1), 4)
    held = Held(2)
    save(tmp_path, held, 4)
    other = Held(5)
    load(tmp_path, other)
    assert torch.equal(other.tensors["a.weight"], held.tensors["a.weight"])


@pytest.mark.parametrize("at", [-1, -40, 8, 20, 0, 200])
def test_a_flipped_bit_falls_back_with_a_note(tmp_path: Path, at: int) -> None:
    first = Held(1)
    save(tmp_path, first, 1)
    path = save(tmp_path, Held(2), 2)
    flip(path / "rank-00000.safetensors", at)
    other = Held(9)
    found = load(tmp_path, other)
    assert found.step == 1
    assert "rank-00000.safetensors" in found.notes[0]
    assert torch.equal(other.tensors["a.weight"], first.tensors["a.weight"])


def test_a_changed_manifest_is_noticed(tmp_path: Path) -> None:
    save(tmp_path, Held(1), 1)
    path = save(tmp_path, Held(2), 2)
    text = (path / "manifest.json").read_text()
    assert '"sample":16' in text
    (path / "manifest.json").write_text(text.replace('"sample":16', '"sample":17'))
    found = load(tmp_path, Held(9))
    assert found.step == 1
    assert "checksum" in found.notes[0]


@pytest.mark.parametrize("lost", ["manifest.json", "rank-00000.safetensors"])
def test_an_incomplete_folder_is_refused(tmp_path: Path, lost: str) -> None:
    path = save(tmp_path, Held(1), 1)
    (path / lost).unlink()
    with pytest.raises(CheckpointError, match=lost):
        load(tmp_path, Held(9))


def test_a_save_that_dies_leaves_the_one_before(tmp_path: Path, monkeypatch) -> None:
    save(tmp_path, Held(1), 1)

    def die(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hocket.runtime.checkpoint.os.rename", die)
    with pytest.raises(SaveError, match="No space"):
        save(tmp_path, Held(2), 2)
    monkeypatch.undo()
    assert load(tmp_path, Held(9)).step == 1
    save(tmp_path, Held(2), 2)
    assert load(tmp_path, Held(9)).step == 2


def test_what_is_damaged_elsewhere_is_passed_over_here(tmp_path: Path) -> None:
    save(tmp_path, Held(1), 1)
    save(tmp_path, Held(2), 2)
    votes = iter([False, True, True])
    found = load(
        tmp_path, Held(9), world=CheckpointWorld(all_agree=lambda mine: mine and next(votes))
    )
    assert found.step == 1
    assert "another rank" in found.notes[0]


def test_another_layout_or_model_is_refused(tmp_path: Path) -> None:
    save(tmp_path, Held(1), 1)
    with pytest.raises(CheckpointError, match=r"tp2 on 1 ranks; this run has dp2") as caught:
        load(tmp_path, Held(1), layout="dp2")
    assert caught.value.hint == "--layout tp2"
    with pytest.raises(CheckpointError, match="another model"):
        load(tmp_path, Held(1), model=words.config_hash({"hidden_size": 5}))
    held = Held(1)
    held.placements["b"] = Placement.whole("b", (1,))
    held.tensors["b"] = torch.zeros(1)
    with pytest.raises(CheckpointError, match="b is not in the checkpoint"):
        load(tmp_path, held)
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        load(tmp_path / "none", held)


def test_the_hash_ignores_where_a_model_was_read() -> None:
    assert words.config_hash({"hidden_size": 4, "_name_or_path": "there"}) == MODEL
    assert words.config_hash({"hidden_size": 5}) != MODEL


def test_whole_checkpoints_are_found_without_ranks(tmp_path: Path) -> None:
    save(tmp_path, Held(1), 1)
    flip(save(tmp_path, Held(2), 2) / "rank-00000.safetensors", -1)
    path, manifest, notes = words.newest_whole(tmp_path)
    assert (path.name, manifest.step, len(notes)) == ("step-000001", 1, 1)


# --- files that mean harm ----------------------------------------------------------------------


def raw(path: Path, header: bytes, body: bytes = b"", length: int | None = None) -> Path:
    path.write_bytes(struct.pack("<Q", len(header) if length is None else length) + header + body)
    return path


ROW = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}


@pytest.mark.parametrize(
    ("header", "body", "length"),
    [
        (b"{}", b"", 1 << 62),
        (b"{}", b"extra", None),
        (b"[]", b"", None),
        (b"\xff", b"", None),
        (b"[" * 5000, b"", None),
        (b'{"a":' + json.dumps(ROW).encode() + b',"a":' + json.dumps(ROW).encode() + b"}",
         b"1234", None),
        (json.dumps({"a": {**ROW, "shape": [2]}}).encode(), b"1234", None),
        (json.dumps({"a": {**ROW, "shape": [-1, -1]}}).encode(), b"1234", None),
        (json.dumps({"a": {**ROW, "dtype": "X"}}).encode(), b"1234", None),
        (json.dumps({"a": ROW, "b": ROW}).encode(), b"1234", None),
    ],
)  # fmt: skip
def test_malformed_files_are_refused(tmp_path, header, body, length) -> None:
    with pytest.raises(CheckpointError):
        TensorFile(raw(tmp_path / "x.safetensors", header, body, length))


def test_a_shard_never_names_a_path(tmp_path: Path) -> None:
    path = save(tmp_path, Held(1), 1)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["manifest"]["shards"][0]["file"] = "../../etc/passwd"
    manifest["crc32"] = json_crc32(manifest["manifest"])
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="not the name of a shard"):
        words.read_manifest(path)


def test_written_tensors_read_back(tmp_path: Path) -> None:
    entries = [
        TensorEntry(name="x", dtype="U8", shape=(3,)),
        TensorEntry(name="empty", dtype="F32", shape=(0, 4)),
        TensorEntry(name="y", dtype="BF16", shape=(2, 1)),
    ]
    path = tmp_path / "t.safetensors"
    sums = write_tensors(path, entries, [b"abc", b"", b"wxyz"], {"format": "pt"})
    with TensorFile(path) as file:
        assert list(file.entries.values()) == entries
        assert bytes(file.buffer("y")) == b"wxyz"
        assert [file.crc32(e.name) for e in entries] == sums
        assert file.metadata == {"format": "pt"}
