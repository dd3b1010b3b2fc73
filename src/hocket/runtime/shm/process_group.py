"""ShmProcessGroup: the collectives of torch.distributed over shared memory of one machine.

`import hocket.runtime.shm` registers it as backend `shm`; groups are then made and used by
torch.distributed's own functions, subgroups included. Both spellings of the methods that torch
2.13 renamed are there.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hocket.runtime.host_group import HostProcessGroup, HostWork
from hocket.runtime.shm import operations, waiting
from hocket.runtime.shm.cells import Cells
from hocket.runtime.shm.channels import Channels, Receive, Send
from hocket.runtime.shm.operations import Operation
from hocket.runtime.shm.segment import ShmSegment

_OPS: list[tuple[Any, str]] = [
    (dist.ReduceOp.SUM, "sum"),
    (dist.ReduceOp.AVG, "avg"),
    (dist.ReduceOp.PRODUCT, "product"),
    (dist.ReduceOp.MIN, "min"),
    (dist.ReduceOp.MAX, "max"),
    (dist.ReduceOp.BAND, "band"),
    (dist.ReduceOp.BOR, "bor"),
    (dist.ReduceOp.BXOR, "bxor"),
]
# Tags of torch are not negative: these belong to the group itself.
_EXCHANGE_TAG = -2


def _op_name(op: Any) -> str:
    for known, name in _OPS:
        if op == known:
            return name
    raise ValueError(f"shm cannot reduce by {op}")


def _flat(tensor: Tensor) -> Tensor:
    """The tensor itself where its elements lie in a row, else a copy whose elements do."""
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        raise ValueError(f"shm moves dense CPU tensors, not {tensor.layout} on {tensor.device}")
    return tensor.detach().contiguous()


def _copies(outputs: Sequence[Tensor], flat: Sequence[Tensor]) -> Callable[[], None] | None:
    """What brings results from contiguous stand-ins to the tensors that were asked for."""
    pairs = [
        (to, given)
        for to, given in zip(outputs, flat, strict=True)
        if to.data_ptr() != given.data_ptr()
    ]
    if not pairs:
        return None

    def copy() -> None:
        for to, given in pairs:
            to.detach().copy_(given)

    return copy


class ShmWork(HostWork):
    """Something under way: operations of one group, or messages. `wait` completes it."""

    def __init__(self, parts: Sequence[tuple[Any, Any]], result: Any = None) -> None:
        super().__init__()
        self._parts = parts  # (Cells, Operation) or (Channels, Send or Receive)
        self._result = result

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        limit = timeout.total_seconds() if timeout is not None else 0.0
        for home, part in self._parts:
            home.complete(part, limit if limit > 0 else None)
        return True

    def is_completed(self) -> bool:
        for home, part in self._parts:
            if not part.done:
                home.go_on()
        return all(part.done for _, part in self._parts)

    def result(self) -> Any:
        return self._result

    def get_future(self) -> Any:
        self.wait()
        future: Any = torch.futures.Future()
        future.set_result(self._result)
        return future

    def _source_rank(self) -> int:
        (_, message), *_ = self._parts
        return int(message.found)

    source_rank = _source_rank


class ShmProcessGroup(HostProcessGroup):
    """One rank's end of a group.

    Args:
        store: shared by the ranks of this group alone.
        rank, size: in the group.
        ranks: the group's ranks in the world, for messages.
        timeout: seconds that a collective or message may wait.
    """

    backend_name = "shm"

    def __init__(
        self, store: Any, rank: int, size: int, ranks: Sequence[int], timeout: float
    ) -> None:
        super().__init__(rank, size)
        self._rank, self._size = rank, size
        waiting.expect_ranks(size)
        names = list(ranks) or list(range(size))
        self._segment = ShmSegment(store, rank, size)
        self._cells = Cells(self._segment, names, timeout)
        self._channels = Channels(self._segment, names, timeout)
        self._run(Operation(1, 0)).wait()
        self._segment.everyone_has_it()

    @property
    def segment(self) -> ShmSegment:
        """The memory that the ranks share, and their processes."""
        return self._segment

    @property
    def timeout(self) -> float:
        """Seconds that a collective may wait."""
        return self._cells.timeout

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        self._cells.timeout = self._channels.timeout = timeout.total_seconds()

    def shutdown(self) -> None:
        """Release the memory; the last rank to do so frees it."""
        waiting.UNFINISHED.discard(self._cells)
        waiting.UNFINISHED.discard(self._channels)
        if self._segment.peers is not None:
            self._segment.peers.close()

    abort = shutdown

    # -- collectives

    def _run(
        self, operation: Operation, after: Callable[[], None] | None = None, result: Any = None
    ) -> ShmWork:
        operation.after = after
        self._cells.submit(operation)
        return ShmWork([(self._cells, operation)], result)

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> ShmWork:
        op = _op_name(opts.reduceOp) if opts is not None else "sum"
        if len(tensors) == 1:
            flat = _flat(tensors[0])
            operation = operations.AllReduce(self._segment, flat, op)
            return self._run(operation, _copies(tensors, [flat]), tensors)
        works = [self.allreduce([tensor], opts) for tensor in tensors]
        return self._join(works, tensors)

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: Sequence[Tensor], opts: Any) -> ShmWork:
        works = []
        for tensor in tensors:
            flat = _flat(tensor)
            operation = operations.Broadcast(self._segment, flat, opts.rootRank)
            works.append(self._run(operation, _copies([tensor], [flat])))
        return self._join(works, tensors)

    def reduce(self, tensors: Sequence[Tensor], opts: Any) -> ShmWork:
        works = []
        for tensor in tensors:
            flat = _flat(tensor)
            op, root = _op_name(opts.reduceOp), opts.rootRank
            operation = operations.Reduce(self._segment, flat, op, root)
            after = _copies([tensor], [flat]) if self._rank == root else None
            works.append(self._run(operation, after))
        return self._join(works, tensors)

    def allgather(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> ShmWork:
        works = [
            self._gather(operations.AllGather, wanted, piece)
            for wanted, piece in zip(outputs, inputs, strict=True)
        ]
        return self._join(works, outputs)

    def _gather(
        self, kind: type[operations.AllGather], outputs: Sequence[Tensor], piece: Tensor
    ) -> ShmWork:
        flat = [_flat(tensor) for tensor in outputs]
        operation = kind(self._segment, flat, _flat(piece))
        return self._run(operation, _copies(outputs, flat), outputs)

    def all_gather_single(self, output: Tensor, piece: Tensor, opts: Any = None) -> ShmWork:
        self._same_size(output, self._size * piece.numel())
        flat = _flat(output)
        parts = flat.view(-1).chunk(self._size) if flat.numel() else [flat] * self._size
        operation = operations.AllGather(self._segment, parts, _flat(piece))
        return self._run(operation, _copies([output], [flat]), output)

    _allgather_base = all_gather_single

    def allgather_coalesced(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> ShmWork:
        return self.allgather(
            [[wanted[i] for wanted in outputs] for i in range(len(inputs))]
            if len(outputs) == self._size and len(inputs) == len(outputs[0])
            else outputs,
            inputs,
            opts,
        )

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> ShmWork:
        pairs = zip(outputs, inputs, strict=True)
        return self._join([self.all_gather_single(o, i, opts) for o, i in pairs], outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any
    ) -> ShmWork:
        wanted = list(outputs[0]) if self._rank == opts.rootRank else []
        flat = [_flat(tensor) for tensor in wanted]
        operation = operations.Gather(self._segment, flat, _flat(inputs[0]), opts.rootRank)
        return self._run(operation, _copies(wanted, flat), outputs)

    def scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any
    ) -> ShmWork:
        pieces = [_flat(t) for t in inputs[0]] if self._rank == opts.rootRank else None
        for piece in pieces or ():
            self._same_size(piece, outputs[0].numel())
        flat = [_flat(outputs[0])]
        operation = operations.Scatter(self._segment, flat, pieces, root=opts.rootRank)
        return self._run(operation, _copies([outputs[0]], flat), outputs)

    def reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any
    ) -> ShmWork:
        works = []
        for output, pieces in zip(outputs, inputs, strict=True):
            for piece in pieces:
                self._same_size(piece, output.numel())
            works.append(self._reduce_scatter(output, [_flat(piece) for piece in pieces], opts))
        return self._join(works, outputs)

    def reduce_scatter_single(self, output: Tensor, whole: Tensor, opts: Any) -> ShmWork:
        self._same_size(whole, self._size * output.numel())
        flat = _flat(whole).view(-1)
        pieces = flat.chunk(self._size) if flat.numel() else [flat] * self._size
        return self._reduce_scatter(output, pieces, opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any
    ) -> ShmWork:
        pairs = zip(outputs, inputs, strict=True)
        return self._join([self.reduce_scatter_single(o, i, opts) for o, i in pairs], outputs)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _reduce_scatter(self, output: Tensor, pieces: Sequence[Tensor], opts: Any) -> ShmWork:
        flat = [_flat(output)]
        op = _op_name(opts.reduceOp)
        operation = operations.ReduceScatter(self._segment, flat, pieces, op=op)
        return self._run(operation, _copies([output], flat), output)

    def all_to_all_single(
        self,
        output: Tensor,
        whole: Tensor,
        output_sizes: Sequence[int] = (),
        input_sizes: Sequence[int] = (),
        opts: Any = None,
    ) -> ShmWork:
        flat_in, flat_out = _flat(whole), _flat(output)
        after = _copies([output], [flat_out])
        n = self._size
        if not output_sizes and not input_sizes and flat_in.numel():
            self._same_size(output, whole.numel())
            operation = operations.AllToAll(
                self._segment, flat_out.view(-1).chunk(n), flat_in.view(-1).chunk(n)
            )
            return self._run(operation, after, output)
        pieces = torch.split(flat_in, list(input_sizes) or [flat_in.shape[0] // n] * n)
        places = torch.split(flat_out, list(output_sizes) or [flat_out.shape[0] // n] * n)
        return self._exchange(places, pieces, after, output)

    alltoall_base = all_to_all_single

    def alltoall(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> ShmWork:
        flat = [_flat(tensor) for tensor in outputs]
        after = _copies(outputs, flat)
        return self._exchange(flat, [_flat(tensor) for tensor in inputs], after, outputs)

    def _exchange(
        self,
        places: Sequence[Tensor],
        pieces: Sequence[Tensor],
        after: Callable[[], None] | None,
        result: Any,
    ) -> ShmWork:
        """All-to-all of pieces whose sizes only their two ends know, as messages."""
        channels = self._channels
        messages: list[Send | Receive] = []
        for step in range(self._size):  # every rank begins with another, itself first
            source = (self._rank - step) % self._size
            messages.append(channels.receive(source, places[source], _EXCHANGE_TAG))
        for step in range(self._size):
            target = (self._rank + step) % self._size
            messages.append(channels.send(target, pieces[target], _EXCHANGE_TAG))
        return _Exchanged([(channels, m) for m in messages], result, after)

    def barrier(self, opts: Any = None) -> ShmWork:
        return self._run(Operation(1, 0))

    # -- messages

    def send(self, tensors: Sequence[Tensor], target: int, tag: int) -> ShmWork:
        message = self._channels.send(target, _flat(tensors[0]), tag)
        return ShmWork([(self._channels, message)])

    def recv(self, tensors: Sequence[Tensor], source: int | None, tag: int) -> ShmWork:
        flat = _flat(tensors[0])
        message = self._channels.receive(source, flat, tag, _copies([tensors[0]], [flat]))
        return ShmWork([(self._channels, message)], tensors)

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int) -> ShmWork:
        return self.recv(tensors, None, tag)

    def _join(self, works: Sequence[ShmWork], result: Any) -> ShmWork:
        return ShmWork([part for work in works for part in work._parts], result)

    def _same_size(self, tensor: Tensor, numel: int) -> None:
        if tensor.numel() != numel:
            raise ValueError(
                f"shm: {tensor.numel()} elements where {numel} are needed ({self._size} ranks)"
            )


class _Exchanged(ShmWork):
    """An all-to-all of messages: its outputs are whole when all have come."""

    def __init__(
        self, parts: Sequence[tuple[Any, Any]], result: Any, after: Callable[[], None] | None
    ) -> None:
        super().__init__(parts, result)
        self._after = after

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        super().wait(timeout)
        if self._after is not None:
            self._after()
            self._after = None
        return True


def create_shm_group(options: Any, backend_options: Any = None) -> ShmProcessGroup:
    """What torch.distributed calls to make a group of backend `shm`."""
    return ShmProcessGroup(
        options.store,
        options.group_rank,
        options.group_size,
        list(options.global_ranks_in_group),
        options.timeout.total_seconds(),
    )
