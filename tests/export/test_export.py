"""Whatever the layout, the export is the directory that transformers itself would have written."""

from __future__ import annotations

import json
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from hocket.spec.errors import CheckpointError, OptionError
from hocket.spec.placement import Placement
from hocket.spec.plan import Split, WeightSegment
from hocket.spec.prediction_layers import COUNTS

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from hocket.runtime.checkpoint import CheckpointWorld, save_checkpoint  # noqa: E402
from hocket.training.export import ModelFiles, export_checkpoint, export_ranks  # noqa: E402

COMMON = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 32}
CONFIGS = {
    "llama": {
        **COMMON, "model_type": "llama", "intermediate_size": 24, "num_key_value_heads": 2,
        "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
    },
    "tied": {
        **COMMON, "model_type": "llama", "intermediate_size": 24, "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "mixtral": {
        **COMMON, "model_type": "mixtral", "intermediate_size": 24, "num_key_value_heads": 2,
        "num_local_experts": 4,
    },
    "gpt2": {
        "model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 4, "vocab_size": 32,
        "n_positions": 64,
    },
}  # fmt: skip


def whole_model(config: dict, dtype: torch.dtype = torch.float32):
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(5)
    values = {k: v for k, v in config.items() if k != "model_type"}
    built = AutoConfig.for_model(config["model_type"], **values)
    return AutoModelForCausalLM.from_config(built, dtype=dtype).eval()


class Part:
    """One of two ranks: matrices in halves (attention's fused ones in six pieces), some whole."""

    def __init__(self, model, rank: int, lost: str = "") -> None:
        self.placements, self.tensors = {}, {}
        for name, tensor in model.named_parameters():
            shape = tuple(tensor.shape)
            kind = name.split(".")[-2]
            if kind == "c_attn":
                segments = (WeightSegment(units=4, size=4),) * 3
                split = Split(style="column", segments=segments, dims={"weight": 1, "bias": 0})
                placement = split.place(name, name.split(".")[-1], shape, rank, 2)
            elif len(shape) > 1 and kind != "wpe":
                dim = 1 if "embed" in name else 0
                split = Split(
                    style="column", segments=(WeightSegment(units=shape[dim]),), dims={"x": dim}
                )
                placement = split.place(name, "x", shape, rank, 2)
            elif rank == 1:
                continue  # held by the first rank only, as by another stage
            else:
                placement = Placement.whole(name, shape)
            if name == lost and rank == 1:
                continue
            local = torch.empty(placement.local_shape, dtype=tensor.dtype)
            for in_global, in_local in placement.pairs():
                local[in_local] = tensor.detach()[in_global]
            self.placements[name], self.tensors[name] = placement, local
        if rank == 1 and model.config.tie_word_embeddings and "lm_head.weight" not in self.tensors:
            # The last stage holds the head as a tensor of its own, tied to the first stage's.
            owner = next(n for n in self.placements if "embed" in n or "wte" in n)
            whole = model.lm_head.weight.detach().clone()
            self.placements["lm_head.weight"] = Placement.whole(
                "lm_head.weight", tuple(whole.shape), tie=owner
            )
            self.tensors["lm_head.weight"] = whole

    def groups(self) -> list[list[str]]:
        return [list(self.tensors)]

    def reading(self, group: list[str]) -> Any:
        """Nothing is on its way."""
        return nullcontext()

    writing = reading

    def named_parameters(self):
        return self.tensors.items()


