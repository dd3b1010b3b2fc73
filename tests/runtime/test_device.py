"""Devices on machines with GPUs, simulated by stand-ins of torch.cuda and /sys."""

from __future__ import annotations

import os
import types
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hocket.runtime import device as d  # noqa: E402
from hocket.spec.errors import OptionError  # noqa: E402

pytestmark = pytest.mark.torch
GPU = torch.device("cuda", 1)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """Two GPUs, of which tests change what they say."""
    machine = types.SimpleNamespace(count=2, free=79 << 30, error=None, name="NVIDIA H100", set=[])
    properties = types.SimpleNamespace(
        name=machine.name, pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=0
    )

    def zeros(size: int, device: torch.device) -> None:
        assert machine.set == [device]  # before the first allocation
        if machine.error is not None:
            raise RuntimeError(machine.error)

    def get(device: torch.device) -> types.SimpleNamespace:
        properties.name = machine.name
        return properties

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: machine.count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: machine.count)
    monkeypatch.setattr(torch.cuda, "set_device", machine.set.append)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (machine.free, 80 << 30))
    monkeypatch.setattr(torch.cuda, "get_device_properties", get)
    monkeypatch.setattr(torch, "zeros", zeros)
    machine.bound = []
    monkeypatch.setattr(d, "bind_near", machine.bound.append)
    return machine


def test_a_rank_takes_the_gpu_of_its_number(gpus: types.SimpleNamespace) -> None:
    assert d.pick_device("auto", 1) == GPU
    assert d.claim_device(GPU) == []
    assert gpus.bound == ["0000:3b:00.0"]
    assert d.claim_device(torch.device("cpu")) == []


def test_more_ranks_than_gpus(gpus: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OptionError, match="local rank 2 needs its own GPU, this machine shows 2"):
        d.pick_device("cuda", 2)
    gpus.count = 1
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1a,MIG-2b")
    with pytest.raises(OptionError, match=r"CUDA shows a process one MIG instance alone"):
        d.pick_device("cuda", 1)
    gpus.count = 0
    with pytest.raises(OptionError, match="0 CUDA devices"):
        d.pick_device("cuda", 0)


def test_slurm_shows_each_task_a_gpu_of_its_own(
    gpus: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus.count = 1
    with pytest.raises(OptionError):
        d.pick_device("cuda", 3)
    monkeypatch.setenv("SLURM_GPUS_PER_TASK", "1")
    assert d.pick_device("cuda", 3) == torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("error", "meaning"),
    [
        ("CUDA error: CUDA-capable device(s) is/are busy or unavailable", "compute mode"),
        ("CUDA out of memory. Tried to allocate 2.00 MiB", "filled its memory"),
        ("CUDA error: no kernel image is available for execution", "architecture"),
    ],
)
def test_a_gpu_that_refuses_says_why(gpus: types.SimpleNamespace, error: str, meaning: str) -> None:
    gpus.error = error
    with pytest.raises(OptionError, match=meaning) as caught:
        d.claim_device(GPU)
    assert error.split(".", maxsplit=1)[0] in caught.value.message
    assert caught.value.hint


def test_any_other_error_stays_what_it_is(gpus: types.SimpleNamespace) -> None:
    gpus.error = "CUDA error: an illegal memory access was encountered"
    with pytest.raises(RuntimeError, match="illegal memory access"):
        d.claim_device(GPU)


def test_what_a_user_should_know_of_a_gpu(gpus: types.SimpleNamespace) -> None:
    gpus.free, gpus.name = 12 << 30, "NVIDIA H100 MIG 3g.40gb"
    busy, slice_ = d.claim_device(GPU)
    assert "cuda:1 has 12.9 GB of 85.9 GB free" in busy
    assert "MIG instance (NVIDIA H100 MIG 3g.40gb)" in slice_


