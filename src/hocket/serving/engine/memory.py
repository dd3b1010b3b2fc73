"""How much memory a rank's cache may take, and how many blocks that is."""

from __future__ import annotations

from pathlib import Path

import torch

from hocket.serving.engine.runner import StageRunner
from hocket.spec.errors import OptionError
from hocket.spec.units import format_bytes

CUDA_SHARE = 0.95
"""Of a GPU's free memory; the rest is for fragments, graphs and libraries' workspaces."""
CPU_SHARE = 0.5
"""Of a CPU's free memory, of which all ranks of the machine get even parts."""


def cache_bytes(runner: StageRunner, ranks_here: int) -> int:
    """Bytes that the cache of a rank may take where nobody said.

    On CUDA: what is free once the weights are there, less what the largest step takes, which is
    measured by running it. On CPU: this rank's part of half of the free memory.

    Args:
        runner: with its weights, before `allocate`.
        ranks_here: ranks that share this machine's memory.

    Raises:
        OptionError: a GPU has no room for the largest step.
    """
    if runner.device.type != "cuda":
        return int(_free_memory() * CPU_SHARE) // ranks_here
    needed = runner.step_bytes()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(runner.device)
    room = int(free * CUDA_SHARE) - needed
    if room <= 0:
        raise OptionError(
            f"the GPU has {format_bytes(free)} of {format_bytes(total)} free beside the weights, "
            f"and a step of {runner.max_batch_tokens} tokens takes {format_bytes(needed)}",
            hint=f"--max-batch-tokens {max(1, runner.max_batch_tokens // 4)}",
        )
    return room


def require_room(wanted: int, ranks_here: int) -> None:
    """Refuse a cache that the memory of this machine cannot hold, before it is touched.

    Args:
        wanted: bytes on each rank. ranks_here: ranks that share this machine's memory.

    Raises:
        OptionError: there is less memory free.
    """
    free = _free_memory()
    if wanted * ranks_here > free:
        part = free // ranks_here
        raise OptionError(
            f"a cache of {format_bytes(wanted)} on each of {ranks_here} "
            f"rank{'s' if ranks_here > 1 else ''} does not fit: this machine has "
            f"{format_bytes(free)} of memory free, {format_bytes(part)} a rank",
            hint=f"--cache-memory {max(1, int(part * CPU_SHARE) // 10**6)}MB",
        )


def _free_memory() -> int:
    """Bytes that processes may still take on this machine without swapping."""
    with Path("/proc/meminfo").open() as file:
        fields = dict(line.split(":") for line in file)
    return int(fields["MemAvailable"].split()[0]) * 1024
