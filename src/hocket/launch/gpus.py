"""GPUs: what a launcher knows of them without CUDA, and what ranks on them start with.

Nothing here touches a device: a process that did could not fork ranks, and would hold memory on
the first GPU. Not executed on a GPU yet.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
from collections.abc import Mapping
from pathlib import Path

HIDDEN = ("-1", "none", "nodevfiles", "void")
"""Values of CUDA_VISIBLE_DEVICES and NVIDIA_VISIBLE_DEVICES that show no device."""

SETTINGS = {
    # Numbers as nvidia-smi and NVML count; CUDA's own order puts the fastest first.
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    # `torch.cuda.is_available` asks NVML, not the driver, which would initialise CUDA.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    # A communicator that failed ends its rank: the launcher sees that and tells of the first.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
    # Collectives that each rank remembers, for what `--timeout` reports (torch's default, which
    # an environment may have set to 0).
    "TORCH_FR_BUFFER_SIZE": "2000",
    # NCCL would register the buffers of collectives in a CUDA graph with its transports. Segments
    # that grow are several physical allocations, which it cannot export as one: a capture under tp
    # would fail, or read memory that is not mapped (Megatron-Core and TensorRT-LLM set it as well).
    "NCCL_GRAPH_REGISTER": "0",
}

WATCHED = {
    # The parent ends a silent run after its own time. NCCL's threads only have to come later: one
    # that comes first ends its process, and its text names a victim.
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "7200",
    # A rank that dies is reported at once; a dump holds up its end by up to a minute.
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}

_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")

ALLOCATOR = ",".join((
    # Segments that grow: tensors of changing sizes leave fewer holes.
    "expandable_segments:True",
    # torch rounds page-locked memory up to a power of two (ATen/core/CachingHostAllocator.h): up to
    # twice what an offloaded optimizer was planned with. Above 16 MB it gets what it asks for, and
    # gives it back when it is freed; both limits are one, since a kept block is found by the power.
    "pinned_max_round_threshold_mb:16",
    "pinned_max_cached_size_mb:16",
))  # fmt: skip


def rank_settings(environment: Mapping[str, str], *, watched: bool) -> dict[str, str]:
    """Variables for ranks on GPUs which `environment` does not set; to be there before the first
    allocation and the first group.

    Args:
        environment: what the ranks have already.
        watched: a parent of ours watches them (else torchrun or Slurm started them).
    """
    wanted = {**SETTINGS, **(WATCHED if watched else {})}
    if not any(name in environment for name in _ALLOCATOR):
        wanted[_ALLOCATOR[0]] = ALLOCATOR
    if "TORCH_NCCL_TRACE_BUFFER_SIZE" in environment:  # the older name of the same
        wanted.pop("TORCH_FR_BUFFER_SIZE")
    return {name: value for name, value in wanted.items() if name not in environment}


def cuda_shows() -> bool:
    """Whether torch is built for CUDA and this process may see a GPU; imports nothing."""
    return _built_for_cuda() and num_gpus(os.environ) > 0


def num_gpus(environment: Mapping[str, str], devices: Path = Path("/dev")) -> int:
    """GPUs that CUDA_VISIBLE_DEVICES leaves of those with a device file.

    Entries may be numbers, UUIDs (`GPU-...`) or slices of a GPU (`MIG-...`). As in CUDA, those
    from the first number on that does not exist are hidden.
    """
    count = sum(1 for file in devices.glob("nvidia[0-9]*") if file.name[6:].isdigit())
    if count == 0:
        return 0
    if environment.get("NVIDIA_VISIBLE_DEVICES", "").lower() in HIDDEN:
        return 0
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return count
    shown = 0
    for entry in (each.strip() for each in visible.split(",")):
        if not entry or entry.lower() in HIDDEN or (entry.isdigit() and int(entry) >= count):
            break
        shown += 1
    return shown


def _built_for_cuda() -> bool:
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return False
    version = Path(spec.submodule_search_locations[0]) / "version.py"
    with contextlib.suppress(OSError):
        return re.search(r"^cuda\b[^=]*=\s*['\"]", version.read_text(), re.MULTILINE) is not None
    return False
