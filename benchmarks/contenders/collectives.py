"""Collectives by size, one after the other, on one backend: what `benchmarks.collectives` times."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from benchmarks.workload import Workload

if TYPE_CHECKING:
    from collections.abc import Callable

BYTES_PER_TURN = 32_000_000


class Collectives:
    """Times every (collective, bytes) pair; each rank holds a tensor of `bytes` bytes in fp32."""

    def __init__(self, names: list[str], sizes: list[int]) -> None:
        self.cases = [(name, size) for name in names for size in sizes]
        self.tensors = {size: torch.zeros(size // 4) for size in sizes}
        self.run: dict[str, Callable[[torch.Tensor], None]] = {
            "all-reduce": lambda t: _wait(dist.all_reduce(t, async_op=True)),
            "broadcast": lambda t: _wait(dist.broadcast(t, 0, async_op=True)),
            "all-gather": self._all_gather,
            "reduce-scatter": self._reduce_scatter,
            "send and receive": self._send_receive,
        }

    def _all_gather(self, whole: torch.Tensor) -> None:
        piece = whole[: whole.numel() // dist.get_world_size()]
        dist.all_gather_single(whole, piece.clone())

    def _reduce_scatter(self, whole: torch.Tensor) -> None:
        piece = torch.empty(whole.numel() // dist.get_world_size())
        dist.reduce_scatter_single(piece, whole)

    def _send_receive(self, tensor: torch.Tensor) -> None:
        """Once around the ring, so that one message is under way at a time."""
        rank, size = dist.get_rank(), dist.get_world_size()
        if rank == 0:
            dist.send(tensor, 1)
            dist.recv(tensor, size - 1)
        else:
            dist.recv(tensor, rank - 1)
            dist.send(tensor, (rank + 1) % size)

    def take(self, count: int) -> dict[str, Any]:
        """Seconds of one call of each case, `count` turns of it in one mean."""
        times = []
        for name, size in self.cases:
            calls = count * max(2, min(100, BYTES_PER_TURN // size // 2))
            tensor, run = self.tensors[size], self.run[name]
            run(tensor)
            dist.barrier()
            start = time.perf_counter()
            for _ in range(calls):
                run(tensor)
            seconds = (time.perf_counter() - start) / calls
            if name == "send and receive":
                seconds /= dist.get_world_size()
            times.append(seconds)
        return {"times": times, "losses": [], "peak_bytes": 0}


def _wait(work: Any) -> None:
    work.wait()


def build(workload: Workload, backend: str, names: list[str], sizes: list[int]) -> Any:
    if backend == "shm":
        import hocket.runtime.shm  # noqa: F401  (registers the backend)
    dist.init_process_group(backend)
    return Collectives(names, sizes)
