"""Device: the one place where a device and a communication backend are chosen.

What concerns GPUs is tested with devices that are not there, and not executed on a GPU yet.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from hocket.runtime.host_cores import machine_cores, usable_cores
from hocket.spec.errors import OptionError, unknown
from hocket.spec.expert_dispatch import local_ranks
from hocket.spec.units import format_bytes

DEVICES = ("auto", "cpu", "cuda")
BACKENDS = ("auto", "shm", "gloo", "nccl")


def pick_device(device: str = "auto", local_rank: int = 0) -> torch.device:
    """The device of one rank.

    Args:
        device: `auto` (CUDA where there is one), `cpu` or `cuda`.
        local_rank: index of the rank on its machine; CUDA ranks take the GPU of that number.

    Raises:
        OptionError: an unknown name, no CUDA device, or fewer GPUs than ranks on this machine.
    """
    if device not in DEVICES:
        message, hint = unknown("device", device, DEVICES)
        raise OptionError(message, hint=hint)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 1 and local_rank > 0 and _one_each(os.environ):
        return torch.device("cuda", 0)
    if local_rank >= count:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        shown = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible})"
        if visible is not None and "MIG-" in visible:
            shown += "; CUDA shows a process one MIG instance alone"
        raise OptionError(
            f"local rank {local_rank} needs its own GPU, this machine shows {count} CUDA devices"
            + shown,
            hint="--device cpu" if count == 0 else f"a layout of {count} ranks on this machine",
        )
    return torch.device("cuda", local_rank)


def _one_each(environment: Mapping[str, str]) -> bool:
    """Whether Slurm shows each task its own GPU alone, which is then device 0 of every task."""
    bound = ("SLURM_GPUS_PER_TASK", "SLURM_GPU_BIND", "SLURM_STEP_GPU_BIND")
    return any(environment.get(name) not in (None, "", "none") for name in bound)


_REFUSALS = (
    # (what CUDA says, what it means, what to do)
    (
        "busy or unavailable",
        "another process holds it, or its compute mode excludes this one",
        "nvidia-smi --query-gpu=index,compute_mode --format=csv",
    ),
    ("out of memory", "other processes have filled its memory", "nvidia-smi"),
    (
        "no kernel image",
        "this torch was not built for its architecture",
        "pip install --upgrade torch",
    ),
    ("driver version is insufficient", "the driver is older than torch's CUDA", "nvidia-smi"),
    ("driver on your system is too old", "the driver is older than torch's CUDA", "nvidia-smi"),
    (
        "system not yet initialized",
        "the fabric manager of NVSwitch does not run",
        "systemctl status nvidia-fabricmanager",
    ),
)

SHARED = 0.9
"""Least share of a GPU's memory that is free where no other process uses it."""


def claim_device(device: torch.device) -> list[str]:
    """Take a GPU for this rank: make it current, allocate a first byte, and run on the cores of
    its NUMA node. To be called before the process group is made; nothing on a CPU.

    Returns:
        What a user should know: a GPU in use by others, or a slice of one.

    Raises:
        OptionError: the GPU cannot be used, with CUDA's reason.
    """
    if device.type != "cuda":
        return []
    try:
        torch.cuda.set_device(device)
        torch.zeros(1, device=device)
        free, total = torch.cuda.mem_get_info(device)
        properties: Any = torch.cuda.get_device_properties(device)
    except RuntimeError as error:
        text = str(error)
        for words, meaning, hint in _REFUSALS:
            if words in text:
                raise OptionError(
                    f"{device} cannot be used: {meaning} ({text.splitlines()[0]})", hint=hint
                ) from error
        raise
    notes = []
    if free < SHARED * total:
        notes.append(
            f"{device} has {format_bytes(free)} of {format_bytes(total)} free: other processes "
            "use it"
        )
    if " MIG " in f" {properties.name} ":
        notes.append(f"{device} is a MIG instance ({properties.name}): NCCL may not connect it")
    with contextlib.suppress(AttributeError):
        bind_near(
            f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:"
            f"{properties.pci_device_id:02x}.0"
        )
    return notes


def bind_near(address: str, root: Path = Path("/")) -> frozenset[int]:
    """Keep this thread, and those it starts, on the cores next to a PCI device, of those that the
    process may use. Where the kernel does not say, or none of them is ours, nothing changes.

    Args:
        address: `domain:bus:device.function` in hexadecimal, as under /sys/bus/pci/devices.
        root: where /sys is.

    Returns:
        The cores that were chosen; none if nothing changed.
    """
    near: set[int] = set()
    try:
        file = root / "sys/bus/pci/devices" / address / "local_cpulist"
        for part in file.read_text().strip().split(","):
            first, _, last = part.partition("-")
            near.update(range(int(first), int(last or first) + 1))
        own = os.sched_getaffinity(0)
        chosen = near & own
        if not chosen or chosen == own:
            return frozenset()
        os.sched_setaffinity(0, chosen)
    except (OSError, ValueError, AttributeError):  # no such file, or not Linux
        return frozenset()
    return frozenset(chosen)


def ranks_here(environment: Mapping[str, str] = os.environ) -> int:
    """Ranks that share this machine's memory and cores: as many as torchrun or Slurm started here,
    else as it has GPUs. Slurm may show each task its own GPU alone."""
    return max(1, torch.cuda.device_count(), local_ranks(environment) or 0)


def host_threads(num_gpus: int, cores: int | None = None, own: int | None = None) -> int:
    """CPU threads of a rank that computes on the host, as an offloaded optimizer does: its share of
    the machine's cores, of those that it may use.

    Args:
        num_gpus: of the machine, each with a rank.
        cores: of the machine. own: that this process may use. None: as the system says.
    """
    cores = cores or machine_cores()
    return max(1, min(own or usable_cores(), cores // max(1, num_gpus)))


def pick_backend(
    backend: str = "auto",
    device: torch.device | str = "cpu",
    world_size: int = 1,
    one_machine: bool = True,
) -> str:
    """The communication backend of a world.

    Args:
        backend: `auto`, `shm`, `gloo` or `nccl`. `auto` is NCCL on CUDA; on CPU it is shared
            memory where all ranks are on one machine that has it, else Gloo.
        device: device of the ranks.
        world_size: number of ranks; one rank communicates with nobody, Gloo costs it least.
        one_machine: whether all ranks share a machine.

    Raises:
        OptionError: an unknown name, or a backend that cannot serve this device or these machines.
    """
    if backend not in BACKENDS:
        message, hint = unknown("backend", backend, BACKENDS)
        raise OptionError(message, hint=hint)
    kind = torch.device(device).type
    if backend == "auto":
        if kind == "cuda":
            return "nccl"
        return "shm" if one_machine and world_size > 1 and _shared_memory(world_size) else "gloo"
    if (backend == "nccl") != (kind == "cuda"):
        raise OptionError(
            f"backend {backend} does not serve tensors on {kind}", hint="--backend auto"
        )
    if backend == "shm" and not one_machine:
        raise OptionError(
            "backend shm works inside one machine, the ranks are on several", hint="--backend gloo"
        )
    return backend


def _shared_memory(world_size: int) -> bool:
    from hocket.runtime import shm  # registers the backend, which only CPU ranks want

    return shm.available(world_size)