def on_two_ranks(call) -> list:
    """Run `call(rank, world)` on two threads that meet where they vote; none votes against."""
    barrier, found = threading.Barrier(2), [None, None]

    def run(rank: int) -> None:
        world = CheckpointWorld(rank=rank, size=2, all_agree=lambda _: barrier.wait(60) < 2)
        found[rank] = call(rank, world)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def saved(folder: Path, model, **others) -> Path:
    return on_two_ranks(
        lambda rank, world: save_checkpoint(
            folder, step=7, parallel=Part(model, rank, **others), optimizer_state={},
            layout="tp2", model="m", world=world,
        )
    )[0]  # fmt: skip


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_loads_back_with_the_same_logits(tmp_path: Path, name: str) -> None:
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    model = whole_model(CONFIGS[name])
    to = tmp_path / "out"
    export_checkpoint(saved(tmp_path / "c", model), to, ModelFiles(config=CONFIGS[name]))
    loaded, info = AutoModelForCausalLM.from_pretrained(to, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    ids = torch.arange(10)[None]
    with torch.no_grad():
        assert torch.equal(loaded.eval()(ids).logits, model(ids).logits)
    # and the files hold what transformers' own export holds, name by name
    model.save_pretrained(tmp_path / "theirs")
    ours, theirs = (
        load_file(to / "model.safetensors"),
        load_file(tmp_path / "theirs" / "model.safetensors"),
    )
    assert sorted(ours) == sorted(theirs)
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    assert sorted(p.name for p in to.iterdir()) == [
        "config.json", "generation_config.json", "model.safetensors",
    ]  # fmt: skip
    ids = ("bos_token_id", "eos_token_id")
    assert [getattr(loaded.generation_config, i) for i in ids] == [
        getattr(model.generation_config, i) for i in ids
    ]


def test_bf16_comes_out_bit_for_bit_in_several_files(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = whole_model(CONFIGS["mixtral"], torch.bfloat16)
    to = tmp_path / "out"
    files = ModelFiles(config=CONFIGS["mixtral"])
    export_checkpoint(saved(tmp_path / "c", model), to, files, shard_bytes=10_000)
    index = json.loads((to / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    assert index["metadata"]["total_size"] == sum(p.numel() for p in model.parameters()) * 2
    loaded = AutoModelForCausalLM.from_pretrained(to)
    assert loaded.dtype == torch.bfloat16
    for (key, one), (_, other) in zip(
        model.named_parameters(), loaded.named_parameters(), strict=True
    ):
        assert torch.equal(one, other), key


def test_live_ranks_export(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = whole_model(CONFIGS["llama"])
    to = tmp_path / "model"
    files = ModelFiles(config=CONFIGS["llama"])

    def call(rank: int, world: CheckpointWorld) -> None:
        part = Part(model, rank)
        import hocket.runtime.checkpoint as room

        part.mesh = type("Mesh", (), {"coordinate": {"dp": 0, "cp": 0}, "world": world})()
        assert room.CheckpointWorld is not None
        export_ranks(part, to, files)

    import hocket.runtime.checkpoint as room

    before = room.CheckpointWorld.of
    room.CheckpointWorld.of = classmethod(lambda cls, mesh: mesh.world)
    try:
        on_two_ranks(call)
    finally:
        room.CheckpointWorld.of = before
    loaded = AutoModelForCausalLM.from_pretrained(to)
    for (key, one), (_, other) in zip(
        model.named_parameters(), loaded.named_parameters(), strict=True
    ):
        assert torch.equal(one, other), key
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("layers", [None, 0, 1])
@pytest.mark.parametrize("key", COUNTS)
def test_an_export_has_no_layers_of_multi_token_prediction(
    tmp_path: Path, key: str, layers: int | None
) -> None:
    """Its configuration asks for none, whose weights no file of it holds, and is else the same."""
    more = {} if layers is None else {key: layers}
    config = {**CONFIGS["llama"], **more}
    to = tmp_path / "out"
    export_checkpoint(saved(tmp_path / "c", whole_model(config)), to, ModelFiles(config=config))
    written = json.loads((to / "config.json").read_text())
    assert {key: written.get(key) for key in config} == {**config, **dict.fromkeys(more, 0)}
    assert (key in written) == (layers is not None)


def test_the_tokenizer_goes_along(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    from hocket.training.tokenizer import byte_tokenizer

    byte_tokenizer().save(tmp_path / "tokenizer")
    model = whole_model(CONFIGS["llama"])
    files = ModelFiles(config=CONFIGS["llama"], tokenizer=tmp_path / "tokenizer")
    to = export_checkpoint(saved(tmp_path / "c", model), tmp_path / "out", files)
    tokenizer = AutoTokenizer.from_pretrained(to)
    assert tokenizer("hé")["input_ids"] == list("hé".encode())


def test_what_no_rank_holds_is_refused(tmp_path: Path) -> None:
    model = whole_model(CONFIGS["llama"])
    name = "model.layers.1.mlp.up_proj.weight"
    path = saved(tmp_path / "c", model, lost=name)
    with pytest.raises(CheckpointError, match=name):
        export_checkpoint(path, tmp_path / "out", ModelFiles(config=CONFIGS["llama"]))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c"]


def test_an_occupied_directory_is_refused(tmp_path: Path) -> None:
    model = whole_model(CONFIGS["llama"])
    (tmp_path / "thesis.txt").write_text("all of it")
    with pytest.raises(OptionError, match="not empty"):
        export_checkpoint(
            saved(tmp_path / "c", model), tmp_path, ModelFiles(config=CONFIGS["llama"])
        )
