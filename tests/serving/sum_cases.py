"""What ranks do in the tests of sums by the kernel."""

from __future__ import annotations

import os
import time
from typing import Any

import torch

from hocket.launch import RankContext
from hocket.runtime.collectives import all_reduce
from hocket.runtime.mesh import Mesh
from hocket.runtime.native.kernels import CpuKernels
from hocket.runtime.native.library import library
from hocket.runtime.native.sums import Sums
from hocket.runtime.shm import Mismatch, PeerLost, PeerTimeout
from hocket.spec.layout import Layout
from tests.shm.cases import others_gave_up


def made(context: RankContext, form: str | None = None) -> tuple[Mesh, Sums | None]:
    mesh = Mesh(Layout.parse(f"tp{context.world_size}"), context.rank)
    found = library(form)
    assert found is not None
    return mesh, Sums.of(mesh.axis("tp"), mesh.recorder, CpuKernels(found))


def equal(context: RankContext, form: str | None = None) -> Any:
    """(whether there are sums, how often they were other bits than the same sum done here)."""
    mesh, sums = made(context, form)
    if sums is None:
        return [False, 0]
    off = 0
    draw = torch.Generator().manual_seed(0)
    sizes = [(1,), (1, 3, 64), (7, 33), (sums.room,), (sums.room + 1,), (2, 5)] * 20
    for number, shape in enumerate(sizes):
        parts = [torch.randn(shape, generator=draw) for _ in range(context.world_size)]
        added = torch.randn(shape, generator=draw) if number % 3 else None
        expected = parts[0] + parts[1]
        for part in parts[2:]:
            expected = expected + part
        if added is not None:
            expected = added + expected
        if number % 7 == context.rank:
            time.sleep(0.002)  # others fall asleep
        found = sums(parts[context.rank].clone(), added)
        off += not torch.equal(found, expected)
        if number % 5 == 0:  # the group's own sums between them
            one = torch.ones(3)
            all_reduce(one, mesh.axis("tp"), mesh.recorder)
            off += not bool((one == context.world_size).all())
    wide = torch.ones(4, dtype=torch.bfloat16)
    off += not bool((sums(wide) == context.world_size).all())
    turned = torch.ones(4, 6).t()
    off += sums.takes(turned)
    counted = sum(row["count"] for row in mesh.recorder.collectives())
    return [True, off, counted]


def unequal(context: RankContext) -> str:
    _, sums = made(context)
    assert sums is not None
    try:
        sums(torch.ones(4 + context.rank))
    except Mismatch as error:
        return str(error)
    return "nothing"


def late(context: RankContext) -> list[Any]:
    _, sums = made(context)
    assert sums is not None
    if context.rank == 1:
        others_gave_up(context)
        return []
    begin = time.monotonic()
    try:
        sums(torch.ones(4))
    except PeerTimeout as error:
        waited = time.monotonic() - begin
        context.store().set(f"gave up {context.rank}", "")
        return [str(error), waited]
    return ["nothing", 0.0]


def bereaved(context: RankContext) -> str:
    """The last rank dies; each other one emits what it is told."""
    _, sums = made(context)
    assert sums is not None
    sums(torch.ones(4))
    if context.rank == context.world_size - 1:
        context.emit({"event": "dying", "pid": os.getpid()})
        os.kill(os.getpid(), 9)
    try:
        sums(torch.ones(4))
    except PeerLost as error:
        context.emit({"event": "noticed", "text": str(error)})
        raise
    return ""


def unfinished(context: RankContext) -> float:
    """Rank 0 of each pair has a message under way that is larger than its ring; it goes on while
    that rank waits in a sum for one that waits for the message's reader."""
    import torch.distributed as dist

    _, sums = made(context)
    assert sums is not None
    large = torch.ones(3 << 20)
    if context.rank == 0:
        work: Any = dist.isend(large, 1)
        found = sums(torch.ones(2))
        work.wait()
    else:
        dist.recv(large, 0)  # all of it, before the sum
        found = sums(torch.ones(2))
    return float(found.sum())
