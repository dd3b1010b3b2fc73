"""Weights of a directory: what a rank reads is what it holds, and what is wrong is said first."""

import itertools
import json
import math
import os
import random
import struct
import time

import pytest

from hocket.spec.errors import CheckpointError, WeightsError
from hocket.spec.tensor_file import TensorEntry, TensorFile, write_tensors
from tests.families import FAMILIES, LLAMA
from tests.models.test_weights import Case, save, tensors_of

pytestmark = pytest.mark.torch


def test_a_box_is_read_and_nothing_else(tmp_path, monkeypatch):
    import torch

    from hocket.models import disk_tensor

    draw = random.Random(7)
    for case in range(60):
        shape = tuple(draw.randint(1, 9) for _ in range(draw.randint(0, 4)))
        dtype, code = draw.choice([(torch.float32, "F32"), (torch.bfloat16, "BF16")])
        whole = torch.randn(shape).to(dtype)
        path = tmp_path / f"{case}.safetensors"
        raw = whole.reshape(-1).view(torch.uint8).numpy()
        odd = TensorEntry(name="odd", dtype="U8", shape=(draw.randint(0, 3),))  # nothing is aligned
        write_tensors(
            path, [odd, TensorEntry(name="x", dtype=code, shape=shape)], [bytes(odd.num_bytes), raw]
        )
        box = []
        for n in shape:
            start = draw.randrange(n)
            box.append(slice(start, draw.randint(start + 1, n)))
        monkeypatch.setattr(disk_tensor, "STAGED_BYTES", draw.choice([4, 24, 100, 1 << 20]))
        file = TensorFile(path)
        before = file.bytes_read
        found = torch.empty(whole[tuple(box)].shape)
        disk_tensor.DiskTensor(file, "x").read(box, found)
        assert torch.equal(found, whole[tuple(box)].float()), (shape, box)
        assert file.bytes_read - before == found.numel() * dtype.itemsize
    # Cut short while it is open: said, where a mapped file would end the process.
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(CheckpointError, match="it ends before byte"):
        file.buffer("x")


LAYOUTS = {"tp2": (2, (4,)), "pp2": (1, (2, 2)), "tp2.pp2": (2, (1, 3)), "tp4.pp2": (4, (2, 2))}


@pytest.mark.parametrize(
    ("family", "shards", "dtype"),
    [
        ("llama", 1, "float16"),
        ("llama", 3, "bfloat16"),
        ("llama_tied", 2, "bfloat16"),
        ("gpt2", 1, "float32"),
        ("phi3", 2, "float16"),
        ("mixtral", 3, "bfloat16"),
    ],
)
def test_a_rank_reads_its_slices_alone(family, shards, dtype, tmp_path):
    import torch

    kind = getattr(torch, dtype)
    tensors = {name: t.to(kind) for name, t in tensors_of(FAMILIES[family]).items()}
    source = save(tmp_path, tensors, FAMILIES[family], shards=shards)
    files = sorted(tmp_path.glob("*.safetensors"))
    headers = sum(8 + struct.unpack("<Q", file.read_bytes()[:8])[0] for file in files)
    case = Case(FAMILIES[family])
    for degree, bounds in LAYOUTS.values():
        for index, stage in itertools.product(range(degree), range(len(bounds))):
            module, placements = case.stage(
                source, degree=degree, index=index, bounds=bounds, stage=stage
            )
            held = {name for name, _ in module.named_parameters()}  # of a tie, one
            mine = sum(
                math.prod(block.size) * kind.itemsize
                for name in held
                for block in placements[name].blocks
            )
            assert case.bytes_read == headers + mine
            if len(bounds) == 2:
                assert mine < 0.75 * sum(t.numel() * kind.itemsize for t in tensors.values())


def raw(path, header, body=b"", length=None):
    path.write_bytes(struct.pack("<Q", len(header) if length is None else length) + header + body)


def row(shape, at, dtype="F32"):
    end = at + math.prod(shape) * 4
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}


