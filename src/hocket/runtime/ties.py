"""Ties: one parameter that several stages hold, kept one by summing its gradients.

The first stage looks tokens up in the embedding, the last one multiplies by it. Each holds a copy;
once a step the two gradients are summed, so that equal values stay equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from hocket.runtime.collectives import all_reduce
from hocket.runtime.mesh import Axis, Mesh


class Ties:
    """The tied parameters of one rank that another stage holds too.

    Args:
        ties: tied name to owner's name, as in the plan.
        held: for each stage on this rank, its parameters by name.
        mesh: with the axis `embedding` prepared if the stages lie on several ranks.
    """

    def __init__(
        self, ties: Mapping[str, str], held: Sequence[Mapping[str, nn.Parameter]], mesh: Mesh
    ) -> None:
        self.mesh = mesh
        self._groups: list[list[nn.Parameter]] = []
        for tied, owner in sorted(ties.items()):
            found = {
                id(stage[name]): stage[name]
                for stage in held
                for name in (owner, tied)
                if name in stage
            }
            if found and next(iter(found.values())).requires_grad:
                self._groups.append(list(found.values()))

    @torch.no_grad()
    def sum(self, axis: Axis) -> None:
        """Sum each tie's gradients over this rank's stages and over `axis`."""
        for group in self._groups:
            if len(group) == 1 and axis.size == 1:
                continue
            total: Tensor | None = None
            for parameter in group:
                if parameter.grad is not None:
                    total = parameter.grad if total is None else total.add_(parameter.grad)
            if total is None:
                dtype = group[0].grad_dtype or group[0].dtype
                total = torch.zeros_like(group[0], dtype=dtype)
            all_reduce(total, axis, self.mesh.recorder)
            for parameter in group:
                if parameter.grad is None:
                    parameter.grad = total.clone()
                elif parameter.grad is not total:
                    parameter.grad.copy_(total)
