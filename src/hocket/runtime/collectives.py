"""Collectives: the only place that calls torch.distributed to move tensors.

Every function is recorded by name, axis and bytes, and does nothing on an axis of one rank. Bytes
are those of the tensor handed in (of the output for all-gather). CPU backends sum bf16 and fp16
scalar by scalar and round after each term: there the sum is taken in fp32 and rounded once.

NCCL's rules hold for every caller: tensors are contiguous and on the device of the group; a
synchronous call runs on the current stream and returns no work (torch 2.8 on); the result of an
asynchronous one may be read, and its tensors freed or written, only after its `wait`, which makes
the current stream wait and never the host.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from hocket.runtime.mesh import Axis
from hocket.runtime.record import Recorder

_OPS: dict[str, Any] = {
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}
_HALF = (torch.bfloat16, torch.float16)


class CollectiveWork(Protocol):
    """An asynchronous collective: hold its tensors until `wait` has returned."""

    def wait(self) -> Any: ...


class _Rounded:
    """An fp32 reduction under way, rounded into the half-precision tensor once it is there.

    `given` is what is summed, held as long: on every backend, so that memory can be predicted.
    """

    def __init__(
        self, work: CollectiveWork, wide: Tensor, target: Tensor, given: Tensor | None = None
    ) -> None:
        self.work, self.wide, self.target, self.given = work, wide, target, given

    def wait(self) -> bool:
        self.work.wait()
        self.target.copy_(self.wide)
        return True


def _options(op: str, async_op: bool) -> Any:
    options = dist.AllreduceOptions()
    options.reduceOp = _OPS[op]
    options.asyncOp = async_op
    return options


_ALL_REDUCE = {(op, late): _options(op, late) for op in _OPS for late in (False, True)}


def all_reduce(
    tensor: Tensor, axis: Axis, recorder: Recorder, op: str = "sum", async_op: bool = False
) -> CollectiveWork | None:
    """Reduce `tensor` in place over the axis; returns the work if asynchronous.

    `op` is `sum`, `max` or `min`. The tensor must be contiguous.
    """
    if axis.group is None:
        return None
    assert tensor.is_contiguous(), (tensor.shape, tensor.stride())
    nbytes = tensor.numel() * tensor.element_size()
    recorder.count("all-reduce", axis.name, nbytes)
    start = recorder.mark()
    tensor = tensor.detach()
    wide = tensor
    if tensor.dtype in _HALF and not tensor.is_cuda:
        wide = tensor.float()
    work: CollectiveWork | None = axis.group.allreduce([wide], _ALL_REDUCE[op, async_op])
    if async_op:
        assert work is not None
        return work if wide is tensor else _Rounded(work, wide, tensor)
    if work is not None:
        work.wait()
    if wide is not tensor:
        tensor.copy_(wide)
    recorder.add(
        start, "communication", "all-reduce", f"all-reduce {axis.name}", axis=axis.name,
        bytes=nbytes,
    )  # fmt: skip
    return None


def broadcast(
    tensor: Tensor, axis: Axis, recorder: Recorder, source: int = 0, async_op: bool = False
) -> CollectiveWork | None:
    """Overwrite `tensor` (contiguous) with that of index `source` on the axis."""
    if axis.group is None:
        return None
    assert tensor.is_contiguous(), (tensor.shape, tensor.stride())
    with _communication(recorder, "broadcast", axis, tensor):
        return dist.broadcast(
            tensor.detach(), axis.ranks[source], group=axis.group, async_op=async_op
        )


def all_gather(
    tensor: Tensor,
    axis: Axis,
    recorder: Recorder,
    dim: int = 0,
    sizes: Sequence[int] | None = None,
) -> Tensor:
    """The axis's tensors concatenated along `dim`, in a contiguous tensor.

    `sizes`: extent of each rank's tensor along `dim` where they differ; they are sent padded to
    the largest.
    """
    if axis.group is None:
        return tensor
    shard, dim = tensor.detach(), dim % tensor.ndim
    uneven = sizes is not None and len(set(sizes)) > 1
    if uneven:
        assert sizes is not None
        missing = max(sizes) - shard.shape[dim]
        if missing:
            rest = shard.new_zeros(*shard.shape[:dim], missing, *shard.shape[dim + 1 :])
            shard = torch.cat([shard, rest], dim)
    shard = shard.contiguous()
    stacked = shard.new_empty(axis.size, *shard.shape)
    with _communication(recorder, "all-gather", axis, stacked):
        dist.all_gather_single(stacked.view(-1), shard.view(-1), group=axis.group)
    if uneven:
        assert sizes is not None
        return torch.cat([stacked[i].narrow(dim, 0, n) for i, n in enumerate(sizes)], dim)
    if math.prod(shard.shape[:dim]) == 1:  # the ranks' tensors follow each other in memory already
        lead, size = shard.shape[:dim], shard.shape[dim]
        return stacked.view(*lead, axis.size * size, *shard.shape[dim + 1 :])
    return torch.cat(stacked.unbind(), dim)


def reduce_scatter(tensor: Tensor, axis: Axis, recorder: Recorder, dim: int = 0) -> Tensor:
    """The sum over the axis, of which this rank gets its equal shard along `dim`, contiguous."""
    if axis.group is None:
        return tensor
    dim %= tensor.ndim
    assert tensor.shape[dim] % axis.size == 0, (tensor.shape, dim, axis.size)
    lead, size, rest = tensor.shape[:dim], tensor.shape[dim], tensor.shape[dim + 1 :]
    stacked = tensor.detach().reshape(*lead, axis.size, size // axis.size, *rest)
    stacked = stacked.movedim(dim, 0).contiguous()
    if stacked.dtype in _HALF and not stacked.is_cuda:
        stacked = stacked.float()
    shard = stacked.new_empty(stacked.shape[1:])
    with _communication(recorder, "reduce-scatter", axis, tensor):
        dist.reduce_scatter_single(shard.view(-1), stacked.view(-1), group=axis.group)
    return shard.to(tensor.dtype)


def traced_all_gather(tensor: Tensor, axis: Axis) -> Tensor:
    """As `all_gather` along dim 0, as an operation that a compiled graph can hold and move, with a
    gradient. What a graph sends is not recorded: it runs none of our code."""
    assert axis.group is not None
    ops: Any = torch.ops._c10d_functional
    found = ops.all_gather_into_tensor(tensor.contiguous(), axis.size, axis.group.group_name)
    whole: Tensor = ops.wait_tensor(found)
    return whole


def traced_all_reduce(tensor: Tensor, axis: Axis) -> Tensor:
    """The sum over the axis in a new tensor, as an operation of a graph, without a gradient of its
    own."""
    assert axis.group is not None
    ops: Any = torch.ops._c10d_functional
    total: Tensor = ops.wait_tensor(
        ops.all_reduce(tensor.contiguous(), "sum", axis.group.group_name)
    )
    return total


def traced_reduce_scatter(tensor: Tensor, axis: Axis) -> Tensor:
    """As `reduce_scatter` along dim 0, as an operation of a graph."""
    assert axis.group is not None
    ops: Any = torch.ops._c10d_functional
    group = axis.group.group_name
    found = ops.reduce_scatter_tensor(tensor.contiguous(), "sum", axis.size, group)
    piece: Tensor = ops.wait_tensor(found)
    return piece


def reduce_scatter_flat(
    piece: Tensor, whole: Tensor, axis: Axis, recorder: Recorder
) -> CollectiveWork | None:
    """Begin to sum `whole` (1-D, the axis's size times `piece`) over the axis; this rank's shard
    of the sum goes to `piece`. Hold both until `wait` has returned. None on an axis of one rank,
    where `whole` is copied.
    """
    assert whole.numel() == axis.size * piece.numel(), (whole.shape, piece.shape, axis.size)
    if axis.group is None:
        piece.copy_(whole)
        return None
    recorder.count("reduce-scatter", axis.name, whole.numel() * whole.element_size())
    if whole.dtype in _HALF and not whole.is_cuda:
        wide = piece.float()
        given = whole.float()
        work = dist.reduce_scatter_single(wide, given, group=axis.group, async_op=True)
        return _Rounded(work, wide, piece, given)
    return dist.reduce_scatter_single(piece, whole, group=axis.group, async_op=True)


def all_gather_flat(
    whole: Tensor, piece: Tensor, axis: Axis, recorder: Recorder
) -> CollectiveWork | None:
    """Begin to gather the axis's `piece`s (1-D) into `whole`, which may hold this rank's own
    already, in its place. Hold both until `wait` has returned. None on an axis of one rank.
    """
    assert whole.numel() == axis.size * piece.numel(), (whole.shape, piece.shape, axis.size)
    if axis.group is None:
        if whole.data_ptr() != piece.data_ptr():
            whole.copy_(piece)
        return None
    recorder.count("all-gather", axis.name, whole.numel() * whole.element_size())
    return dist.all_gather_single(whole.detach(), piece.detach(), group=axis.group, async_op=True)


def all_to_all(
    tensor: Tensor,
    axis: Axis,
    recorder: Recorder,
    *,
    sent: Sequence[int] | None = None,
    received: Sequence[int] | None = None,
    count_received: bool = False,
) -> Tensor:
    """Rows of dim 0 of `tensor` to each rank of the axis in turn; returns those from each.

    Args:
        sent, received: rows to and from each rank. None: as many for all.
        count_received: the bytes recorded are those of what arrives, not of what leaves.
    """
    if axis.group is None:
        return tensor
    tensor = tensor.detach().contiguous()
    rows = len(tensor) if received is None else sum(received)
    found = tensor.new_empty(rows, *tensor.shape[1:])
    with _communication(recorder, "all-to-all", axis, found if count_received else tensor):
        dist.all_to_all_single(
            found, tensor,
            None if received is None else list(received), None if sent is None else list(sent),
            group=axis.group,
        )  # fmt: skip
    return found


def scatter(
    tensor: Tensor | None, like: Tensor, axis: Axis, recorder: Recorder, source: int = 0
) -> Tensor:
    """Split dim 0 of the source's `tensor` over the axis.

    `like` has the shape, dtype and device of one shard and is overwritten; `tensor` is None on
    the other ranks.
    """
    if axis.group is None:
        assert tensor is not None
        return tensor
    assert like.is_contiguous(), (like.shape, like.stride())
    pieces = None
    if axis.index == source:
        assert tensor is not None
        pieces = [p.contiguous() for p in tensor.detach().chunk(axis.size)]
        assert [p.shape for p in pieces] == [like.shape] * axis.size, (tensor.shape, axis.size)
    with _communication(recorder, "scatter", axis, like if tensor is None else tensor):
        dist.scatter(like, pieces, src=axis.ranks[source], group=axis.group)
    return like


def gather(tensor: Tensor, axis: Axis, recorder: Recorder, target: int = 0) -> list[Tensor] | None:
    """The axis's tensors (of equal shape) by index on `target`; None on the other ranks."""
    if axis.group is None:
        return [tensor]
    tensor = tensor.detach().contiguous()
    pieces = None
    if axis.index == target:
        pieces = [torch.empty_like(tensor) for _ in range(axis.size)]
    with _communication(recorder, "gather", axis, tensor):
        dist.gather(tensor, pieces, dst=axis.ranks[target], group=axis.group)
    return pieces


def reduce(tensor: Tensor, axis: Axis, recorder: Recorder, target: int = 0) -> None:
    """Sum over the axis, in place on `target`; the other ranks' tensors are undefined after."""
    if axis.group is None:
        return
    assert tensor.is_contiguous(), (tensor.shape, tensor.stride())
    wide = tensor.detach()
    if tensor.dtype in _HALF and not tensor.is_cuda:
        wide = wide.float()
    with _communication(recorder, "reduce", axis, tensor):
        dist.reduce(wide, axis.ranks[target], group=axis.group)
    if wide.dtype != tensor.dtype and axis.index == target:
        tensor.detach().copy_(wide)


def isend(
    tensor: Tensor, axis: Axis, peer: int, recorder: Recorder, tag: int = 0
) -> CollectiveWork:
    """Begin to send to index `peer`. The tensor must stay unchanged until `wait` has returned."""
    assert axis.group is not None, axis.name
    tensor = tensor.detach()
    assert tensor.is_contiguous()
    recorder.count("send", axis.name, tensor.numel() * tensor.element_size())
    return axis.group.send([tensor], peer, tag)


def irecv(
    tensor: Tensor, axis: Axis, peer: int, recorder: Recorder, tag: int = 0
) -> CollectiveWork:
    """Begin to receive from index `peer` into `tensor`."""
    assert axis.group is not None, axis.name
    tensor = tensor.detach()
    assert tensor.is_contiguous()
    recorder.count("receive", axis.name, tensor.numel() * tensor.element_size())
    return axis.group.recv([tensor], peer, tag)


def exchange(
    sent: Tensor,
    received: Tensor,
    axis: Axis,
    recorder: Recorder,
    *,
    target: int | None,
    source: int | None,
) -> CollectiveWork:
    """Begin to send to index `target` and to receive from index `source`, in one batch.

    NCCL runs the two together (`ncclGroupStart`), on the communicator of the whole group, so no
    order of them among ranks can deadlock, and a ring moves in both directions at once. Every rank
    of the axis takes part; None at the ends of a line, where there is nothing to send to or to
    receive from. Hold both tensors until `wait` has returned.
    """
    works = []
    group: Any = axis.group
    if sent.is_cuda:
        group._start_coalescing(sent.device)
    try:
        if target is not None:
            works.append(isend(sent, axis, target, recorder))
        if source is not None:
            works.append(irecv(received, axis, source, recorder))
    finally:
        if sent.is_cuda:
            works = [group._end_coalescing(sent.device)]
    return _Together(works)


class _Together:
    """Works as one."""

    def __init__(self, works: Sequence[CollectiveWork]) -> None:
        self.works = works

    def wait(self) -> bool:
        for work in self.works:
            work.wait()
        return True


def barrier(axis: Axis, recorder: Recorder) -> None:
    """Wait until every rank of the axis is here. Under NCCL the host waits too, for the device
    that the group is bound to (`Mesh` makes every group so)."""
    if axis.group is None:
        return
    recorder.count("barrier", axis.name, 0)
    dist.barrier(group=axis.group)


def library_communication(recorder: Recorder, name: str, axis: Axis, nbytes: int) -> Any:
    """Within, a library moves tensors over an axis: counted, and a span where those are
    recorded."""
    recorder.count(name, axis.name, nbytes)
    return recorder.span("communication", name, f"{name} {axis.name}", axis=axis.name, bytes=nbytes)


def _communication(recorder: Recorder, name: str, axis: Axis, tensor: Tensor) -> Any:
    return library_communication(recorder, name, axis, tensor.numel() * tensor.element_size())