def test_ranks_run_on_the_cores_of_their_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, chosen = {0, 1, 2, 3}, []
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(own))
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: chosen.append(cores))
    folder = tmp_path / "sys/bus/pci/devices/0000:3b:00.0"
    folder.mkdir(parents=True)
    cores = folder / "local_cpulist"
    for text, expected in (
        ("2-3,8-11\n", {2, 3}),
        ("0-15\n", set()),  # all that the process has: nothing to choose
        ("8-11\n", set()),  # none that it has: Slurm chose others
        ("\n", set()),
        ("nonsense\n", set()),
    ):
        cores.write_text(text)
        chosen.clear()
        assert d.bind_near("0000:3b:00.0", tmp_path) == expected
        assert chosen == ([expected] if expected else [])
    assert d.bind_near("0000:ff:00.0", tmp_path) == set()


@pytest.mark.parametrize(
    ("gpus", "cores", "own", "threads"),
    [(8, 112, 112, 14), (8, 112, 56, 14), (8, 112, 7, 7), (1, 2, 2, 2), (8, 4, 4, 1), (0, 4, 4, 4)],
)
def test_the_host_s_cores_are_shared_by_its_ranks(
    gpus: int, cores: int, own: int, threads: int
) -> None:
    assert d.host_threads(gpus, cores, own) == threads


@pytest.mark.parametrize(
    ("environment", "ranks"),
    [
        ({}, 2),
        ({"LOCAL_WORLD_SIZE": "8"}, 8),  # torchrun, each rank with some of the GPUs hidden
        ({"SLURM_STEP_TASKS_PER_NODE": "8(x2),4"}, 8),  # --gpus-per-task 1
        ({"SLURM_STEP_TASKS_PER_NODE": "1"}, 2),
    ],
)
def test_ranks_that_share_a_machine(
    gpus: types.SimpleNamespace, environment: dict[str, str], ranks: int
) -> None:
    assert d.ranks_here(environment) == ranks


def test_page_locked_memory_is_a_share_of_what_a_container_may_use(
    gpus: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hocket.runtime import pinned
    from hocket.spec.capabilities import PINNED_SHARE

    monkeypatch.setattr(pinned, "host_memory", lambda: 64 << 30)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert pinned.PinnedPool().limit == int((64 << 30) * PINNED_SHARE / 8)


@pytest.mark.parametrize("bound", [None, torch.device("cuda", 1)])
def test_a_module_in_a_loop_of_ones_own_makes_its_gpu_current(
    gpus: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch, bound: torch.device | None
) -> None:
    """`init_process_group("nccl")` leaves device 0 current in every rank of torchrun."""
    from hocket.runtime import parallelize

    dist = types.SimpleNamespace(
        is_initialized=lambda: True,
        get_backend=lambda: "nccl",
        group=types.SimpleNamespace(WORLD=types.SimpleNamespace(bound_device_id=bound)),
    )
    monkeypatch.setattr(parallelize, "dist", dist)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert parallelize._device_of(torch.nn.Linear(1, 1), 9) == GPU
    assert gpus.set == [GPU]


@pytest.mark.parametrize("code", [0, 2])
def test_memory_that_cannot_be_locked_is_copied_to_all_the_same(
    monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """CUDA keeps the error that a call returned until a kernel is launched, which then fails."""
    from hocket.runtime.host_copy import HostCopy
    from hocket.spec.tensor_file import TensorEntry

    kept: list[int] = []
    calls: list[str] = []

    def register(address: int, size: int, flags: int) -> int:
        calls.append("register")
        kept.extend([code] if code else [])
        return code

    def launch(size: int, device: torch.device) -> None:
        calls.append("kernel")
        if kept:
            raise RuntimeError(f"CUDA error: {kept.pop()}")

    cudart = types.SimpleNamespace(
        cudaHostRegister=register,
        cudaHostUnregister=lambda address: calls.append("unregister"),
        cudaError=types.SimpleNamespace(success=0),
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    copy = HostCopy(GPU)
    state: Any = types.SimpleNamespace(
        entries=[TensorEntry(name="a", dtype="F32", shape=(4,))], tensors=[torch.ones(4)]
    )
    with monkeypatch.context() as patch:
        patch.setattr(torch, "zeros", launch)
        copy.reserve(state)
    assert kept == []
    copy.close()
    assert calls == (["register", "kernel"] if code else ["register", "unregister"])
