"""One GPU: bf16, compiled blocks, metrics with utilization, and a resumed run."""

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
