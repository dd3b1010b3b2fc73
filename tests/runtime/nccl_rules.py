"""A process group in one process that keeps NCCL's rules, for tests of single calls.

It stands for `size` ranks that make equal calls: rank r holds this rank's tensor plus (r - index).
What NCCL forbids raises; what NCCL leaves undefined is made wrong on purpose:

- a synchronous call returns no work;
- tensors that are not contiguous, or not on the group's device, are rejected;
- the result of an asynchronous call is NaN until its `wait`;
- an input that was written before the `wait` fails it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hocket.runtime.mesh import Axis


class RuleBroken(AssertionError):
    """NCCL would have raised, or given a wrong result."""


class NcclWork:
    """An asynchronous call: its results appear at `wait`."""

    def __init__(self, inputs: list[Tensor], outputs: list[Tensor], run: Callable[[], None]):
        self._run = run
        self.waited = False
        self._values = [t.clone() for t in inputs]
        for out in outputs:
            if out.is_floating_point():
                out.fill_(float("nan"))
        # In place, the output is an input: what counts is what it holds from now on.
        self._inputs = [(t, t._version) for t in inputs]

    def wait(self) -> bool:
        for tensor, version in self._inputs:
            if tensor._version != version:
                raise RuleBroken(f"a tensor of shape {tuple(tensor.shape)} was written before wait")
        self._run()
        self.waited = True
        return True


class NcclGroup:
    """Quacks as a `dist.ProcessGroup` of NCCL whose ranks make equal calls."""

    def __init__(self, size: int, index: int, device: str = "cpu") -> None:
        self._size, self._index, self._device = size, index, device
        self.works: list[NcclWork] = []
        self.calls: list[str] = []
        # As `new_group` does: torch looks group ranks up here.
        dist.distributed_c10d._world.pg_group_ranks[self] = {r: r for r in range(size)}  # type: ignore[index]

    def axis(self, name: str = "tp") -> Axis:
        return Axis(name, self._size, self._index, tuple(range(self._size)), self)  # type: ignore[arg-type]

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._index

    def _others(self, tensor: Tensor) -> list[Tensor]:
        return [tensor + (r - self._index) for r in range(self._size)]

    def _reduce(self, tensor: Tensor, op: Any) -> Tensor:
        every = torch.stack(self._others(tensor))
        if op == dist.ReduceOp.SUM:
            return every.sum(0, dtype=tensor.dtype)
        return every.amax(0) if op == dist.ReduceOp.MAX else every.amin(0)

    def _launch(
        self,
        name: str,
        inputs: list[Tensor],
        outputs: list[Tensor],
        asynchronous: bool,
        compute: Callable[[list[Tensor]], list[Tensor]],
    ) -> NcclWork | None:
        self.calls.append(name)
        for tensor in (*inputs, *outputs):
            if not tensor.is_contiguous():
                raise RuleBroken(f"{name}: Tensors must be contiguous")
            if tensor.device.type != self._device:
                raise RuleBroken(f"{name}: No backend type associated with {tensor.device}")
            if tensor.requires_grad:
                raise RuleBroken(f"{name}: autograd would follow a collective")
        results = compute([t.clone() for t in inputs])

        def run() -> None:
            for out, result in zip(outputs, results, strict=True):
                assert out.numel() == result.numel(), (name, out.shape, result.shape)
                out.copy_(result.reshape(out.shape))

        if asynchronous:
            self.works.append(NcclWork(inputs, outputs, run))
            return self.works[-1]
        run()
        return None

    # The methods of ProcessGroup that torch.distributed and hocket call.

    def allreduce(self, tensors: list[Tensor], options: Any) -> NcclWork | None:
        (x,) = tensors
        return self._launch(
            "allreduce", [x], [x], options.asyncOp, lambda i: [self._reduce(i[0], options.reduceOp)]
        )

    def broadcast(self, tensors: list[Tensor], options: Any) -> NcclWork | None:
        (x,) = tensors
        return self._launch(
            "broadcast", [x], [x], options.asyncOp, lambda i: [self._others(i[0])[options.rootRank]]
        )

    def reduce(self, tensors: list[Tensor], options: Any) -> NcclWork | None:
        (x,) = tensors
        root = options.rootRank == self._index
        return self._launch(
            "reduce",
            [x],
            [x],
            options.asyncOp,
            lambda i: [self._reduce(i[0], options.reduceOp) if root else i[0] * float("nan")],
        )

    def all_gather_single(self, out: Tensor, x: Tensor, options: Any) -> NcclWork | None:
        def compute(inputs: list[Tensor]) -> list[Tensor]:
            return [torch.stack(self._others(inputs[0]))]

        return self._launch("all_gather_single", [x], [out], options.asyncOp, compute)

    def reduce_scatter_single(self, out: Tensor, x: Tensor, options: Any) -> NcclWork | None:
        def compute(inputs: list[Tensor]) -> list[Tensor]:
            total = self._reduce(inputs[0].reshape(-1), options.reduceOp)
            return [total.chunk(self._size)[self._index]]

        return self._launch("reduce_scatter_single", [x], [out], options.asyncOp, compute)

    def scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], options: Any
    ) -> NcclWork | None:
        mine = inputs[0] if inputs else [torch.full_like(outputs[0], 7.0)] * self._size
        return self._launch("scatter", mine, outputs, options.asyncOp, lambda i: [i[self._index]])

    def gather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], options: Any
    ) -> NcclWork | None:
        places = outputs[0] if outputs else []
        return self._launch(
            "gather", inputs, places, options.asyncOp, lambda i: self._others(i[0])[: len(places)]
        )

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> NcclWork | None:
        return self._launch("send", tensors, [], True, lambda i: [])

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> NcclWork | None:
        shape = tensors[0]
        return self._launch("recv", [], tensors, True, lambda i: [torch.full_like(shape, peer)])
