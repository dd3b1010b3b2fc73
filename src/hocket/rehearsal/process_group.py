"""Process groups of a rehearsal: they record what a rank enqueues, and move nothing.

They behave as torch's NCCL groups: CUDA tensors only, contiguous, a call with `async_op=False` runs
on the current stream and returns None (torch 2.8 on), an asynchronous one keeps its tensors alive
until it is waited for, and the host never knows that a work is complete. What was enqueued is a
`simulation.nccl.Trace`.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hocket.rehearsal.device import NUM_DEVICES
from hocket.simulation.nccl import EnqueuedOp, Trace

_ProcessGroup: Any = dist.ProcessGroup
_Work: Any = dist._Work  # type: ignore[attr-defined]
_BACKEND = "rehearsal"
_BACKEND_OF_A_GROUP = SimpleNamespace(
    supports_splitting=True, options=SimpleNamespace(_timeout=datetime.timedelta(minutes=10))
)

Row = tuple[int, ...]
Watch = Callable[[str, Sequence[Tensor]], None]
Enqueued = Callable[[str, str, Sequence[Tensor], bool], Callable[[], None] | None]
"""Called with (name, label of the group, tensors, whether asynchronous) of each operation; what it
returns is called when the work is waited for (`streams.StreamOrder.collective`)."""


@dataclasses.dataclass
class GroupFamily:
    """Groups that were created together, which no two share a rank: one axis of a mesh.

    Attributes:
        rows: the global ranks of each, in the order of their index.
        split: created by one `split_group` call; else by a `new_group` call each.
    """

    rows: list[Row]
    split: bool = False

    def row(self, rank: int) -> Row | None:
        """The group that a rank belongs to."""
        return next((row for row in self.rows if rank in row), None)


class RehearsedWorld:
    """What one rank of a world enqueues and the groups that it creates.

    Attributes:
        trace: the operations, in order.
        families: the groups by the calls that created them; the world itself is the first.
        num_calls: calls of `new_group` and `split_group`, each of which all ranks take part in.
        members: label of each group that this rank belongs to, to its ranks.
    """

    def __init__(self, rank: int, size: int, watch: Watch | None = None) -> None:
        self.rank, self.size = rank, size
        self.trace = Trace(rank)
        self.families = [GroupFamily([tuple(range(size))], split=True)]
        self.num_calls = 0
        self.members: dict[str, Row] = {}
        self.recording = True
        self._batch: list[RehearsedWork] | None = None
        self.enqueued: Enqueued = lambda name, label, tensors, late: None
        self._watch = watch or (lambda name, tensors: None)

    def enter(self, rows: list[Row], *, split: bool) -> str:
        """Note a call that creates groups; returns their label."""
        self.num_calls += 1
        last = self.families[-1]
        taken = {rank for row in last.rows for rank in row}
        if split or last.split or any(rank in taken for row in rows for rank in row):
            self.families.append(GroupFamily(list(rows), split=split))
        else:
            last.rows += rows
        return str(len(self.families) - 1)

    def begin_batch(self) -> None:
        """Sends and receives from here to `end_batch` are one operation of NCCL."""
        assert self._batch is None, "a batch within a batch"
        self._batch = []

    def end_batch(self) -> RehearsedWork | None:
        """Enqueue what the batch holds. Returns its work; None: it is empty."""
        batch, self._batch = self._batch, None
        assert batch is not None, "no batch was begun"
        if not batch:
            return None
        if self.recording:
            self.trace.enqueue_batch([work.ops[0] for work in batch])
        return RehearsedWork(
            self, [op for work in batch for op in work.ops],
            [tensor for work in batch for tensor in work.tensors],
            [done for work in batch for done in work.done],
        )  # fmt: skip

    def enqueue(
        self, name: str, label: str, row: Row, tensors: Sequence[Tensor], late: bool, **more: Any
    ) -> RehearsedWork | None:
        """Note an operation. Returns its work if it is asynchronous."""
        for tensor in tensors:
            if tensor.device.type != "cuda":
                raise RuntimeError(
                    f"No backend type associated with device type {tensor.device.type} ({name})"
                )
            if not tensor.is_contiguous():
                raise ValueError(f"Tensors must be contiguous ({name} of {tuple(tensor.shape)})")
        first = tensors[0]
        op = EnqueuedOp(
            name, (label, *row), self.rank, first.numel(), str(first.dtype).removeprefix("torch."),
            blocks=not late, **more,
        )  # fmt: skip
        self._watch(name, tensors)
        batched = self._batch is not None and op.peer is not None
        if self.recording and not batched:
            self.trace.enqueue(op)
        done = self.enqueued(name, label, tensors, late)
        work = RehearsedWork(self, [op], tensors, [] if done is None else [done])
        if batched:
            assert self._batch is not None
            self._batch.append(work)
        return work if late else None


class RehearsedWork(_Work):  # type: ignore[misc]
    """An operation under way: `wait` makes the compute stream wait, and the host goes on."""

    def __init__(
        self,
        world: RehearsedWorld,
        ops: Sequence[EnqueuedOp],
        tensors: Sequence[Tensor],
        done: Sequence[Callable[[], None]],
    ) -> None:
        super().__init__()
        self._world, self.ops, self.done = world, ops, done
        self.tensors: Sequence[Tensor] = tensors

    def wait(self, timeout: Any = None) -> bool:
        for done in self.done:
            done()
        self.tensors = ()
        for op in self.ops:
            if self._world.recording and op.index >= 0:
                self._world.trace.wait(op)
        return True

    def is_completed(self) -> bool:
        return False


class Group(_ProcessGroup):  # type: ignore[misc]
    """A process group whose operations are noted."""

    def __init__(self, world: RehearsedWorld, label: str, row: Row, index: int, name: str) -> None:
        super().__init__(index, len(row))
        self._world, self._label, self._row = world, label, row
        self._name, self._desc = name, ""

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def group_desc(self) -> str:
        return self._desc

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    def _get_backend(self, device: torch.device) -> Any:
        """What torch asks of a group's backend: NCCL's communicators can be split."""
        return _BACKEND_OF_A_GROUP

    def _note(
        self, name: str, tensors: Sequence[Tensor], opts: Any = None, **more: Any
    ) -> RehearsedWork | None:
        late = True if opts is None else bool(getattr(opts, "asyncOp", True))
        return self._world.enqueue(name, self._label, self._row, tensors, late, **more)

    def _root(self, opts: Any) -> int:
        return self._row[opts.rootRank]

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        return self._note("all-reduce", tensors, opts)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Any:
        return self._note("all-reduce", tensors, opts)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Any:
        return self._note("broadcast", tensors, opts, root=self._root(opts))

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        return self._note("reduce", tensors, opts, root=self._root(opts))

    def all_gather_single(self, output: Tensor, piece: Tensor, opts: Any = None) -> Any:
        if output.numel() != piece.numel() * self.size():
            raise ValueError(
                f"output tensor size must be equal to world_size times input tensor size: "
                f"{tuple(output.shape)}, {tuple(piece.shape)}, {self.size()}"
            )
        return self._note("all-gather", [piece, output], opts)

    def reduce_scatter_single(self, output: Tensor, whole: Tensor, opts: Any = None) -> Any:
        if whole.numel() != output.numel() * self.size():
            raise ValueError(
                f"input tensor must be the same size as output size times world size: "
                f"{tuple(whole.shape)}, {tuple(output.shape)}, {self.size()}"
            )
        return self._note("reduce-scatter", [output, whole], opts)

    _allgather_base, _reduce_scatter_base = all_gather_single, reduce_scatter_single

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        return self._note("all-gather", [inputs[0], *outputs[0]], opts)

    def gather(self, outputs: Any, inputs: list[Tensor], opts: Any = None) -> Any:
        return self._note("gather", inputs, opts, root=self._root(opts))

    def scatter(self, outputs: list[Tensor], inputs: Any, opts: Any = None) -> Any:
        return self._note("scatter", outputs, opts, root=self._root(opts))

    def all_to_all_single(
        self, output: Tensor, given: Tensor, received: Any, sent: Any, opts: Any = None
    ) -> Any:
        for name, tensor, sizes in (("output", output, received), ("input", given, sent)):
            if sizes and (len(sizes) != self.size() or sum(sizes) != len(tensor)):
                raise ValueError(f"{name} split sizes {sizes} of {len(tensor)} rows")
        return self._note("all-to-all", [given, output], opts)

    alltoall_base = all_to_all_single

    def send(self, tensors: list[Tensor], target: int, tag: int) -> Any:
        return self._note("send", tensors, peer=self._row[target])

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Any:
        return self._note("recv", tensors, peer=self._row[source])

    def _start_coalescing(self, device: torch.device) -> None:
        self._world.begin_batch()

    def _end_coalescing(self, device: torch.device) -> Any:
        return self._world.end_batch()

    def barrier(self, opts: Any = None) -> Any:
        return self._note("barrier", [torch.empty(1, device="cuda:0")], opts)


@contextmanager
def rehearsed_world(rank: int, size: int, watch: Watch | None = None) -> Iterator[RehearsedWorld]:
    """Within, this process is `rank` of a world of `size`, whose backend is taken for NCCL.

    Args:
        watch: called with the name and the tensors of each operation.
    """
    world = RehearsedWorld(rank, size, watch)
    torch_dist: Any = dist
    making: list[str] = ["0"]

    def created(common: Any, options: Any) -> Group:
        row = tuple(common.global_ranks_in_group) or tuple(range(common.group_size))
        world.members[making[0]] = row
        return Group(world, making[0], row, common.group_rank, common.group_id)

    dist.Backend._plugins.pop(_BACKEND.upper(), None)
    dist.Backend.register_backend(_BACKEND, created, extended_api=True, devices=["cpu", "cuda"])
    before = {name: getattr(dist, name) for name in ("new_group", "split_group", "get_backend")}
    real_new_group = before["new_group"]

    def make(row: Row, label: str) -> Any:
        making[0] = label
        whole = torch_dist.group.WORLD
        # Unbound meanwhile: torch would ask the backend to connect to the device.
        device, whole.bound_device_id = whole.bound_device_id, None
        try:
            return real_new_group(list(row))
        finally:
            whole.bound_device_id = device

    def new_group(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("use_local_synchronization"):
            raise RuntimeError("a group bound to a device is split off by every rank")
        row = tuple(range(size)) if ranks is None else tuple(sorted(ranks))
        label = world.enter([row], split=False)
        return make(row, label) if rank in row else dist.GroupMember.NON_GROUP_MEMBER

    def split_group(
        parent_pg: Any = None, split_ranks: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        if not split_ranks:
            raise ValueError("split_ranks cannot be None or empty")
        members = tuple(range(size)) if parent_pg is None else parent_pg._row
        rows = [tuple(members[index] for index in sorted(row)) for row in split_ranks]
        flat = [member for row in rows for member in row]
        if len(set(flat)) != len(flat):
            raise ValueError("the split groups share ranks")
        label = world.enter(rows, split=True)
        mine = world.families[-1].row(rank)
        return None if mine is None else make(mine, label)

    torch_dist.new_group, torch_dist.split_group = new_group, split_group
    torch_dist.get_backend = lambda group=None: "nccl"
    try:
        dist.init_process_group(_BACKEND, store=torch_dist.HashStore(), rank=rank, world_size=size)
        # As init_process_group(device_id=...) does, whose eager connection has nothing to connect.
        torch_dist.group.WORLD.bound_device_id = torch.device("cuda", rank % NUM_DEVICES)
        yield world
    finally:
        for name, value in before.items():
            setattr(torch_dist, name, value)
        if dist.is_initialized():
            dist.destroy_process_group()
