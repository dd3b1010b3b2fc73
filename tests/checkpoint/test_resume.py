"""Six steps are three steps, a stop, a resume and three more, to the last bit."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import pytest

from hocket.spec.errors import CheckpointError
from hocket.spec.layout import Layout
from tests.check.test_matrix import MODEL_CODE
from tests.families import FAMILIES
from tests.ranks import RankPool

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(240)]

TRAIN = "tests.checkpoint.cases:train"


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("llama_tied", "dp2.pp2.tp2:microbatches=2"),
        ("gpt2", "dp2.pp2.tp2:microbatches=2"),  # with dropout
        ("qwen3", "tp2"),
        ("gpt2", "tp2"),
        ("llama_tied", "dp2.pp2.tp2:microbatches=2,zero=2"),
        ("gpt2", "dp2.tp2:microbatches=2,zero=3"),
        ("llama", "dp2:zero=3,offload=params"),
        ("llama", "dp2:zero=1,offload=optimizer"),
    ],
)
def test_resuming_changes_no_bit(ranks: RankPool, tmp_path: Path, family: str, layout: str) -> None:
    ranks.launcher.preload(["hocket.training.build", "hocket.training.export", *MODEL_CODE])
    size = Layout.parse(layout).world_size
    options = {"family": family, "layout": layout}
    straight = ranks.run(TRAIN, size, first=0, last=6, folder=str(tmp_path / "a"), **options)
    half = ranks.run(TRAIN, size, first=0, last=3, folder=str(tmp_path / "b"), **options)
    rest = ranks.run(TRAIN, size, first=3, last=6, folder=str(tmp_path / "b"), **options)
    for one, two, three in zip(straight, half, rest, strict=True):
        assert one["told"] == two["told"] + three["told"]
        assert one["sums"] == three["sums"]
        assert one["sums"] != two["sums"]


def test_a_damaged_shard_of_one_rank_takes_all_ranks_back(ranks: RankPool, tmp_path: Path) -> None:
    options = {"family": "llama", "layout": "tp2", "folder": str(tmp_path)}
    two = ranks.run(TRAIN, 2, first=0, last=2, **options)
    ranks.run(TRAIN, 2, first=2, last=4, **options)
    shard = tmp_path / "step-000004" / "rank-00001.safetensors"
    data = bytearray(shard.read_bytes())
    data[-9] ^= 16
    shard.write_bytes(data)
    again = ranks.run(TRAIN, 2, first=2, last=2, **options)
    assert [rank["sums"] for rank in again] == [rank["sums"] for rank in two]


def test_another_layout_is_refused(ranks: RankPool, tmp_path: Path) -> None:
    options = {"family": "llama", "folder": str(tmp_path)}
    ranks.run(TRAIN, 2, first=0, last=1, layout="tp2", **options)
    with pytest.raises(CheckpointError, match=r"written by the layout tp2 on 2 ranks") as caught:
        ranks.run(TRAIN, 2, first=1, last=2, layout="dp2", **options)
    assert caught.value.hint == "--layout tp2"


@pytest.mark.parametrize(
    ("family", "zero"), [("llama_tied", 0), ("mixtral", 0), ("phi3", 0), ("llama_tied", 3)]
)
def test_exports_of_ranks_and_of_their_checkpoint_are_what_the_ranks_hold(
    ranks: RankPool, tmp_path: Path, family: str, zero: int
) -> None:
    layout = f"dp2.pp2.tp2:microbatches=2,zero={zero}"
    held = ranks.run(
        TRAIN, 8, family=family, layout=layout, first=0, last=1, folder=str(tmp_path / "c"),
        to=str(tmp_path / "live"),
    )  # fmt: skip
    from transformers import AutoModelForCausalLM

    from hocket.spec.placement import Placement
    from hocket.training.export import ModelFiles, export_checkpoint

    files = ModelFiles(config=FAMILIES[family])
    export_checkpoint(tmp_path / "c" / "step-000001", tmp_path / "later", files)
    for name in ("model.safetensors", "config.json", "generation_config.json"):
        live, later = tmp_path / "live" / name, tmp_path / "later" / name
        assert live.read_bytes() == later.read_bytes(), name
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "live")
    whole = dict(loaded.named_parameters(remove_duplicate=False))
    seen = set()
    for rank in held:
        for name, found in rank["where"].items():
            if f"parameter {name}" not in rank["sums"]:
                continue
            placement = Placement.from_json(found)
            local = whole[name].new_empty(placement.local_shape)
            for in_global, in_local in placement.pairs():
                local[in_local] = whole[name].detach()[in_global]
            checksum = zlib.crc32(local.detach().numpy().tobytes())
            assert checksum == rank["sums"][f"parameter {name}"], name
            seen.add(name)
    assert seen == set(whole)
    assert json.loads((tmp_path / "live" / "config.json").read_text())["dtype"] == "float32"
