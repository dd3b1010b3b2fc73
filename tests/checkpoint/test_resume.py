"""Six steps are three steps, a stop, a resume and three more, to the last bit."""

from __future__ import annotations

import itertools
import json
import shutil
import zlib
from pathlib import Path

import pytest

from hocket.spec.layout import Layout
from tests.families import EXPERTS, FAMILIES
from tests.ranks import RankPool
from tests.rotation import part

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.ranks, pytest.mark.timeout(240)]

TRAIN = "tests.checkpoint.cases:train"


@pytest.mark.parametrize(
    ("family", "layout"),
    part(
        [
            ("llama_tied", "dp2.pp2.tp2:microbatches=2"),
            ("gpt2", "dp2.pp2.tp2:microbatches=2"),  # with dropout
            ("qwen3", "tp2"),
            ("gpt2", "tp2"),
            ("llama_tied", "dp2.pp2.tp2:microbatches=2,zero=2"),
            ("gpt2", "dp2.tp2:microbatches=2,zero=3"),
            ("llama", "dp2:zero=3,offload=params"),
            ("llama", "dp2:zero=1,offload=optimizer"),
            ("mixtral", "dp4.ep2:zero=1"),
            ("gpt_oss", "dp2.tp2.ep4.etp1:zero=3"),
        ],
        2,
    ),
)
def test_resuming_changes_no_bit(ranks: RankPool, tmp_path: Path, family: str, layout: str) -> None:
    size = Layout.parse(layout).world_size
    options = {"family": family, "layout": layout}
    straight = ranks.run(TRAIN, size, first=0, last=6, folder=str(tmp_path / "a"), **options)
    half = ranks.run(TRAIN, size, first=0, last=3, folder=str(tmp_path / "b"), **options)
    rest = ranks.run(TRAIN, size, first=3, last=6, folder=str(tmp_path / "b"), **options)
    for one, two, three in zip(straight, half, rest, strict=True):
        assert one["steps"] == two["steps"] + three["steps"]
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


LAYOUTS = (
    "dp1",
    "dp2",
    "dp2:zero=1",
    "dp2:zero=3",
    "tp2",
    "pp2:microbatches=2",
    "dp2.tp2:zero=2",
    "dp2.pp2:microbatches=2,zero=3",
    "tp2.pp2:microbatches=2",
    "dp4:zero=2,shard=2",
)


EXPERT_PAIRS = [
    ("mixtral", "dp2.ep2", "tp2"),
    ("mixtral", "tp2", "dp1"),
    ("mixtral", "dp1", "dp2.pp2.ep2:microbatches=2"),
    ("mixtral", "dp4.ep2:zero=1", "dp2.tp2.ep4.etp1:zero=3"),
    ("mixtral", "dp2.tp2.ep2:zero=2", "dp4.ep2"),
    ("deepseek_v3", "dp2.ep2:zero=3", "dp1"),
]


@pytest.mark.parametrize(
    ("family", "one", "other"),
    [
        *(("llama_tied", *p) for p in part([*itertools.permutations(LAYOUTS, 2)], 15)),
        EXPERT_PAIRS[0],
        *part(EXPERT_PAIRS[1:], 2),
    ],
)
def test_another_layout_goes_on(
    ranks: RankPool, tmp_path: Path, family: str, one: str, other: str
) -> None:
    """Values, moments and steps are the saved ones, bit for bit; so the next loss is the one that
    the run would have had, within the bound of a check."""
    from hocket.runtime.checkpoint import _tensor
    from hocket.runtime.reshard import Resharded
    from hocket.spec import checkpoint as words

    folder = tmp_path / "a"
    sizes = [Layout.parse(each).world_size for each in (one, other)]
    options = {"family": family, "folder": str(folder)}
    ranks.run(TRAIN, sizes[0], layout=one, first=0, last=2, **options)
    shutil.copytree(folder, tmp_path / "b")
    straight = ranks.run(TRAIN, sizes[0], layout=one, first=2, last=3, **options)
    options["folder"] = str(tmp_path / "b")
    ranks.run(TRAIN, sizes[1], layout=other, first=2, last=2, **options)  # saved as it is
    found = []
    for each in ("a", "b"):
        path = tmp_path / each / "step-000002"
        manifest = words.verify_checkpoint(path)
        files = [words.open_shard(path, shard) for shard in manifest.shards]
        found.append(Resharded(manifest, files, _tensor))
        assert manifest.layout == str(Layout.parse(one if each == "a" else other))
    # A tied head is a tensor of its own only where another stage has it.
    names = found[0].names() & found[1].names()
    assert "model.embed_tokens.weight" in names
    assert (found[0].names() ^ found[1].names()) <= {"lm_head.weight"}
    for name in names:
        assert torch.equal(found[0].value(name), found[1].value(name)), name
        assert sorted(found[0].states(name)) == sorted(found[1].states(name)) != []
        for state in found[0].states(name):
            before, after = (each.state(name, state) for each in found)
            assert torch.equal(before, after), (name, state)
    rest = ranks.run(TRAIN, sizes[1], layout=other, first=2, last=3, **options)
    for (loss, norm), (again, grown) in zip(straight[0]["steps"], rest[0]["steps"], strict=True):
        assert again == pytest.approx(loss, abs=1e-5)
        assert grown == pytest.approx(norm, rel=1e-4)


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        *((family, "dp2.pp2.tp2:microbatches=2,zero=0") for family in ("llama_tied", "phi3")),
        ("mixtral", "dp2.pp2.tp2:microbatches=2,zero=0"),
        ("llama_tied", "dp2.pp2.tp2:microbatches=2,zero=3"),
        ("mixtral", "dp2.tp2.ep4.etp1:zero=3"),
        ("gpt_oss", "dp4.ep2"),
    ],
)
def test_exports_of_ranks_and_of_their_checkpoint_are_what_the_ranks_hold(
    ranks: RankPool, tmp_path: Path, family: str, layout: str
) -> None:
    held = ranks.run(
        TRAIN, Layout.parse(layout).world_size, family=family, layout=layout, first=0, last=1,
        folder=str(tmp_path / "c"), to=str(tmp_path / "live"),
    )  # fmt: skip
    from transformers import AutoModelForCausalLM

    from hocket.spec.placement import Placement
    from hocket.training.export import ModelFiles, export_checkpoint

    files = ModelFiles(config={**FAMILIES, **EXPERTS}[family])
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


@pytest.mark.parametrize("layout", ["dp2:zero=3", "dp2.pp2:microbatches=2,zero=3", "tp2"])
def test_a_disk_that_is_full_on_one_rank_fails_the_save_on_all(
    ranks: RankPool, tmp_path: Path, layout: str
) -> None:
    """Ranks gather parameters while they write: a rank that cannot write still takes part."""
    size = Layout.parse(layout).world_size
    found = ranks.run("tests.checkpoint.cases:refused", size, layout=layout, folder=str(tmp_path))
    assert [mine for _, mine, _, _ in found] == [rank == 1 for rank in range(size)]
    assert "rank-00001.safetensors: No space left on device" in found[1][0]
    assert "another rank could not write" in found[0][0]
    assert all(saved for _, _, saved, _ in found)
    assert found[0][3] == []
