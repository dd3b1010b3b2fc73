"""Process-group checks: communicators made by splitting, and every collective against the CPU.

Not executed on a GPU yet.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from hocket.doctor.check import CheckOutcome, row_of
from hocket.doctor.place import Place
from hocket.doctor.world import join, ranks, tell

if TYPE_CHECKING:
    from torch import Tensor

    from hocket.launch import RankContext

_HERE = "hocket.doctor.groups:"
LIMITS = {"fp32": 1e-5, "bf16": 2e-2}
"""Largest difference of a collective's result, relative to the largest entry."""
COUNT = 2
"""Ranks of the check of collectives."""


_row = row_of(
    "hocket.doctor.groups", group="multi-gpu", gpus=2, seconds=12.0, timeout=120.0, slow=True,
)  # fmt: skip


CHECKS = (
    *(
        _row(
            f"groups-{layout.replace('.', '-')}", f"process groups of {layout}: seconds and device "
            "memory of each communicator, and an all-reduce on each axis", "split_groups",
            "sums are right, groups as the layout lists them, no call of new_group",
            arguments={"layout": layout}, gpus=gpus, rehearsals=("cpu",) if gpus <= 4 else (),
            unrehearsed="" if gpus <= 4 else "eight ranks are more than a small machine's cores; "
            "groups-dp2-tp2 is rehearsed",
        )
        for layout, gpus in (("dp2.tp2", 4), ("dp2.pp2.tp2", 8))
    ),
    _row(
        "collectives", "every function of runtime/collectives.py on two ranks, fp32 and bf16, "
        "synchronous and asynchronous, compared with its result computed on the CPU", "collectives",
        "differences of at most 1e-5 (fp32) and 2e-2 (bf16) of the largest entry", seconds=15.0,
    ),
)  # fmt: skip


# --- communicators ---------------------------------------------------------------------------


def split_groups(place: Place, *, layout: str) -> CheckOutcome:
    """The groups of a layout, as each rank made them."""
    from hocket.spec.layout import Layout
    from hocket.spec.process_groups import axis_groups, groups_of_rank

    parsed = Layout.parse(layout)
    payload = {"layout": layout, "backend": place.size("nccl", "gloo")}
    found = ranks(place, _HERE + "split_rank", parsed.world_size, payload)
    for rank, values in enumerate(found):
        expected = sorted(map(list, groups_of_rank(axis_groups(parsed), rank)))
        place.equal(f"groups of rank {rank}", sorted(values["groups"]), expected)
        place.equal(f"axes with a wrong sum on rank {rank}", values["wrong"], [])
        if place.on_gpu:
            place.equal(f"calls of new_group on rank {rank}", values["calls"], 0)
    count = max(len(values["groups"]) for values in found)
    for name in ("seconds", "bytes"):
        place.values[f"{name}_of_all_communicators"] = max(values[name] for values in found)
        place.values[f"{name}_per_communicator"] = max(values[name] for values in found) / count
    return place.outcome(communicators=count)


def split_rank(context: RankContext, payload: dict[str, Any]) -> None:
    """One rank: makes the mesh and sums on every axis."""
    import torch
    import torch.distributed as dist

    from hocket.runtime.collectives import all_reduce
    from hocket.runtime.mesh import Mesh
    from hocket.spec.layout import Layout

    calls = []
    new_group = dist.new_group

    def counted(*arguments: Any, **options: Any) -> Any:
        calls.append(arguments)
        return new_group(*arguments, **options)

    dist.new_group = counted
    begun = time.perf_counter()
    cuda = context.device_kind == "cuda"
    before = torch.cuda.mem_get_info(context.local_rank)[0] if cuda else 0
    device = join(context, payload["backend"])
    mesh = Mesh(Layout.parse(payload["layout"]), context.rank, device)
    context.position = mesh.position
    wrong = []
    for axes in mesh.process_groups().values():
        axis = mesh.axis(axes[0])
        value = torch.full((1024,), float(context.rank + 1), device=device)
        all_reduce(value, axis, mesh.recorder)
        if not bool((value == sum(rank + 1 for rank in axis.ranks)).all()):
            wrong.append(axis.name)
    seconds = time.perf_counter() - begun
    used = before - torch.cuda.mem_get_info(device)[0] if cuda else 0
    groups = [list(row) for row in mesh.process_groups()]
    tell(context, groups=groups, wrong=wrong, calls=len(calls), seconds=seconds, bytes=used)


# --- collectives -----------------------------------------------------------------------------


def collectives(place: Place) -> CheckOutcome:
    """Results of every function on two ranks."""
    found = ranks(place, _HERE + "collectives_rank", COUNT, {"backend": place.size("nccl", "gloo")})
    for dtype, limit in LIMITS.items():
        names = found[0]["errors"][dtype]
        worst = {n: max(values["errors"][dtype][n] for values in found) for n in names}
        place.values[f"{dtype}_relative_error"] = max(worst.values())
        for name, error in worst.items():
            if not error <= limit:
                place.failures.append(f"{name} in {dtype} differs by {error:.2g} ({limit:g})")
    return place.outcome(functions=len(found[0]["errors"]["fp32"]))


