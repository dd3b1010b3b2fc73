"""`--optimizer adamw_8bit`: moments in 8 bits, against bitsandbytes' own class, in every layout."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hocket.jobs.request import request
from hocket.spec.errors import HocketError, OptionError
from hocket.spec.run import TrainOptions

pytest.importorskip("bitsandbytes")
pytestmark = pytest.mark.train

OPTIONS = TrainOptions(optimizer="adamw_8bit", lr=3e-3, weight_decay=0.1)


def parameters() -> dict[str, nn.Parameter]:
    torch.manual_seed(0)
    shapes = {"wide": (64, 100), "odd": (83, 61), "small": (30, 40), "norm": (5000,)}
    return {name: nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()}


def give_gradients(held: dict[str, nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in held.values():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def test_steps_are_those_of_the_library_bit_for_bit() -> None:
    """Values, codes and scales, of matrices with and without whole blocks."""
    from bitsandbytes.optim import AdamW8bit

    from hocket.training.optimizer import Optimizer

    ours, theirs = parameters(), parameters()
    optimizer = Optimizer(ours.items(), OPTIONS)
    values = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8}
    groups = [
        {"params": [theirs["wide"], theirs["odd"], theirs["small"]], "weight_decay": 0.1},
        {"params": [theirs["norm"]], "weight_decay": 0.0},
    ]
    library = AdamW8bit(groups, **values)
    for step in range(1, 6):
        give_gradients(ours, step)
        give_gradients(theirs, step)
        optimizer.step(3e-3)
        library.step()
    state = optimizer.state_tensors()
    for name, parameter in ours.items():
        assert torch.equal(parameter, theirs[name]), name
        expected = library.state[theirs[name]]
        assert torch.equal(state[name]["exp_avg"], expected["state1"])
        assert torch.equal(state[name]["exp_avg_sq"], expected["state2"])
        assert state[name]["step"] == 5
        if name != "small":
            assert state[name]["exp_avg"].dtype == torch.uint8
            assert torch.equal(state[name]["exp_avg_absmax"], expected["absmax1"])
            assert torch.equal(state[name]["exp_avg_sq_absmax"], expected["absmax2"])
    assert state["small"].keys() == {"step", "exp_avg", "exp_avg_sq"}


def test_bytes_of_a_value_are_one_and_a_scale() -> None:
    from hocket.spec.precision import state_bytes
    from hocket.training.optimizer import Optimizer

    held = {"w": nn.Parameter(torch.zeros(256, 512))}
    state = Optimizer(held.items(), OPTIONS).state_tensors()["w"]
    moments = sum(t.nbytes for key, t in state.items() if key != "step")
    assert moments == 256 * 512 * 2.03125
    assert state_bytes("fp32", None, "adamw_8bit").optimizer == 2.03125
    assert state_bytes("bf16", None, "adamw_8bit").optimizer == 6.03125


def test_a_skipped_step_changes_nothing() -> None:
    from hocket.training.optimizer import Optimizer

    held = parameters()
    optimizer = Optimizer(held.items(), OPTIONS)
    give_gradients(held, 1)
    optimizer.step(1e-3)
    before = [t.clone() for t in (*held.values(), *optimizer.tensors())]
    give_gradients(held, 2)
    optimizer.step(1e-3, torch.ones(()))
    after = [*held.values(), *optimizer.tensors()]
    assert all(map(torch.equal, before, after))
    optimizer.step(1e-3, torch.zeros(()))
    assert optimizer.state_tensors()["wide"]["step"] == 2


def test_masters_of_bf16_are_stepped_with_moments_in_8_bits() -> None:
    from hocket.training.optimizer import Optimizer

    held = {n: nn.Parameter(p.detach().bfloat16()) for n, p in parameters().items()}
    for parameter in held.values():
        parameter.grad_dtype = torch.float32
    masters = {n: nn.Parameter(p.detach().float()) for n, p in held.items()}
    low, exact = Optimizer(held.items(), OPTIONS), Optimizer(masters.items(), OPTIONS)
    for step in (1, 2):
        give_gradients(held, step)
        give_gradients(masters, step)
        low.step(1e-3)
        exact.step(1e-3)
    for name, parameter in held.items():
        assert torch.equal(low.masters[name], masters[name])
        assert torch.equal(parameter, masters[name].bfloat16())


def llama(folder: Path) -> str:
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=257, hidden_size=64, intermediate_size=160, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


LAYOUTS = (
    "dp2", "tp2:sequence_parallel=true", "dp2:zero=1", "dp2:zero=2,microbatches=2", "dp2:zero=3",
    "pp2:schedule=zero-bubble", "dp2:zero=1,offload=optimizer", "cp2",
)  # fmt: skip


@pytest.mark.ranks
@pytest.mark.timeout(240)
@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_compute_what_one_process_on_the_library_computes(
    tmp_path: Path, layout: str
) -> None:
    from hocket.jobs.check import check_layout

    sizes = {"steps": 3, "seq_len": 32, "global_batch": 4}
    asked = {"model": llama(tmp_path), "layout": layout, "optimizer": "adamw_8bit"}
    assert check_layout(request({**asked, **sizes})).ok


@pytest.mark.ranks
@pytest.mark.timeout(240)
@pytest.mark.usefixtures("warm")
def test_a_run_holds_less_as_predicted_and_resumes_on_its_layout_and_another(
    tmp_path: Path,
) -> None:
    from hocket.jobs.train import train_model

    model = llama(tmp_path / "base")
    data = tmp_path / "text.txt"
    data.write_text("a line of text to learn from\n" * 200)
    values = {
        "model": model, "data": data, "tokenizer": "bytes", "seq_len": 32, "global_batch": 4,
        "eval_fraction": 0.0, "cluster": "none", "lr": 3e-3,
    }  # fmt: skip
    job = {**values, "steps": 6, "save_every": 3, "memory_per_rank": "1GB"}
    whole = {**job, "layout": "tp2.dp2:zero=1", "optimizer": "adamw_8bit"}
    train_model(request({**whole, "run": tmp_path / "whole"}))
    for name in ("same", "other"):
        shutil.copytree(tmp_path / "whole", tmp_path / name)
        shutil.rmtree(tmp_path / name / "checkpoints" / "step-000006")
        shutil.rmtree(tmp_path / name / "model")
    again = {"model": model, "resume": True, "cluster": "none"}
    train_model(request({**again, "run": tmp_path / "same"}))
    train_model(request({**again, "run": tmp_path / "other", "layout": "pp2"}))
    train_model(request({**job, "run": tmp_path / "plain", "layout": "tp2.dp2:zero=1"}))
    with pytest.raises(HocketError, match="optimizer is adamw; the run"):
        train_model(request({**again, "run": tmp_path / "same", "optimizer": "adamw"}))

    def rows(run: str) -> list[float]:
        lines = (tmp_path / run / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["loss"] for line in lines]

    def tensors(run: str) -> bytes:
        return (tmp_path / run / "model" / "model.safetensors").read_bytes()

    assert rows("same") == rows("whole")
    assert tensors("same") == tensors("whole")
    assert rows("other") == pytest.approx(rows("whole")[-len(rows("other")) :], abs=2e-2)
    assert rows("other")[-1] < rows("whole")[0] - 0.5
    assert tensors("other") != tensors("whole")

    def optimizer(run: str) -> int:
        ranks = json.loads((tmp_path / run / "memory.json").read_text())
        return max(rank["optimizer"] for rank in ranks)

    wide, small = 4 * (2 * 64 * 64 + 3 * 64 * 160) + 2 * 257 * 64, 4 * (2 * 64 * 32 + 128) + 64
    expected = (2.03125 * wide + 8 * small) / (8 * (wide + small))
    assert optimizer("whole") / optimizer("plain") == pytest.approx(expected, rel=0.02)

    from hocket.cost.measured_memory import gpu_step, memory_rows
    from hocket.models.trace import trace
    from hocket.spec.run import RunFolder
    from hocket.spec.schedule import Schedule
    from hocket.training.memory_forecast import forecast_memory

    folder = RunFolder(tmp_path / "whole")
    spec, schedule = folder.load(), Schedule.parse(folder.schedule_file.read_text())
    rows_of = memory_rows(gpu_step(trace(spec.config, dtype="fp32"), spec, schedule))
    (replayed, *_) = forecast_memory(spec, None)
    assert replayed.optimizer == pytest.approx(optimizer("whole"), rel=0.02)
    assert rows_of[0]["optimizer"] == pytest.approx(optimizer("whole"), rel=0.02)


@pytest.mark.usefixtures("warm_workers")
def test_a_rehearsal_counts_its_bytes_and_its_wait() -> None:
    from hocket.jobs.rehearse import prepare_rehearsal, rehearse_job

    asked = {"model": "tiny-llama", "layout": "dp2.tp2:zero=1", "seq_len": 64, "device": "cuda"}
    job = request({**asked, "dtype": "bf16", "optimizer": "adamw_8bit"})
    found = rehearse_job(prepare_rehearsal(job, rows=1, gpu="H100"))
    for rank in found.executed.values():
        assert not rank.error
        assert [read["count"] for read in rank.host_reads] == [1]
        # Of each rank's quarter of the state: master 4 bytes, moments 2 in 8 bits, 8 of the norms.
        elements = rank.standing["parameters"] / 2 / 2
        assert rank.standing["optimizer"] == pytest.approx(6.03 * elements, rel=0.01)


def test_the_plan_counts_less_and_names_the_option() -> None:
    from hocket.jobs.plan import plan_training, train_command

    asked: dict[str, Any] = {"cluster": "8xH100-SXM", "seq_len": 4096, "global_batch": 64}
    one = {**asked, "layout": "dp8:microbatches=8,zero=2"}
    plain = plan_training("llama-3-8b", **one)
    small = plan_training("llama-3-8b", **one, optimizer="adamw_8bit")
    saved = plain.best.memory_by_kind["optimizer"] - small.best.memory_by_kind["optimizer"]
    assert saved == pytest.approx(8.03e9 / 8 * (8 - 2.03125), rel=0.01)
    assert small.best.step_seconds.median < plain.best.step_seconds.median
    assert train_command(small)[-2:] == ["--optimizer", "adamw_8bit"]
    with pytest.raises(OptionError, match="other software is estimated"):
        plan_training("llama-3-8b", **asked, optimizer="adamw_8bit", stack="megatron-core")
    with pytest.raises(OptionError, match="unknown optimizer 'lion'"):
        plan_training("llama-3-8b", **asked, optimizer="lion")


def test_another_optimizer_is_rejected_by_name() -> None:
    with pytest.raises(OptionError, match="optimizer 'sgd'"):
        request({"model": "tiny-llama", "optimizer": "sgd"})
