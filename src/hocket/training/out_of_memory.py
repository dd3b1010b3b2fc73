"""OutOfMemory: what filled a rank's device, by owner, and the change of layout that frees most.

    parameters  gradients  optimizer state     the tensors that the job knows
    communication buffers                      whole gradients and parameters of ZeRO, for a while
    activations                                the rest of what is allocated

Not executed on a GPU yet: tests raise torch's error where a step allocates, on a CPU.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hocket.runtime.memory_report import (
    OwnedBytes,
    activations,
    device_state,
    out_of_memory_report,
    owner_of,
    unnamed,
)
from hocket.spec.errors import RankMemoryError
from hocket.spec.layout import Layout

if TYPE_CHECKING:
    from hocket.training.build import RankJob

OTHER = "more ranks: a layout with a larger pp or tp"
"""The hint where no change of the layout frees anything."""


def job_owners(job: RankJob, allocated: int) -> list[OwnedBytes]:
    """Who holds the memory of the job's device; `allocated` in all, 0 if that is not known."""
    device = job.mesh.device
    seen: set[int] = set()
    named = dict(job.parallel.named_parameters())
    stepped = dict(job.parallel.named_stepped())
    found = [
        owner_of("parameters", [*named.items(), *unnamed(job.parallel.tensors())], device, seen),
        owner_of(
            "gradients",
            [
                *((name, p.grad) for name, p in [*named.items(), *stepped.items()]),
                *unnamed(job.parallel.gradient_buffers()),
            ],
            device,
            seen,
        ),
        owner_of("optimizer state", unnamed(job.optimizer.tensors()), device, seen),
        owner_of("communication buffers", unnamed(job.parallel.buffers()), device, seen),
    ]
    return [*found, activations(found, allocated, seen, device)]


def job_remedies(
    layout: Layout, found: Iterable[OwnedBytes], num_layers: int, rows: int
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


def explained_out_of_memory(
    error: BaseException, job: RankJob, folder: Path | None = None
) -> RankMemoryError:
    """A job's out-of-memory error as one that says what to do. Called where `error` is handled:
    its frames still hold what was alive.

    `folder`: where the allocator's snapshot is written on CUDA, for pytorch.org/memory_viz.
    """
    mesh, spec = job.mesh, job.spec
    state = device_state(error, mesh.device)
    found = job_owners(job, state.allocated)
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
    changes = job_remedies(layout, found, layers, rows)
    fixes = [(f"--layout {changed}", saved) for changed, saved in changes]
    return out_of_memory_report(mesh.rank, state, found, fixes, OTHER)
