"""How much memory a rank's cache may take, and how many blocks that is."""

from __future__ import annotations

import gc
import math

import torch

from hocket.runtime.host_memory import free_host_memory
from hocket.serving.engine.runner import StageRunner
from hocket.serving.engine.warm_up import warm_up
from hocket.spec.errors import OptionError
from hocket.spec.units import format_bytes

CUDA_SHARE = 0.95
"""Of a GPU's free memory; the rest is for fragments and libraries' workspaces."""
CPU_SHARE = 0.5
"""Of a CPU's free memory, of which all ranks of the machine get even parts."""


def affordable_cache_bytes(
    runner: StageRunner, ranks_here: int, utilization: float | None = None
) -> int:
    """Bytes that the cache of a rank may take where nobody said.

    On CUDA: what is free once weights and communicators are there, less what the largest step and
    the captured decode steps take, which are measured by running and capturing them (all ranks of
    the replica call this together). On CPU: this rank's part of half of the free memory.

    Args:
        runner: with its weights, before `allocate`.
        ranks_here: ranks that share this machine's memory.
        utilization: fraction of a GPU's memory that may be in use, by whatever process; None: of
            the free memory, `CUDA_SHARE`.

    Raises:
        OptionError: a GPU has no room for the largest step.
    """
    if runner.device.type != "cuda":
        return int(free_host_memory() * CPU_SHARE) // ranks_here
    warm_up(runner.mesh)
    needed = runner.step_bytes()
    torch.cuda.empty_cache()
    needed += graph_bytes(runner)
    free, total = torch.cuda.mem_get_info(runner.device)
    allowed = free * CUDA_SHARE if utilization is None else free - (1 - utilization) * total
    room = int(allowed) - needed
    if room <= 0:
        least = math.ceil(100 * (1 - (free - needed) / total)) + 1
        more = utilization is not None and least < 100
        limit = "" if utilization is None else f" within {utilization:.0%} of its memory"
        raise OptionError(
            f"the GPU has {format_bytes(max(0, int(allowed)) if limit else free)} of "
            f"{format_bytes(total)} free after the weights{limit}, and a step of "
            f"{runner.max_num_batched_tokens} tokens and the graphs of decode take "
            f"{format_bytes(needed)}",
            hint=f"--gpu-memory-utilization {least / 100:g}"
            if more
            else f"--max-num-batched-tokens {max(1, runner.max_num_batched_tokens // 4)}",
        )
    return room


def graph_bytes(runner: StageRunner) -> int:
    """Bytes that the graphs of all sizes take, measured on the largest and the smallest of them.

    Smaller sizes live in the memory of the largest; what each adds is taken from the smallest.
    """
    before = torch.cuda.mem_get_info(runner.device)[0]
    found = []
    for _ in runner.trial_graphs():
        torch.cuda.synchronize(runner.device)
        found.append(max(0, before - torch.cuda.mem_get_info(runner.device)[0]))
        before -= found[-1]
    runner.drop_trial()
    gc.collect()
    torch.cuda.empty_cache()
    if not found:
        return 0
    # Recurrent states, which are there while graphs are captured, are none of theirs.
    return max(0, found[0] - runner.state_bytes) + found[-1] * (runner.num_graphs - 1)


def require_room(wanted: int, ranks_here: int) -> None:
    """Refuse a cache that the memory of this machine cannot hold, before it is touched.

    Args:
        wanted: bytes on each rank. ranks_here: ranks that share this machine's memory.

    Raises:
        OptionError: there is less memory free.
    """
    free = free_host_memory()
    if wanted * ranks_here > free:
        part = free // ranks_here
        raise OptionError(
            f"a cache of {format_bytes(wanted)} on each of {ranks_here} "
            f"rank{'s' if ranks_here > 1 else ''} does not fit: this machine has "
            f"{format_bytes(free)} of memory free, {format_bytes(part)} a rank",
            hint=f"--cache-memory {max(1, int(part * CPU_SHARE) // 10**6)}MB",
        )
