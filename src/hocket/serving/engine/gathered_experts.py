"""Experts over ranks on a GPU: which steps gather their tokens, and what all ranks agree on.

A step whose tokens are gathered reads nothing on the host and can be captured
(`runtime.expert_parallel.gathered`); where that is impossible, every step is dispatched and none is
captured.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from hocket.models.experts import skip_absent
from hocket.runtime.collectives import all_reduce
from hocket.runtime.expert_parallel import gather_experts
from hocket.runtime.expert_parallel.gathered import GatheredTokens
from hocket.runtime.mesh import Mesh

_DISPATCHED = "experts over ranks, the host reads how many rows go where: "


def gathered_tokens(
    module: nn.Module, mesh: Mesh, *, recurrent: bool
) -> tuple[GatheredTokens | None, str]:
    """The steps of a stage that gather tokens; None: there are no experts over ranks, or all steps
    are dispatched, for the reason that follows.

    Args:
        recurrent: layers keep states, whose idle steps run eagerly.
    """
    if mesh.layout.ep == 1:
        return None, ""
    found, why = None, "layers keep recurrent states"
    if mesh.axis("cp").size > 1:
        why = "sequences are over context ranks"
    elif not recurrent:
        found, why = gather_experts(module, skip_absent)
    return found, "" if found else _DISPATCHED + why


@contextlib.contextmanager
def gathering(
    gathered: GatheredTokens | None, rows: int | None = None, *, always: bool = False
) -> Iterator[None]:
    """Within, so many tokens of each data rank are gathered; `always`: whatever their number."""
    if gathered is None:
        yield
        return
    gathered.rows, gathered.always = rows, always
    try:
        yield
    finally:
        gathered.rows, gathered.always = None, False


def all_captured(captured: bool, mesh: Mesh) -> bool:
    """Whether all ranks that run a step of a stage together captured a size."""
    axes = [axis for axis in map(mesh.axis, ("tp", "expert")) if axis.size > 1]
    if not axes:
        return captured
    every = torch.full((), int(captured), device=mesh.device)
    for axis in axes:
        all_reduce(every, axis, mesh.recorder, op="min")
    return bool(every)
