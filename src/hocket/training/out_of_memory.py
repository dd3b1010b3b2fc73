"""OutOfMemory: what filled a rank's device, by owner, and the change of layout that frees most.

    parameters  gradients  optimizer state     the tensors that the job knows
    communication buffers                      whole gradients and parameters of ZeRO, for a while
    activations                                the rest of what is allocated

Not executed on a GPU yet: tests raise torch's error where a step allocates, on a CPU.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hocket.spec.errors import RankMemoryError
from hocket.spec.layout import Layout
from hocket.spec.units import format_bytes

if TYPE_CHECKING:
    from hocket.training.build import Job

LARGEST = 3
"""Tensors that are named for each owner."""

_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_REQUESTED = re.compile(r"[Tt]ried to allocate ([0-9.]+) ([KMGT]?i?B)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
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
class Owner:
    """Bytes of one owner, and its largest tensors: (name or shape, bytes)."""

    name: str
    nbytes: int
    largest: tuple[tuple[str, int], ...] = ()


def device_state(error: BaseException, device: torch.device) -> Device:
    """The allocator's state at an out-of-memory error."""
    found = _REQUESTED.search(str(error))
    requested = int(float(found[1]) * _UNITS[found[2]]) if found else 0
    if device.type != "cuda":
        return Device(requested=requested)
    stats = torch.cuda.memory_stats(device)
    free, total = torch.cuda.mem_get_info(device)
    return Device(
        requested=requested,
        allocated=int(stats.get("allocated_bytes.all.current", 0)),
        reserved=int(stats.get("reserved_bytes.all.current", 0)),
        capacity=total,
        free=free,
    )


def owners(job: Job, allocated: int) -> list[Owner]:
    """Who holds the memory of the job's device; `allocated` in all, 0 if that is not known."""
    device = job.mesh.device
    seen: set[int] = set()
    named = dict(job.parallel.named_parameters())
    stepped = dict(job.parallel.named_stepped())
    found = [
        _owner("parameters", [*named.items(), *_plain(job.parallel.tensors())], device, seen),
        _owner(
            "gradients",
            [
                *((name, p.grad) for name, p in [*named.items(), *stepped.items()]),
                *_plain(job.parallel.gradient_buffers()),
            ],
            device,
            seen,
        ),
        _owner("optimizer state", _plain(job.optimizer.tensors()), device, seen),
        _owner("communication buffers", _plain(job.parallel.buffers()), device, seen),
    ]
    known = sum(owner.nbytes for owner in found)
    # Of what autograd saved, Python sees a part: the sum is the allocator's.
    rest = _owner("activations", _plain(_living()), device, seen)
    if allocated:
        rest = dataclasses.replace(rest, nbytes=max(0, allocated - known))
    return [*found, rest]


def _plain(tensors: Iterable[Tensor]) -> list[tuple[str, Tensor | None]]:
    return [(f"{list(t.shape)} {str(t.dtype).removeprefix('torch.')}", t) for t in tensors]


def _owner(
    name: str,
    tensors: Iterable[tuple[str, Tensor | None]],
    device: torch.device,
    seen: set[int],
) -> Owner:
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
    return Owner(name=name, nbytes=sum(n for _, n in sizes), largest=tuple(sizes[:LARGEST]))


def _living() -> Iterator[Tensor]:
    for each in gc.get_objects():
        with contextlib.suppress(ReferenceError, RuntimeError):
            if issubclass(type(each), Tensor) and not each.is_meta:
                yield each


def remedies(
    layout: Layout, found: Iterable[Owner], num_layers: int, rows: int
) -> list[tuple[Layout, int]]:
    """Changes of a layout and about how many bytes each frees on this rank, the most first.

    Args:
        layout: that ran out of memory.
        found: who held it.
        num_layers: of this rank's stages; 0: layers cannot be recomputed.
        rows: sequences of one microbatch.
    """
    held = {owner.name: owner.nbytes for owner in found}
    left = 1 - 1 / layout.dp
    options: list[tuple[Layout, float]] = []

    def add(saved: float, **changes: Any) -> None:
        options.append((dataclasses.replace(layout, **changes), saved))

    if num_layers > 1 and layout.recompute != "full" and layout.data_parallel != "threads":
        # Of all layers' activations, those of one at a time remain; their inputs are not counted.
        add(held["activations"] * (1 - 1 / num_layers), recompute="full", recompute_layers=None)
    if layout.dp > 1 and layout.data_parallel != "threads":
        if layout.zero < 1:
            add(held["optimizer state"] * left, zero=1)
        if layout.zero < 2:
            saved = held["gradients"] + (held["optimizer state"] if layout.zero < 1 else 0)
            add(saved * left, zero=2)
        if layout.zero < 3:
            saved = held["parameters"] + (held["gradients"] if layout.zero < 2 else 0)
            saved += held["optimizer state"] if layout.zero < 1 else 0
            add(saved * left, zero=3)
    if rows > 1 and rows % 2 == 0:
        add(held["activations"] / 2, microbatches=2 * (layout.microbatches or 1))
    options.sort(key=lambda each: -each[1])
    return [(changed, int(saved)) for changed, saved in options if saved >= 1]


def report(
    rank: int, state: Device, found: list[Owner], changes: list[tuple[Layout, int]]
) -> RankMemoryError:
    """The error of a rank that ran out of memory: numbers, owners, and the fix to paste."""
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
    for changed, saved in changes[1:]:
        text += f"\n  about {format_bytes(saved)} less: --layout {changed}"
    hint = "more ranks: a layout with a larger pp or tp"
    if changes:
        changed, saved = changes[0]
        hint = f"--layout {changed} (about {format_bytes(saved)} less on this rank)"
    return RankMemoryError(text, hint=hint)


def explain(error: BaseException, job: Job, folder: Path | None = None) -> RankMemoryError:
    """A job's out-of-memory error as one that says what to do. Called where `error` is handled:
    its frames still hold what was alive.

    `folder`: where the allocator's snapshot is written on CUDA, for pytorch.org/memory_viz.
    """
    mesh, spec = job.mesh, job.spec
    state = device_state(error, mesh.device)
    found = owners(job, state.allocated)
    stages = job.plan.stages
    layers = 0
    if stages is not None:
        for stage in job.parallel.stages:
            children = stage.module.get_submodule(stages.layers).children()
            layers += sum(1 for layer in children if any(True for _ in layer.parameters()))
    layout = spec.layout
    rows = spec.workload.global_batch // (layout.dp * (layout.microbatches or 1))
    if folder is not None and mesh.device.type == "cuda":
        with contextlib.suppress(Exception):  # a picture more or less
            dump: Any = torch.cuda.memory._dump_snapshot
            dump(str(folder / f"memory-rank-{mesh.rank}.pickle"))
    return report(mesh.rank, state, found, remedies(layout, found, layers, rows))
