"""What ranks do in the tests of the shared-memory backend."""

from __future__ import annotations

import os
import random
import time
from typing import Any

import torch
import torch.distributed as dist

from hocket.launch import RankContext

OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN,
       "product": dist.ReduceOp.PRODUCT, "avg": dist.ReduceOp.AVG}
DTYPES = [torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bfloat16, torch.float16]
SIZES = [1, 3, 7, 1023, 4097, 300_001, 1_500_003]


def make(rank: int, size: int, dtype: torch.dtype, salt: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    if dtype.is_floating_point:
        return torch.randn(size, generator=generator).to(dtype)
    return torch.randint(0, 5, (size,), generator=generator).to(dtype)


def groups() -> tuple[Any, Any]:
    return dist.group.WORLD, dist.new_group(backend="gloo")


def same(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    if found.dtype in (torch.bfloat16, torch.float16):
        torch.testing.assert_close(found, expected, msg=lambda m: f"{what}: {m}")
    else:
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, msg=lambda m: f"{what}: {m}")


def all_reduce(context: RankContext) -> int:
    shm, gloo = groups()
    n, r, count = context.world_size, context.rank, 0
    for size in SIZES:
        for dtype in DTYPES if size < 5000 else DTYPES[:1] + DTYPES[-2:-1]:
            for name, op in OPS.items():
                if name == "avg" and not dtype.is_floating_point:
                    continue
                mine = make(r, size, dtype)
                found = mine.clone()
                dist.all_reduce(found, op=op, group=shm)
                if dtype in (torch.bfloat16, torch.float16):
                    wide = mine.float()
                    dist.all_reduce(wide, op=op, group=gloo)
                    expected = wide.to(dtype)
                else:
                    expected = mine.clone()
                    dist.all_reduce(expected, op=op, group=gloo)
                same(found, expected, f"{name} {dtype} {size} on {n}")
                count += 1
    return count
