"""MemoryReport: what fills a rank's device when it runs out of memory, by owner, and the fixes.

Training and serving know their owners and what frees memory; numbers and text are made here.

Not executed on a GPU yet: tests raise torch's error where a step allocates, on a CPU.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import re
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from hocket.spec.errors import RankMemoryError
from hocket.spec.units import format_bytes

LARGEST = 3
"""Tensors that are named for each owner."""

_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_REQUESTED = re.compile(r"[Tt]ried to allocate ([0-9.]+) ([KMGT]?i?B)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class AllocatorBytes:
    """What the allocator knows, in bytes; 0 where it does not.

    Attributes:
        requested: of the allocation that failed.
        allocated: of living tensors.
        reserved: taken from the device; more than `allocated` by what lies idle in fragments.
        capacity, free: of the device, all processes counted.
    """

    requested: int = 0
    allocated: int = 0
    reserved: int = 0
    capacity: int = 0
    free: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnedBytes:
    """Bytes of one owner, and its largest tensors: (name or shape, bytes)."""

    name: str
    nbytes: int
    largest: tuple[tuple[str, int], ...] = ()


def device_state(error: BaseException, device: torch.device) -> AllocatorBytes:
    found = _REQUESTED.search(str(error))
    requested = int(float(found[1]) * _UNITS[found[2]]) if found else 0
    if device.type != "cuda":
        return AllocatorBytes(requested=requested)
    stats = torch.cuda.memory_stats(device)
    free, total = torch.cuda.mem_get_info(device)
    return AllocatorBytes(
        requested=requested,
        allocated=int(stats.get("allocated_bytes.all.current", 0)),
        reserved=int(stats.get("reserved_bytes.all.current", 0)),
        capacity=total,
        free=free,
    )


def unnamed(tensors: Iterable[Tensor]) -> list[tuple[str, Tensor | None]]:
    """Tensors with their shapes and dtypes as labels."""
    return [(f"{list(t.shape)} {str(t.dtype).removeprefix('torch.')}", t) for t in tensors]


def owner_of(
    name: str,
    tensors: Iterable[tuple[str, Tensor | None]],
    device: torch.device,
    seen: set[int],
) -> OwnedBytes:
    """Storages of tensors on the device, each counted for the first owner that has it."""
    sizes: list[tuple[str, int]] = []
    for label, tensor in tensors:
        if tensor is None or tensor.device.type != device.type:
            continue
        storage = tensor.untyped_storage()
        if storage._cdata not in seen and storage.nbytes():
            seen.add(storage._cdata)
            sizes.append((label, storage.nbytes()))
    sizes.sort(key=lambda each: -each[1])
    return OwnedBytes(name=name, nbytes=sum(n for _, n in sizes), largest=tuple(sizes[:LARGEST]))


def living() -> Iterator[Tensor]:
    """Every tensor that Python's collector knows of."""
    for each in gc.get_objects():
        with contextlib.suppress(ReferenceError, RuntimeError):
            if issubclass(type(each), Tensor) and not each.is_meta:
                yield each


def activations(
    found: Sequence[OwnedBytes], allocated: int, seen: set[int], device: torch.device
) -> OwnedBytes:
    """The rest: living tensors that `found` does not have.

    Args:
        allocated: bytes of living tensors, as the allocator counts them: Python sees a part of what
            autograd saved. 0: not known.
    """
    rest = owner_of("activations", unnamed(living()), device, seen)
    if allocated:
        left = max(0, allocated - sum(owner.nbytes for owner in found))
        rest = dataclasses.replace(rest, nbytes=left)
    return rest


def out_of_memory_report(
    rank: int,
    state: AllocatorBytes,
    found: Sequence[OwnedBytes],
    fixes: Sequence[tuple[str, int]],
    other: str,
) -> RankMemoryError:
    """The error of a rank that ran out of memory: numbers, owners, and the fix to paste.

    Args:
        fixes: flags and about how many bytes each frees on this rank, the best first.
        other: the hint where there is none.
    """
    parts = [f"rank {rank} ran out of memory"]
    if state.requested:
        parts[0] += f": {format_bytes(state.requested)} requested"
    if state.capacity:
        idle = max(0, state.reserved - state.allocated)
        parts.append(
            f"{format_bytes(state.allocated)} allocated, {format_bytes(state.reserved)} reserved "
            f"({format_bytes(idle)} of it idle), {format_bytes(state.capacity)} in all, "
            f"{format_bytes(state.free)} free"
        )
    text = ", ".join(parts)
    for owner in sorted(found, key=lambda each: -each.nbytes):
        if owner.nbytes:
            tensors = "; ".join(f"{label} {format_bytes(n)}" for label, n in owner.largest)
            text += f"\n  {owner.name:<22}{format_bytes(owner.nbytes):>10}"
            text += f"   {tensors}" if tensors else ""
    for flags, saved in fixes[1:]:
        text += f"\n  about {format_bytes(saved)} less: {flags}"
    hint = other
    if fixes:
        flags, saved = fixes[0]
        hint = f"{flags} (about {format_bytes(saved)} less on this rank)"
    return RankMemoryError(text, hint=hint)
