"""Warm-up: every communicator of a replica used once, before decode is captured.

NCCL makes communicators and their buffers at first use (hundreds of MB for a group), which a
capture cannot hold and which the cache must leave free. Every rank calls this at the same moment.
"""

from __future__ import annotations

import torch

from hocket.runtime.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    gather,
    irecv,
    isend,
    reduce_scatter,
)
from hocket.runtime.mesh import Mesh


@torch.inference_mode()
def warm_up(mesh: Mesh) -> None:
    """Use the collectives that serving calls, on each axis that has several ranks.

    Hidden states go from stage to stage in the order of the stages, as those of a step do.
    """
    tensor, pipeline, world = mesh.axis("tp"), mesh.axis("pp"), mesh.axis("world")
    context = mesh.axis("cp")
    one = torch.zeros(8, device=mesh.device)
    for axis in (world, tensor):
        all_reduce(one, axis, mesh.recorder)
    if tensor.size > 1:
        all_gather(one, tensor, mesh.recorder)
        gather(one, tensor, mesh.recorder)
        broadcast(one, tensor, mesh.recorder)
    if context.size > 1:
        all_gather(one, context, mesh.recorder)
        all_reduce(one, context, mesh.recorder)
        broadcast(one, context, mesh.recorder)
        reduce_scatter(one.new_zeros(context.size), context, mesh.recorder)
    experts = mesh.axis("expert")
    if experts.size > 1:
        each = one.new_zeros(experts.size)
        for collective in (all_gather, reduce_scatter, all_to_all):
            collective(each, experts, mesh.recorder)
    if pipeline.size > 1:
        if pipeline.index > 0:
            irecv(one, pipeline, pipeline.index - 1, mesh.recorder).wait()
        if pipeline.index < pipeline.size - 1:
            isend(one, pipeline, pipeline.index + 1, mesh.recorder).wait()
