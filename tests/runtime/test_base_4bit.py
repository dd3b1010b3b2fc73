"""A base in 4 bits, compared with dense matmuls of the dequantized weight and with bitsandbytes."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from torch import nn

from hocket.jobs.request import request
from hocket.spec.errors import HocketError, OptionError

pytest.importorskip("bitsandbytes")
pytestmark = pytest.mark.train


def llama(folder: Any, **sizes: int) -> str:
    import transformers

    torch.manual_seed(0)
    values = {
        "vocab_size": 257, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    }  # fmt: skip
    config = transformers.LlamaConfig(**(values | sizes))
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_matmul_and_its_gradient_are_those_of_the_dequantized_weight(dtype: torch.dtype) -> None:
    import bitsandbytes.functional as functions

    from hocket.runtime.base_4bit import BLOCK, _Frozen

    torch.manual_seed(0)
    weight = torch.randn(96, 128, dtype=dtype)
    packed, state = functions.quantize_4bit(weight, blocksize=BLOCK, quant_type="nf4")
    assert packed.nbytes + state.absmax.nbytes == 96 * 128 * 0.5625
    dense = functions.dequantize_4bit(packed, state)
    assert not torch.equal(dense, weight)
    inputs = [torch.randn(3, 5, 128, dtype=dtype).requires_grad_() for _ in range(2)]
    inputs[1].data.copy_(inputs[0].data)
    y = _Frozen.apply(inputs[0], packed, state)
    expected = nn.functional.linear(inputs[1], dense)
    assert torch.equal(y, expected)
    grad = torch.randn_like(expected)
    y.backward(grad)
    expected.backward(grad)
    assert torch.equal(inputs[0].grad, inputs[1].grad)


def test_shards_of_a_quantized_weight_are_quantized_shards() -> None:
    """Which makes a layout under tensor parallelism compute what one process computes."""
    import bitsandbytes.functional as functions

    from hocket.runtime.base_4bit import BLOCK

    def rounded(weight: torch.Tensor) -> torch.Tensor:
        found = functions.quantize_4bit(weight.contiguous(), blocksize=BLOCK, quant_type="nf4")
        return functions.dequantize_4bit(*found)

    torch.manual_seed(0)
    weight = torch.randn(96, 256)
    whole = rounded(weight)
    for dim in (0, 1):
        pieces = [rounded(piece) for piece in weight.chunk(2, dim)]
        assert torch.equal(torch.cat(pieces, dim), whole)


@pytest.mark.ranks
@pytest.mark.timeout(240)
@pytest.mark.usefixtures("warm")
def test_layouts_compute_what_peft_on_bitsandbytes_computes(tmp_path: Any) -> None:
    from hocket.jobs.check import check_layout

    model = llama(tmp_path)
    for layout in (
        "tp2:sequence_parallel=true", "dp2:zero=3", "pp2:schedule=zero-bubble,recompute=full",
    ):  # fmt: skip
        sizes = {"steps": 2, "seq_len": 32, "global_batch": 4}
        asked = {"model": model, "layout": layout, "lora_rank": 4, "quantize_base": "nf4"}
        report = check_layout(request({**asked, **sizes}))
        assert report.ok, layout


@pytest.mark.ranks
@pytest.mark.timeout(240)
@pytest.mark.usefixtures("warm")
def test_a_run_holds_less_as_predicted_and_resumes(tmp_path: Any) -> None:
    import json
    from pathlib import Path

    from hocket.jobs.train import train_model

    model = llama(tmp_path / "base", num_hidden_layers=4)
    data = tmp_path / "text.txt"
    data.write_text("a line of text to learn from\n" * 200)
    values = {
        "model": model, "data": data, "tokenizer": "bytes", "lora_rank": 4, "layout": "tp2",
        "seq_len": 32, "global_batch": 2, "eval_fraction": 0.0, "cluster": "none",
    }  # fmt: skip
    base = {"quantize_base": "nf4"}
    job = {**values, **base, "steps": 4, "save_every": 2}
    train_model(request({**job, "run": tmp_path / "whole"}))
    shutil.copytree(tmp_path / "whole", tmp_path / "two")
    shutil.rmtree(tmp_path / "two" / "checkpoints" / "step-000004")
    shutil.rmtree(tmp_path / "two" / "adapter")
    train_model(request({**values, "run": tmp_path / "plain", "steps": 1}))
    again = {"model": model, "run": tmp_path / "two", "resume": True}
    train_model(request({**again, "cluster": "none"}))

    def rows(run: str) -> list[dict[str, Any]]:
        lines = (tmp_path / run / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    assert [row["loss"] for row in rows("two")] == [row["loss"] for row in rows("whole")]

    def parameters(run: str) -> int:
        ranks = json.loads((Path(tmp_path) / run / "memory.json").read_text())
        return max(rank["parameters"] for rank in ranks)

    linear = 4 * (2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 256) // 2  # a rank's, of both
    saved = parameters("plain") - parameters("whole")
    assert saved == pytest.approx(linear * (4 - 0.5), rel=0.01)  # scales are buffers


def test_the_plan_counts_the_frozen_layers_in_their_bytes() -> None:
    from hocket.cost.adapters import adapted
    from hocket.jobs.plan import model_shape, plan_training

    shape = model_shape("llama-3-8b")
    plain, small = adapted(shape, 16), adapted(shape, 16, base="nf4")
    assert small.num_parameters == plain.num_parameters
    layer = next(iter(small.blocks[small.layers[0]].weights))
    linear = 32 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    stored = sum(
        w.elements * (1 - w.stored) for kind in small.layers for w in small.blocks[kind].weights
    )
    assert layer.frozen
    assert stored == pytest.approx(linear * (1 - 0.5625 / 2))
    asked = {"cluster": "1xRTX4090", "seq_len": 8192, "global_batch": 16, "lora_rank": 16}
    whole = plan_training("llama-3-8b", **asked)
    assert whole.best.layout.offloads("params")  # in 16 bits the card alone does not hold it
    found = plan_training("llama-3-8b", **asked, quantize_base="nf4")
    assert found.best.fits
    assert found.best.layout.offload == "none"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"quantize_base": "nf4"}, "no lora_rank is given"),
        ({"quantize_base": "nf5", "lora_rank": 4}, "unknown quantize_base 'nf5'"),
    ],
)
def test_what_cannot_be_quantized_is_rejected(given: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        request({"model": "tiny-llama", **given})


def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Entries that launchers are asked to run, as they are asked."""
    from hocket.launch.launcher import Launcher

    entries: list[str] = []
    run = Launcher.run

    def noted(self: Any, entry: str, *values: Any, **named: Any) -> Any:
        entries.append(entry)
        return run(self, entry, *values, **named)

    monkeypatch.setattr(Launcher, "run", noted)
    return entries