HOSTILE = {
    "offsets that overlap": ({"a": row([2], 0), "b": row([2], 4)}, 12, "is at 4..12"),
    "offsets with a gap": ({"a": row([1], 0), "b": row([1], 8)}, 12, "is at 8..12"),
    "offsets beyond the end": ({"a": row([4], 0)}, 8, "its tensors are 16 bytes"),
    "a shape in fractions": ({"a": {**row([1], 0), "shape": [1.0]}}, 4, "not an integer"),
    "a shape below zero": ({"a": {**row([1], 0), "shape": [-1, -1]}}, 4, "not an integer"),
    "a shape beyond all": ({"a": {**row([1], 0), "shape": [10**30]}}, 4, "is at"),
    "an offset that is true": ({"a": {**row([1], 0), "data_offsets": [0, True]}}, 1, "whole"),
    "an unknown dtype": ({"a": row([1], 0, "C64")}, 4, "unknown dtype 'C64'"),
    "no dtype": ({"a": {"shape": [1], "data_offsets": [0, 4]}}, 4, "dtype"),
    "no rows": ({"a": 5}, 4, "not subscriptable"),
    "metadata that is a list": ({"__metadata__": [1], "a": row([1], 0)}, 4, "metadata"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_headers_are_refused_before_anything_is_made(name, tmp_path):
    header, size, said = HOSTILE[name]
    source = save(tmp_path, {})
    raw(tmp_path / "model.safetensors", json.dumps(header).encode(), bytes(size))
    with pytest.raises(WeightsError, match=said):
        Case(LLAMA).stage(source)


def test_what_would_cost_much_is_refused_quickly(tmp_path):
    source = save(tmp_path, {})
    file = tmp_path / "model.safetensors"
    case = Case(LLAMA)
    begun = time.perf_counter()
    rows = ",".join(
        f'"{n}":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}' for n in range(1_000_000)
    )
    raw(file, f"{{{rows}}}".encode())
    written = time.perf_counter()
    with pytest.raises(WeightsError, match="1000000 tensors, more than 250000"):
        case.stage(source)
    assert time.perf_counter() - written < max(2.0, written - begun)
    raw(file, b"{}", length=1 << 40)
    with pytest.raises(WeightsError, match="header claims 1099511627776 bytes"):
        case.stage(source)
    raw(file, b'{"a":1,"a":2}')
    with pytest.raises(WeightsError, match="a name occurs twice"):
        case.stage(source)
    raw(file, b"[" * 100_000)
    with pytest.raises(WeightsError, match="not a whole safetensors file"):
        case.stage(source)
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(WeightsError, match="not a regular file"):
        case.stage(source)


def test_names_of_a_file_are_never_paths_nor_printed_raw(tmp_path):
    import torch

    odd = {"../../escape": torch.ones(1), "a\x1b[2Jb": torch.ones(1), "n" * 5000: torch.ones(1)}
    source = save(tmp_path, {**tensors_of(LLAMA), **odd})
    with pytest.raises(WeightsError, match=r"unexpected \.\./\.\./escape") as caught:
        Case(LLAMA).stage(source)
    assert "\x1b" not in caught.value.message
    assert len(caught.value.message) < 1000


def test_dtypes_are_held_against_the_model(tmp_path):
    import torch

    tensors = tensors_of(LLAMA)
    tensors["model.norm.weight"] = torch.ones(32, dtype=torch.int8)
    with pytest.raises(WeightsError, match=r"model\.norm\.weight is I8 in the file, a float"):
        Case(LLAMA).stage(save(tmp_path, tensors))
    tensors["model.norm.weight"] = torch.ones(32).to(torch.float8_e4m3fn)
    with pytest.raises(WeightsError, match="has dtype F8_E4M3; known: F64"):
        Case(LLAMA).stage(save(tmp_path, tensors))


@pytest.mark.parametrize(
    ("index", "said"),
    [
        ('{"weight_map": [1]}', "cannot be read"),
        ('{"weight_map": {"a": 3}}', "something else than files"),
        ("[" * 100_000, "cannot be read"),
        ('{"weight_map": {"a": "/etc/passwd"}}', "not a file in its folder"),
        ('{"weight_map": {"a": ".."}}', "not a regular file"),
        ('{"weight_map": {"a": "not-there.safetensors"}}', "No such file"),
    ],
)
def test_an_index_is_read_with_suspicion(index, said, tmp_path):
    source = save(tmp_path, {})
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(WeightsError, match=said):
        Case(LLAMA).stage(source)


def test_a_tensor_in_two_files_is_refused(tmp_path):
    source = save(tmp_path, tensors_of(LLAMA), shards=2)
    one, other = sorted(tmp_path.glob("model-*.safetensors"))
    other.write_bytes(one.read_bytes())
    with pytest.raises(WeightsError, match=r"is both in model-1\.safetensors and in"):
        Case(LLAMA).stage(source)


@pytest.mark.ranks
def test_no_rank_holds_a_copy_of_the_model(ranks, tmp_path):
    """Peak memory of the process itself, while four ranks read and then export 68 MB."""
    import torch

    config = {
        **LLAMA, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8,
        "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 8192,
    }  # fmt: skip
    case = Case(config)
    generator = torch.Generator().manual_seed(1)
    tensors = {
        name: torch.randn(p.shape, generator=generator).to(torch.bfloat16)
        for name, p in case.skeleton.named_parameters()
    }
    save(tmp_path / "model", tensors, config, shards=3)
    size = sum(t.numel() * 2 for t in tensors.values())
    largest = max(t.numel() * 2 for t in tensors.values())
    layouts = ["tp2.pp2", "dp2.tp2:zero=2", "dp2.pp2:microbatches=2"]
    rows = ranks.run(
        "tests.models.cases:read_and_export", 4, backend="shm", directory=str(tmp_path / "model"),
        layouts=layouts, to=str(tmp_path / "out"),
    )  # fmt: skip
    slack = 12e6  # the allocator's own, and one staging buffer
    for layout, counted in zip(layouts, zip(*rows, strict=True), strict=True):
        for rank in counted:
            assert rank["read"] < 0.6 * size, (layout, rank)
            # The system's own count of what was read: nothing was taken behind our back.
            assert abs(rank["rchar"] - rank["read"]) < 100_000, (layout, rank)
            assert rank["reading"] < rank["held"] + slack < size, (layout, rank)
            assert rank["exporting"] < 2 * largest + slack, (layout, rank)
        assert all(rank["same"] for rank in counted), layout
