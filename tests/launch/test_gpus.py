"""What a launcher knows of GPUs without CUDA, and what ranks on them start with."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hocket.launch import Launcher
from hocket.launch.gpus import ALLOCATOR, num_gpus, rank_settings
from tests.ranks import ROOT

SERVER = """
import sys, torch
calls = []
torch.cuda._is_compiled = lambda: True
torch._C._cuda_getDeviceCount = lambda: calls.append("devices") or 1
torch._C._cuda_getCurrentRawStream = lambda index: calls.append("stream")
torch.cuda._lazy_init = lambda: calls.append("context")
import os
os.environ.update(PYTORCH_NVML_BASED_CUDA_CHECK="1")
torch.cuda._device_count_nvml = lambda: 1
from hocket.launch.server import LATE, SLOW, take_in
seconds, wrong = take_in([*SLOW, *LATE, *sys.argv[1:]])
assert not wrong, wrong
print(torch.cuda.is_available(), calls)
"""


ASKING = """
import torch
from torch.utils._triton import has_triton
FOUND = has_triton() and torch.cuda.get_device_capability() >= (10, 0)
"""


@pytest.mark.ranks
def test_warming_asks_nothing_of_cuda(tmp_path: Path) -> None:
    """A process that initialised CUDA cannot fork ranks; one with a context holds memory. Packages
    that are not installed here ask for Triton while they are imported (torchao)."""
    (tmp_path / "asks_for_triton.py").write_text(ASKING)
    modules = [
        "asks_for_triton",
        "hocket.training.rank",
        "hocket.ranks.serving",
        "hocket.serving.engine.graphs",
    ]
    found = subprocess.run(
        [sys.executable, "-c", SERVER, *modules],
        cwd=ROOT, capture_output=True, text=True, timeout=110, check=False,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"},
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    assert found.stdout.split() == ["True", "[]"]


def test_settings_of_ranks_on_gpus() -> None:
    fresh = rank_settings({}, watched=True)
    assert fresh["PYTORCH_ALLOC_CONF"] == ALLOCATOR
    # Collectives in graphs, whose buffers lie in segments that grow.
    assert fresh["NCCL_GRAPH_REGISTER"] == "0"
    assert fresh["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    # NCCL's own threads may not come before the launcher's time limit.
    assert int(fresh["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"]) > 3600
    assert fresh["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "0"
    # Ranks of torchrun and Slurm have no parent of ours: the watchdog is all there is.
    alone = rank_settings({}, watched=False)
    assert "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC" not in alone
    assert "TORCH_NCCL_DUMP_ON_TIMEOUT" not in alone


PARSED = """
import torch
for entry in {entries!r}:
    key = entry.partition(":")[0]
    try:
        torch._C._accelerator_setAllocatorSettings(entry)
        torch._C._accelerator_setAllocatorSettings(key + ":none")
    except ValueError as error:
        print(*[key] * ("Unrecognized key" not in str(error)))
"""


@pytest.mark.torch
def test_torch_knows_the_settings_of_its_allocator() -> None:
    """It passes over a name that it does not know, or rejects it (torch 2.14); of one that it knows
    it rejects the value."""
    entries = [*ALLOCATOR.split(","), "no_such_setting:1"]
    found = subprocess.run(
        [sys.executable, "-c", PARSED.format(entries=entries)],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    assert found.stdout.split() == [entry.partition(":")[0] for entry in entries[:-1]]


@pytest.mark.torch
def test_large_page_locked_buffers_are_not_rounded_up() -> None:
    """The rule that the two limits of page-locked memory are for, as torch's header has it."""
    import torch

    folder = Path(torch.__file__).parent / "include/ATen/core"
    text = " ".join((folder / "CachingHostAllocator.h").read_text().split())
    rule = "size <= pinned_max_round_threshold() && size <= pinned_max_cached_size()"
    assert (
        f"if ({rule}) {{ return c10::llvm::PowerOf2Ceil(size); }} else {{ return size; }}" in text
    )
    # What is kept is found again by its power of two alone, so that no size in between may be kept.
    assert "if (size > pinned_max_cached_size()) {" in text
    limits = dict(entry.split(":") for entry in ALLOCATOR.split(","))
    assert limits["pinned_max_round_threshold_mb"] == limits["pinned_max_cached_size_mb"]


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_what_a_user_has_set_stays(name: str) -> None:
    own = {name: "max_split_size_mb:64", "TORCH_FR_BUFFER_SIZE": "10"}
    found = rank_settings(own, watched=True)
    assert not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & set(found)
    assert "TORCH_FR_BUFFER_SIZE" not in found
    assert "TORCH_FR_BUFFER_SIZE" not in rank_settings(
        {"TORCH_NCCL_TRACE_BUFFER_SIZE": "5"}, watched=True
    )


@pytest.mark.parametrize(
    ("visible", "count"),
    [
        (None, 4), ("", 0), ("-1", 0), ("NoDevFiles", 0), ("0,2", 2), ("3, 1", 2), ("0,7,1", 1),
        ("GPU-6f2a,GPU-90c1", 2), ("MIG-11aa", 1),
    ],
)  # fmt: skip
def test_gpus_that_a_process_may_see(tmp_path: Path, visible: str | None, count: int) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidia3", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert num_gpus(environment, tmp_path) == count
    assert num_gpus(environment, tmp_path / "none") == 0
    assert num_gpus({**environment, "NVIDIA_VISIBLE_DEVICES": "void"}, tmp_path) == 0


@pytest.mark.ranks
def test_ranks_start_with_the_settings() -> None:
    events: list[dict[str, object]] = []
    names = ["PYTORCH_ALLOC_CONF", "CUDA_DEVICE_ORDER", "TORCH_NCCL_ASYNC_ERROR_HANDLING"]
    with Launcher(device="cuda", environment={"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}) as launcher:
        launcher.run("tests.launch.cases:tell_environment", 1, {"names": names}, events.append)
    assert events[0]["values"] == [ALLOCATOR, "FASTEST_FIRST", "3"]