@pytest.mark.ranks
@pytest.mark.timeout(240)
@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize(
    ("layout", "sizes"),
    [
        ("tp2", {"hidden_size": 64, "intermediate_size": 64}),
        ("dp2", {"intermediate_size": 96}),
        ("dp2:data_parallel=threads", {"intermediate_size": 96}),
        ("pp2", {"intermediate_size": 96}),
    ],
)
def test_what_has_no_whole_blocks_is_rejected_before_ranks_start(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, layout: str, sizes: dict[str, int]
) -> None:
    from hocket.jobs.check import check_layout
    from hocket.jobs.train import train_model

    asked = {
        "model": llama(tmp_path / "base", **sizes), "layout": layout, "lora_rank": 4,
        "quantize_base": "nf4", "steps": 1, "seq_len": 32, "global_batch": 2,
    }  # fmt: skip
    entries = started(monkeypatch)
    if "threads" not in layout:
        with pytest.raises(HocketError, match="blocks of 64"):
            check_layout(request(asked))
    data = tmp_path / "text.txt"
    data.write_text("a line of text to learn from\n" * 200)
    tokens = {"data": data, "tokenizer": "bytes", "eval_fraction": 0.0, "cluster": "none"}
    with pytest.raises(HocketError, match="blocks of 64"):
        train_model(request({**asked, **tokens, "run": tmp_path / "run"}))
    assert entries[-1] == "hocket.ranks.adapters:main"
    assert not any("hocket.training" in entry for entry in entries)


@pytest.mark.ranks
@pytest.mark.timeout(240)
@pytest.mark.usefixtures("warm")
def test_a_stage_without_adapted_layers_is_rejected_before_ranks_start(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hocket.jobs.check import check_layout

    asked = {
        "model": llama(tmp_path), "layout": "pp2", "lora_rank": 4,
        "lora_targets": "model.layers.0.self_attn.q_proj", "steps": 1, "seq_len": 32,
        "global_batch": 2,
    }  # fmt: skip
    entries = started(monkeypatch)
    with pytest.raises(HocketError, match="holds none of the layers"):
        check_layout(request(asked))
    assert not any("hocket.training" in entry for entry in entries)


@pytest.mark.ranks
@pytest.mark.timeout(240)
@pytest.mark.usefixtures("warm")
def test_layers_that_keep_their_weight_transposed(tmp_path: Any) -> None:
    """GPT-2's `Conv1D`, [in, out], whole and split: bitsandbytes' layers hold [out, in]."""
    import transformers

    from hocket.jobs.check import check_layout

    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_embd=128, n_layer=2, n_head=4, n_positions=64, vocab_size=257, n_inner=256
    )
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    for layout, targets in (("tp2", "all-linear"), ("pp2:schedule=zero-bubble", "c_attn")):
        asked = {"model": str(tmp_path), "layout": layout, "lora_targets": targets}
        values = {"lora_rank": 4, "quantize_base": "nf4", "steps": 2, "seq_len": 16}
        report = check_layout(request({**asked, **values, "global_batch": 4}))
        assert report.ok, (layout, targets)
