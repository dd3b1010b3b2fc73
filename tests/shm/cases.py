"""What ranks do in the tests of the shared-memory backend: everything beside Gloo's result."""

from __future__ import annotations

import datetime
import os
import random
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hocket.launch import RankContext
from hocket.runtime.shm import Mismatch, PeerLost, PeerTimeout

OPS = {
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
    "avg": dist.ReduceOp.AVG,
}
HALF = (torch.bfloat16, torch.float16)
DTYPES = (torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8, *HALF)
SMALL = (1, 3, 1023, 4097)
LARGE = (300_001, 1_300_003)  # several chunks; two phases from three ranks on


def make(rank: int, size: int, dtype: torch.dtype = torch.float32, salt: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    if dtype.is_floating_point:
        return torch.randn(size, generator=generator).to(dtype)
    return torch.randint(0, 5, (size,), generator=generator).to(dtype)


def same(found: Tensor, expected: Tensor, what: str) -> None:
    exact = found.dtype not in (torch.float32, torch.float64)
    tolerance: dict[str, float] = {} if exact else {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(found, expected, msg=lambda m: f"{what}: {m}", **tolerance)


def all_reduce(context: RankContext) -> int:
    gloo = dist.new_group(backend="gloo")
    count = 0
    cases = [(s, d) for s in SMALL for d in DTYPES] + [
        (s, d) for s in LARGE for d in (torch.float32, torch.bfloat16)
    ]
    for size, dtype in cases:
        for name, op in OPS.items():
            if (name == "avg" and not dtype.is_floating_point) or (size > 5000 and name != "sum"):
                continue
            mine = make(context.rank, size, dtype)
            found = mine.clone()
            dist.all_reduce(found, op=op)
            # Gloo rounds half precision after every term; here it is summed in fp32.
            wide = mine.float() if dtype in HALF else mine
            dist.all_reduce(wide, op=op, group=gloo)
            same(found, wide.to(dtype), f"{name} of {size} {dtype}")
            count += 1
    return count


def every_rank_holds_the_same_bits(context: RankContext, size: int) -> str:
    import hashlib

    tensor = make(context.rank, size) * 1e3
    dist.all_reduce(tensor)
    return hashlib.sha256(tensor.numpy().tobytes()).hexdigest()


def moving(context: RankContext) -> int:
    """Every collective that moves pieces, on odd sizes, beside Gloo."""
    gloo = dist.new_group(backend="gloo")
    rank, n, count = context.rank, context.world_size, 0

    def both(what: str, call: Callable[[Any], list[Tensor]]) -> None:
        nonlocal count
        for found, expected in zip(call(None), call(gloo), strict=True):
            same(found, expected, what)
        count += 1

    for size in (1, 5, 1023, 270_001):
        for dtype in (torch.float32, torch.int64, torch.bfloat16):
            one = make(rank, size, dtype)
            whole = make(rank, size * n, dtype, salt=1)
            pieces = [make(rank, size, dtype, salt=2 + i) for i in range(n)]

            def broadcast(group: Any, root: int, one: Tensor = one) -> list[Tensor]:
                tensor = one.clone()
                dist.broadcast(tensor, root, group=group)
                return [tensor]

            def reduce(group: Any, root: int, one: Tensor = one) -> list[Tensor]:
                tensor = one.float()
                dist.reduce(tensor, root, group=group)
                return [tensor] if rank == root else []

            def gather(group: Any, root: int, one: Tensor = one) -> list[Tensor]:
                outputs = [torch.empty_like(one) for _ in range(n)] if rank == root else None
                dist.gather(one, outputs, root, group=group)
                return outputs or []

            def scatter(
                group: Any, root: int, one: Tensor = one, pieces: list[Tensor] = pieces
            ) -> list[Tensor]:
                output = torch.empty_like(one)
                dist.scatter(output, pieces if rank == root else None, root, group=group)
                return [output]

            for root in {0, n - 1}:
                for call in (broadcast, reduce, gather, scatter):
                    what = f"{call.__name__} {size} {dtype} from {root}"
                    both(what, lambda group, call=call, root=root: call(group, root))

            def all_gather(group: Any, one: Tensor = one) -> list[Tensor]:
                outputs = [torch.empty_like(one) for _ in range(n)]
                dist.all_gather(outputs, one, group=group)
                return outputs

            def all_gather_single(group: Any, one: Tensor = one) -> list[Tensor]:
                output = one.new_empty(n * one.numel())
                dist.all_gather_single(output, one, group=group)
                return [output]

            def reduce_scatter_single(group: Any, whole: Tensor = whole) -> list[Tensor]:
                output = torch.empty(whole.numel() // n)
                dist.reduce_scatter_single(output, whole.float(), group=group)
                return [output]

            def reduce_scatter(group: Any, pieces: list[Tensor] = pieces) -> list[Tensor]:
                output = torch.empty(pieces[0].numel())
                dist.reduce_scatter(output, [p.float() for p in pieces], group=group)
                return [output]

            def all_to_all_single(group: Any, whole: Tensor = whole) -> list[Tensor]:
                output = torch.empty_like(whole)
                dist.all_to_all_single(output, whole, group=group)
                return [output]

            for call in (
                all_gather,
                all_gather_single,
                reduce_scatter_single,
                reduce_scatter,
                all_to_all_single,
            ):
                both(f"{call.__name__} {size} {dtype}", call)
    return count


def uneven(context: RankContext) -> bool:
    """All-to-all whose pieces differ: rank r gives (r + s) % 3 + s rows to rank s."""
    rank, n = context.rank, context.world_size
    gives = [(rank + s) % 3 + s for s in range(n)]
    takes = [(s + rank) % 3 + rank for s in range(n)]
    rows = torch.cat([torch.full((k, 2), 10.0 * rank + s) for s, k in enumerate(gives)])
    found = torch.empty(sum(takes), 2)
    dist.all_to_all_single(found, rows, takes, gives)
    expected = torch.cat([torch.full((k, 2), 10.0 * s + rank) for s, k in enumerate(takes)])
    lists = [torch.empty(k, 2) for k in takes]
    dist.all_to_all(lists, list(rows.split(gives)))
    return torch.equal(found, expected) and torch.equal(torch.cat(lists), expected)


def strided(context: RankContext) -> list[float]:
    """Results arrive in tensors whose elements do not lie in a row."""
    rank, n = context.rank, context.world_size
    base = torch.zeros(6, 8)
    view = base[:, ::2]
    view.fill_(rank + 1.0)
    dist.all_reduce(view)
    columns = torch.zeros(4, n).t()  # row s is a column of memory
    dist.all_gather(list(columns.unbind(0)), torch.full((4,), float(rank)))
    place = torch.zeros(4, 6).t()
    work = dist.irecv(place, (rank - 1) % n)
    dist.isend(torch.full((6, 4), rank + 0.5).t().contiguous().t(), (rank + 1) % n)
    work.wait()
    parameter = torch.nn.Parameter(torch.full((3,), float(rank)))
    dist.broadcast(parameter, n - 1)
    scalar = torch.tensor(float(rank))
    dist.all_reduce(scalar)
    return [
        float(base.sum()),
        float(columns.sum()),
        float(place.sum()),
        float(parameter.sum()),
        float(scalar),
    ]


def subgroups(context: RankContext) -> list[float]:
    """Rows and columns of a 2 x 2 mesh, used in turn and at once."""
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    row, column = rows[context.rank // 2], columns[context.rank % 2]
    first = torch.tensor([float(context.rank)])
    second = first.clone()
    works = [dist.all_reduce(first, group=row, async_op=True)]
    works.append(dist.all_reduce(second, group=column, async_op=True))
    for work in reversed(works):
        work.wait()
    third = torch.tensor([float(context.rank)])
    dist.broadcast(third, context.rank % 2 + 2, group=column)
    objects: list[Any] = [None] * 4
    dist.all_gather_object(objects, {"rank": context.rank})
    assert [o["rank"] for o in objects] == [0, 1, 2, 3]
    return [float(first), float(second), float(third)]


def asynchronous(context: RankContext, seed: int) -> float:
    """Random collectives on two groups and messages, waited for in another order than begun."""
    shared = random.Random(seed)  # what is called, the same on all ranks
    own = random.Random(seed * 100 + context.rank)  # when it is waited for
    n = context.world_size
    groups = [dist.group.WORLD, dist.new_group(list(range(n)))]
    open_works: list[tuple[Any, Tensor, float]] = []
    worst = 0.0

    def settle(index: int) -> None:
        nonlocal worst
        work, tensor, expected = open_works.pop(index)
        work.wait()
        worst = max(worst, float((tensor - expected).abs().max()))

    for step in range(60):
        kind, size = shared.randrange(4), shared.choice((1, 100, 5000, 400_000, 2_500_000))
        group = groups[shared.randrange(2)]
        value = float(step)
        if kind == 0:
            tensor = torch.full((size,), value + context.rank)
            work = dist.all_reduce(tensor, group=group, async_op=True)
            open_works.append((work, tensor, n * value + n * (n - 1) / 2))
        elif kind == 1:
            root = shared.randrange(n)
            tensor = torch.full((size,), value if context.rank == root else -1.0)
            work = dist.broadcast(tensor, root, group=group, async_op=True)
            open_works.append((work, tensor, value))
        elif kind == 2:
            piece = torch.full((size // n + 1,), value)
            tensor = torch.empty(n * piece.numel())
            work = dist.all_gather_single(tensor, piece, group=group, async_op=True)
            open_works.append((work, tensor, value))
        else:
            tensor = torch.full((size,), -1.0)
            sent = torch.full((size,), value)
            work = dist.irecv(tensor, (context.rank - 1) % n, group=group, tag=step)
            open_works.append((work, tensor, value))
            work = dist.isend(sent, (context.rank + 1) % n, group=group, tag=step)
            open_works.append((work, sent, value))
            if own.random() < 0.5:  # a rank that is late, with work open
                time.sleep(0.002)
        while len(open_works) > 5:
            settle(own.randrange(len(open_works)))
    while open_works:
        settle(own.randrange(len(open_works)))
    return worst


def messages(context: RankContext) -> list[Any]:
    """Order within a tag, tags against order, larger than the ring, from anyone."""
    rank, other = context.rank, 1 - context.rank
    found: list[Any] = []
    if rank == 0:
        for i in range(5):
            dist.send(torch.tensor([float(i)]), other, tag=i % 2)
        dist.send(torch.empty(0), other, tag=9)
    else:
        for i in (1, 3, 0, 2, 4):  # tag 1 first: what lies before it is set aside
            tensor = torch.empty(1)
            dist.recv(tensor, other, tag=i % 2)
            found.append(float(tensor))
        dist.recv(torch.empty(0), other, tag=9)
    # Both send first what no ring holds: nobody may wait for the other to receive.
    large = torch.arange(3_000_000, dtype=torch.float32) + rank
    place = torch.empty_like(large)
    sending = dist.isend(large, other)
    receiving = dist.irecv(place, other)
    receiving.wait()
    sending.wait()
    found.append(bool((place == torch.arange(3_000_000) + other).all()))
    # A collective in between, while the other's large message is still on its way.
    receiving = dist.irecv(place, other) if rank else None
    if rank == 0:
        sending = dist.isend(large, other)
        sending.wait()
    dist.barrier()
    if receiving is not None:
        receiving.wait()
    source = torch.tensor([7.0])
    if rank == 0:
        dist.send(source, other)
    else:
        anyone = torch.empty(1)
        found.append([dist.recv(anyone), float(anyone)])
    return found


def mismatch(context: RankContext, how: str) -> str:
    """Each rank tells what it was told."""
    try:
        if how == "kind":
            tensor = torch.ones(8)
            if context.rank == 0:
                dist.all_reduce(tensor)
            else:
                dist.barrier()
        elif how == "size":
            dist.all_reduce(torch.ones(8 if context.rank == 0 else 16))
        elif context.rank == 0:
            dist.send(torch.ones(8), 1)
        else:
            dist.recv(torch.ones(4), 0)
    except Mismatch as error:
        return str(error)
    return "nothing"


def late(context: RankContext) -> list[Any]:
    """Rank 1 does not come to the second collective before the others have given up."""
    dist.all_reduce(torch.ones(4))
    if context.rank == 1:
        others_gave_up(context)
        return []
    begin = time.monotonic()
    try:
        dist.all_reduce(torch.ones(4))
    except PeerTimeout as error:
        waited = time.monotonic() - begin
        context.store().set(f"gave up {context.rank}", "")
        return [str(error), waited]
    return ["nothing", 0.0]


def others_gave_up(context: RankContext) -> None:
    """Wait until each other rank has set its key. Raises if one does not for a minute."""
    others = [rank for rank in range(context.world_size) if rank != context.rank]
    minute = datetime.timedelta(minutes=1)
    context.store().wait([f"gave up {rank}" for rank in others], minute)


def bereaved(context: RankContext, how: str) -> str:
    """The last rank dies in the middle; each other one emits what it is told."""
    dist.barrier()
    group = dist.group.WORLD
    victim = context.world_size - 1
    if context.rank == victim:
        context.emit({"event": "dying", "pid": os.getpid()})
        os.kill(os.getpid(), 9)
    try:
        if how == "collective":
            dist.all_reduce(torch.ones(4), group=group)
        else:
            dist.recv(torch.ones(4), victim)
    except PeerLost as error:
        context.emit({"event": "noticed", "text": str(error)})
        raise
    return ""


def traces(context: RankContext) -> list[str]:
    """Names of shared memory that a kill would leave behind, seen while the group is in use."""
    dist.all_reduce(torch.ones(1 << 20))
    return [name for name in os.listdir("/dev/shm") if "hocket" in name]


def functional(context: RankContext) -> list[float]:
    """FSDP2 and DTensor call the group from C++, by its name."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    expected = model(torch.ones(2, 8)).sum().item()
    mesh = init_device_mesh("cpu", (context.world_size,))
    fully_shard(model, mesh=mesh)
    loss = model(torch.ones(2, 8)).sum()
    loss.backward()
    whole = torch.arange(12.0).view(6, 2)
    sharded = distribute_tensor(whole, mesh, [Shard(0)])
    return [float(loss) - expected, float(sharded.sum().full_tensor()) - float(whole.sum())]


def devices(ctx: RankContext) -> list[list[str]]:
    """Devices of a group that torch does not know, and of the world's."""
    from hocket.runtime.host_group import HostProcessGroup

    return [
        [str(one) for one in group._device_types]
        for group in (HostProcessGroup(0, 1), dist.group.WORLD)
    ]
