"""What the ranks of a replica agree on before their first step: what one cannot, none does.

Every rank of the axes calls these at the same moment.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hocket.runtime.collectives import all_reduce
from hocket.runtime.mesh import Mesh
from hocket.serving.engine.attention_kernels import Choice, LayerKind

Chooser = Callable[["Sequence[LayerKind]", "int | None"], Choice]
"""The kind of each attention layer and the block size that was asked for to their kernels."""


def all_able(able: bool, mesh: Mesh, *names: str) -> bool:
    """Whether all ranks of these axes are able to."""
    axes = [axis for axis in map(mesh.axis, names) if axis.size > 1]
    if not axes:
        return able
    every = torch.full((), int(able), device=mesh.device)
    for axis in axes:
        all_reduce(every, axis, mesh.recorder, op="min")
    return bool(every)


def agreed_choice(
    chooser: Chooser, kinds: Sequence[LayerKind], block_size: int | None, mesh: Mesh
) -> Choice:
    """The kernels of a stage, for a block size that all ranks of the replica read."""
    choice = chooser(kinds, block_size)
    if mesh.world_size == 1:
        return choice
    size = torch.full((), choice.block_size, device=mesh.device)
    # Where none was asked for, sizes are powers of two, times the context ranks: the largest is a
    # multiple of all.
    all_reduce(size, mesh.axis("world"), mesh.recorder, op="max")
    largest = int(size)
    return chooser(kinds, largest) if largest > choice.block_size else choice
