"""Partial gradients: those of a parameter of which each tensor rank has seen only a part.

A norm over heads is replicated and sees the heads of its own rank; a key/value head held by
several ranks sees a part of its queries on each. Once a step the parts are summed, all of one
group of ranks in one all-reduce.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from hocket.runtime.collectives import all_reduce
from hocket.runtime.mesh import Axis, Mesh
from hocket.spec.placement import Placement


class PartialGradients:
    """The slices of gradients to be summed over (parts of) the tensor axis once a step."""

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        placements: Mapping[str, Placement],
        mesh: Mesh,
    ) -> None:
        self.mesh = mesh
        self._slices: dict[
            tuple[str, torch.dtype], tuple[Axis, list[tuple[nn.Parameter, tuple[slice, ...]]]]
        ] = {}
        if mesh.axis("tp").size == 1:
            return
        for name, parameter in named_parameters:
            placement = placements[name]
            if not parameter.requires_grad:
                continue
            if "tp" in placement.grad_sum:
                self._add(mesh.axis("tp"), parameter, ())
            for block in placement.blocks:
                if block.copies > 1:
                    self._add(mesh.copies(block.copies), parameter, block.in_local)

    def _add(self, axis: Axis, parameter: nn.Parameter, where: tuple[slice, ...]) -> None:
        key = (axis.name, parameter.dtype)
        self._slices.setdefault(key, (axis, []))[1].append((parameter, where))

    def __bool__(self) -> bool:
        return bool(self._slices)

    @torch.no_grad()
    def sum(self) -> None:
        """Sum the parts, in place."""
        for axis, entries in self._slices.values():
            kinds: dict[torch.dtype, list[Tensor]] = {}
            for parameter, where in entries:
                if parameter.grad is None:  # unused here, and maybe not on the other ranks
                    dtype = parameter.grad_dtype or parameter.dtype
                    parameter.grad = torch.zeros_like(parameter, dtype=dtype)
                part = parameter.grad[where] if where else parameter.grad
                kinds.setdefault(part.dtype, []).append(part)
            for parts in kinds.values():
                flat = torch.cat([part.reshape(-1) for part in parts])
                all_reduce(flat, axis, self.mesh.recorder)
                totals = torch.split(flat, [part.numel() for part in parts])
                for part, total in zip(parts, totals, strict=True):
                    part.copy_(total.view_as(part))
