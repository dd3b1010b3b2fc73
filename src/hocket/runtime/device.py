"""Device: the one place where a device and a communication backend are chosen."""

from __future__ import annotations

import torch

from hocket.spec.errors import OptionError, unknown

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
    if local_rank >= count:
        raise OptionError(
            f"local rank {local_rank} needs its own GPU, this machine shows {count} CUDA devices",
            hint="--device cpu" if count == 0 else f"a layout of {count} ranks on this machine",
        )
    return torch.device("cuda", local_rank)


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