def collectives_rank(context: RankContext, payload: dict[str, Any]) -> None:
    """One rank: largest relative difference of each function, by dtype."""
    import torch

    from hocket.runtime.mesh import Mesh
    from hocket.spec.layout import Layout

    device = join(context, payload["backend"])
    mesh = Mesh(Layout(dp=COUNT), context.rank, device)
    context.position = mesh.position
    kinds = {"fp32": torch.float32, "bf16": torch.bfloat16}
    errors = {name: _errors(mesh, kind) for name, kind in kinds.items()}
    tell(context, errors=errors)


def _errors(mesh: Any, dtype: Any) -> dict[str, float]:
    """Of each function, compared with its result from all ranks' inputs in fp64."""
    import torch

    from hocket.runtime import collectives as c

    axis, recorder, here = mesh.axis("dp"), mesh.recorder, mesh.axis("dp").index
    count, other = axis.size, (here + 1) % axis.size
    drawn = [
        torch.randn(4 * count, 6, generator=torch.Generator().manual_seed(rank)).to(dtype)
        for rank in range(count)
    ]
    whole = torch.stack([each.double() for each in drawn])
    total = whole.sum(0)
    found: dict[str, float] = {}

    def mine() -> Tensor:
        return drawn[here].clone().to(mesh.device)  # collectives write in place

    def compare(name: str, result: Tensor, expected: Tensor) -> None:
        error = (result.detach().double().cpu() - expected).abs().max() / expected.abs().max()
        found[name] = float(error.nan_to_num(nan=float("inf")))

    for op, wanted in (("sum", total), ("max", whole.amax(0)), ("min", whole.amin(0))):
        for late in (False, True):
            value = mine()
            work = c.all_reduce(value, axis, recorder, op, async_op=late)
            assert (work is None) == (not late), work
            if work is not None:
                work.wait()
            compare(f"all_reduce {op}{' asynchronous' if late else ''}", value, wanted)
    for late in (False, True):
        value = mine()
        work = c.broadcast(value, axis, recorder, 1, async_op=late)
        if work is not None:
            work.wait()
        compare(f"broadcast{' asynchronous' if late else ''}", value, whole[1])
    for dim in (0, 1):
        gathered = torch.cat(list(whole), dim)
        compare(f"all_gather {dim}", c.all_gather(mine(), axis, recorder, dim), gathered)
        shards = total.chunk(count, dim)
        compare(
            f"reduce_scatter {dim}", c.reduce_scatter(mine(), axis, recorder, dim), shards[here]
        )
    sizes = [2 + rank for rank in range(count)]
    uneven = c.all_gather(mine()[: sizes[here]], axis, recorder, 0, sizes)
    wanted = torch.cat([whole[rank, :size] for rank, size in enumerate(sizes)])
    compare("all_gather uneven", uneven, wanted)
    flat = mine().flatten()
    piece = torch.empty(flat.numel() // count, dtype=dtype, device=mesh.device)
    work = c.reduce_scatter_flat(piece, flat, axis, recorder)
    assert work is not None
    work.wait()
    compare("reduce_scatter_flat", piece, total.flatten().chunk(count)[here])
    large = torch.empty(count * flat.numel(), dtype=dtype, device=mesh.device)
    work = c.all_gather_flat(large, flat, axis, recorder)
    assert work is not None
    work.wait()
    compare("all_gather_flat", large, whole.flatten())
    shard = torch.empty(4, 6, dtype=dtype, device=mesh.device)
    given = mine() if here == 0 else None
    compare("scatter", c.scatter(given, shard, axis, recorder), whole[0].chunk(count)[here])
    pieces = c.gather(mine(), axis, recorder, 1)
    assert (pieces is None) == (here != 1)
    if pieces is not None:
        compare("gather", torch.stack(pieces), whole)
    value = mine()
    c.reduce(value, axis, recorder, 1)
    if here == 1:
        compare("reduce", value, total)
    value, got = mine(), torch.empty_like(mine())
    # Queued in one order on both, as NCCL's communicator of a pair takes them.
    first = [c.isend(value, axis, other, recorder)] if here == 0 else []
    works = [*first, c.irecv(got, axis, other, recorder)]
    works += [] if here == 0 else [c.isend(value, axis, other, recorder)]
    for each in works:
        each.wait()
    compare("isend and irecv", got, whole[other])
    c.barrier(axis, recorder)
    compare("traced_all_reduce", c.traced_all_reduce(mine(), axis), total)
    compare("traced_all_gather", c.traced_all_gather(mine(), axis), torch.cat(list(whole)))
    compare(
        "traced_reduce_scatter", c.traced_reduce_scatter(mine(), axis), total.chunk(count)[here]
    )
    for name in ("gather", "reduce"):  # one rank alone has their results
        found.setdefault(name, 0.0)
    return found
