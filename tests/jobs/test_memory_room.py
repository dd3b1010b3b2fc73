"""Jobs that this machine cannot hold: rejected before ranks start, with a layout that fits."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path

import pytest

from hocket.catalogue import models as catalogue
from hocket.cli.main import main
from hocket.jobs import memory
from hocket.launch import Launcher
from hocket.probing import devices
from hocket.runtime import host_memory
from hocket.schedules.registry import build_schedule
from hocket.spec.errors import LayoutError
from hocket.spec.layout import Layout
from hocket.spec.run import RunFolder, RunSpec, TrainOptions, Workload

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(120), pytest.mark.usefixtures("warm")]


def train(tmp_path: Path, *flags: str) -> int:
    data = tmp_path / "text.txt"
    data.write_text("One melody is dealt note by note to several voices. " * 400)
    return main(
        ["train", "tiny-llama", "--data", str(data), "--seq-len", "64", "--global-batch", "32",
         "--steps", "1", "--cluster", "none", "--run", str(tmp_path / "run"), *flags]
    )  # fmt: skip


def test_what_this_machine_cannot_hold_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ranks once started and were killed, as nothing compared the prediction with the machine."""
    monkeypatch.setattr(host_memory, "free_host_memory", lambda: 60 * 10**6)
    assert train(tmp_path, "--microbatches", "1") == 2
    error = capsys.readouterr().err
    assert "on its 1 rank, and this machine has 60 MB of memory free; fits at" in error
    fix = shlex.split(error.split("hint: ")[1])
    assert "microbatches=" in fix[fix.index("--layout") + 1]
    assert main(fix[1:]) == 0


def test_what_no_layout_makes_fit_names_the_planner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(host_memory, "free_host_memory", lambda: 10**6)
    assert train(tmp_path, "--layout", "dp2") == 2
    assert "hint: hocket plan tiny-llama --cluster 8xH100" in capsys.readouterr().err


def test_a_run_accumulates_until_it_fits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The whole batch once went through one forward, whatever the memory."""
    assert train(tmp_path, "--global-batch", "64", "--memory-per-rank", "60MB") == 0
    assert "8 microbatches instead of 1, so that it fits" in capsys.readouterr().out
    spec = RunFolder(tmp_path / "run").load()
    assert spec.layout.microbatches == 8


def gpu_job(layout: str) -> tuple[RunSpec, str]:
    spec = RunSpec(
        model="tiny-llama",
        config=catalogue.config("tiny-llama"),
        layout=Layout.parse(layout),
        workload=Workload(seq_len=64, global_batch=64, dtype="bf16"),
        options=TrainOptions(device="cuda", dropout=0.0),
    )
    return spec, str(build_schedule(spec.layout, spec.layout.microbatches or 1))


@pytest.mark.parametrize("layout", ["dp1:microbatches=1", "dp2:microbatches=1"])
def test_what_gpus_cannot_hold_is_rejected_before_ranks_start(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On CUDA nothing was compared with the memory of the devices."""
    spec, schedule = gpu_job(layout)
    with Launcher("cpu") as launcher:
        monkeypatch.setattr(devices, "free_device_memory", lambda count: 10**12)
        rows = memory.require_memory(launcher, spec, schedule)
        assert rows is not None
        peak = max(row["total"] for row in rows)
        monkeypatch.setattr(devices, "free_device_memory", lambda count: int(peak * 1.04))
        with pytest.raises(LayoutError, match="what is free on its GPU less 5%; fits at") as error:
            memory.require_memory(launcher, spec, schedule)
        fix = (error.value.hint or "").removeprefix("--layout ")
        other = dataclasses.replace(spec, layout=Layout.parse(fix))
        assert other.layout.microbatches in (2, 4, 8, 16, 32, 64)
        assert memory.require_memory(
            launcher, other, str(build_schedule(other.layout, other.layout.microbatches or 1))
        )
        folder = RunFolder(tmp_path / "run")
        folder.create(spec)
        folder.schedule_file.write_text(schedule)
        changed, _ = memory.fitted(launcher, folder, spec, accumulate=True)
        assert folder.load() == changed
        assert changed.layout == other.layout
        monkeypatch.setattr(devices, "free_device_memory", lambda count: None)
        assert memory.require_memory(launcher, spec, schedule) is None
