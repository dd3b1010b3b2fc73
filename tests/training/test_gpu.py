"""One GPU: bf16, compiled blocks, metrics with utilization, a resumed run, fp8, and offload."""

from __future__ import annotations

import dataclasses
import json

import pytest

from hocket.catalogue import models as catalogue
from hocket.launch import Launcher
from hocket.schedules.registry import build as build_schedule
from hocket.spec.layout import Layout
from hocket.spec.run import RunFolder, RunSpec, TrainOptions, Workload, write_text
from hocket.training import data
from hocket.training.tokenizer import byte_tokenizer

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]


def test_one_gpu_trains_and_resumes(tmp_path) -> None:
    from hocket.training.utilization import peak_flops

    torch = pytest.importorskip("torch")
    text = tmp_path / "x.txt"
    text.write_text("".join(f"line {i} says {i * i} and no more.\n" for i in range(4000)))
    folder = RunFolder(tmp_path / "run")
    data.prepare(folder.data, byte_tokenizer(), [text], seq_len=128, global_batch=8)
    layout = Layout(microbatches=2)
    options = TrainOptions(
        steps=30, lr=3e-3, save_every=10, eval_every=10, device="cuda", compile=True
    )
    spec = RunSpec(
        model="tiny-llama",
        config={**catalogue.config("tiny-llama"), "vocab_size": 257},
        layout=layout,
        workload=Workload(seq_len=128, global_batch=8, dtype="bf16"),
        options=options,
    )
    write_text(folder.spec_file, spec.to_json())
    write_text(folder.schedule_file, str(build_schedule(layout, 2)))

    def rows() -> list[dict[str, float]]:
        with Launcher(device="cuda") as launcher:
            launcher.run(
                "hocket.training.rank:main",
                1,
                {"run": str(folder.path)},
                startup_timeout=300.0,
                silence_timeout=300.0,
            )
        return [json.loads(line) for line in folder.metrics_file.read_text().splitlines()]

    first = rows()
    assert [row["step"] for row in first] == list(range(1, 31))
    assert first[-1]["loss"] < first[0]["loss"] - 1
    known = peak_flops(torch.cuda.get_device_name()) is not None
    assert all(("mfu" in row) == known for row in first)
    assert folder.timeline_file.exists()
    resumed = dataclasses.replace(spec, options=dataclasses.replace(options, resume=True))
    write_text(folder.spec_file, resumed.to_json())
    (folder.checkpoints / "latest").write_text("step-000020\n")
    second = rows()
    assert [row["step"] for row in second] == list(range(1, 31))
    assert second[-1]["loss"] == pytest.approx(first[-1]["loss"], abs=0.05)


def stepped(dtype: str = "bf16", offload: str = "none") -> tuple[list[float], int]:
    """Losses of ten steps of a model of 8 wide layers, and the most that its activations held."""
    import torch

    from hocket.runtime.mesh import Mesh
    from hocket.runtime.record import Recorder
    from hocket.training.build import build_model, build_optimizer

    config = {
        **catalogue.config("tiny-llama"), "hidden_size": 1024, "intermediate_size": 4096,
        "num_hidden_layers": 8, "vocab_size": 512,
    }  # fmt: skip
    spec = RunSpec(
        model="wide",
        config=config,
        layout=Layout(microbatches=1, offload=offload),
        workload=Workload(seq_len=128, global_batch=32, dtype=dtype),
        options=TrainOptions(dropout=0.0, device="cuda"),
    )
    mesh = Mesh.single("cuda", Recorder(0))
    *_, parallel = build_model(spec, mesh, None)
    optimizer = build_optimizer(parallel, spec.options)
    ids = torch.randint(0, 512, (32, 129), device="cuda")
    positions = torch.arange(128, device="cuda").expand(32, -1).contiguous()
    batch = {"input_ids": ids[:, :-1], "labels": ids[:, 1:], "position_ids": positions}
    losses, most = [], 0
    for _ in range(10):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        losses.append(float(parallel.forward_backward([batch])))
        most = max(most, torch.cuda.max_memory_allocated() - before)
        optimizer.step(1e-3)
    return losses, most


def test_activations_in_host_memory_change_nothing_but_memory() -> None:
    torch = pytest.importorskip("torch")
    torch.manual_seed(3)
    plain, held = stepped()
    torch.manual_seed(3)
    moved, less = stepped(offload="activations")
    assert moved == pytest.approx(plain, rel=1e-4)  # some of CUDA's sums vary in order
    assert less < 0.6 * held


def test_fp8_learns_as_bf16_does() -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("torchao")
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no products of 8-bit floats")
    torch.manual_seed(3)
    wide, _ = stepped()
    torch.manual_seed(3)
    narrow, _ = stepped("fp8")
    assert narrow != wide
    assert narrow == pytest.approx(wide, rel=0.05)
