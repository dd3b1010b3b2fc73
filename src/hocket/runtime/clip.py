"""The gradient's norm over all axes, each global element counted once, and clipping by it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from hocket.runtime.collectives import all_reduce
from hocket.runtime.data_parallel.flat import FlatShard
from hocket.runtime.mesh import Mesh
from hocket.spec.placement import Placement


class GradientNorm:
    """The global norm of the gradients of one rank's parameters.

    What several ranks hold is counted by one of them: a replicated parameter by the first tensor
    rank, a key/value head by the first of its copies, a tied parameter by its owner's stage. Data
    ranks hold equal gradients. So one all-reduce of one number over the ranks of a replica gives
    the norm of one process. Where ranks of several replicas hold the experts (ep, etp), it goes
    over all ranks: one replica counts what is dense, and one of its copies each expert. Where data
    ranks hold shares of the gradients (ZeRO), the sum goes over all ranks, and what is counted are
    this rank's pieces.

    Args:
        named_parameters: of this rank.
        placements: of those parameters.
        mesh: the ranks.
        pieces: what of each parameter this rank holds the gradient of. None: all of it.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        placements: Mapping[str, Placement],
        mesh: Mesh,
        pieces: Sequence[FlatShard] | None = None,
    ) -> None:
        self.mesh = mesh
        apart = mesh.layout.splits_experts  # experts lie on ranks of several replicas
        self._axis = mesh.axis("model" if pieces is None and not apart else "world")
        # Context ranks of a replica hold equal gradients too: its first one counts.
        other = mesh.axis("cp").index or (apart and mesh.axis("dp").index)
        self.parameters: list[nn.Parameter] = []
        self._masked: list[tuple[nn.Parameter, Tensor]] = []
        self._whole: list[nn.Parameter] = []
        self._slices: list[tuple[nn.Parameter, tuple[slice, ...]]] = []
        index = mesh.axis("tp").index
        counts = mesh.axis("replicas").index == 0  # of those that hold equal shares, the first
        # The same on every rank of a model, where a rank may have nothing to train.
        self._dtype = torch.float32
        for name, parameter in named_parameters:
            if parameter.dtype == torch.float64:
                self._dtype = torch.float64
            if not parameter.requires_grad:
                continue
            placement = placements[name]
            if pieces is not None:
                mine = [piece for piece in pieces if piece.name == name]
                self.parameters += [piece.tensor for piece in mine]
                if counts or placement.is_expert:
                    self._add_pieces(mine, placement, index)
                continue
            self.parameters.append(parameter)
            if placement.tie is not None:
                continue
            if placement.is_expert:
                if mesh.axis("expert_data").index == 0:
                    self._whole.append(parameter)
                continue
            if other:
                continue
            if "tp" not in placement.sharded:
                if index == 0:
                    self._whole.append(parameter)
                continue
            blocks = [block for block in placement.blocks if index % block.copies == 0]
            if len(blocks) == len(placement.blocks):
                self._whole.append(parameter)
            else:
                self._slices += [(parameter, block.in_local) for block in blocks]

    def _add_pieces(self, pieces: Sequence[FlatShard], placement: Placement, index: int) -> None:
        """Count pieces of a parameter by the same rules; of a block that another rank counts, a
        mask leaves the elements out, since a piece may begin and end anywhere in it."""
        if placement.tie is not None or (not placement.sharded and index):
            return
        others = [b for b in placement.blocks if index % b.copies] if placement.sharded else []
        if not others or not pieces:
            self._whole += [piece.tensor for piece in pieces]
            return
        mask = torch.ones(placement.local_shape, dtype=torch.bool, device=pieces[0].tensor.device)
        for block in others:
            mask[block.in_local] = False
        flat = mask.reshape(-1)
        self._masked += [(p.tensor, flat[p.start : p.stop].clone()) for p in pieces]

    @torch.no_grad()
    def norm(self) -> Tensor:
        """The global norm, equal on every rank: fp32, or fp64 where a parameter is."""
        parts = [p.grad for p in self._whole if p.grad is not None]
        parts += [p.grad[where] for p, where in self._slices if p.grad is not None]
        # A product with the mask: indexing by it would make a CUDA rank read the number of ones.
        parts += [p.grad * mask for p, mask in self._masked if p.grad is not None]
        if parts:
            norms = torch._foreach_norm(parts, 2, dtype=self._dtype)
            total = torch.stack(list(norms)).square_().sum()
        else:
            total = torch.zeros((), dtype=self._dtype, device=self.mesh.device)
        # Gradients of what is offloaded are on the host, where the scale is needed too: two waits a
        # step. Else the device is not read.
        total = total.to(self.mesh.device)
        all_reduce(total, self._axis, self.mesh.recorder)
        return total.sqrt_()

    @torch.no_grad()
    def clip(self, max_norm: float) -> Tensor:
        """Scale the gradients so that their norm is at most `max_norm`; returns it before that.

        `max_norm` 0 clips nothing. The scale is `max_norm / (norm + 1e-6)`, as torch's own.
        """
        norm = self.norm()
        if max_norm <= 0:
            return norm
        scale = (max_norm / (norm + 1e-6)).clamp_(max=1.0)
        # A step whose norm is not finite, of which this difference is NaN, is skipped, and its
        # gradients still show where it came from. (`isfinite` is four kernels of its own.)
        scale.masked_fill_(norm - norm != 0, 1.0)
        # On CUDA reading the scale would wait for the device; on CPU it may save the pass.
        if norm.is_cuda or not float(scale) >= 1.0:
            grads = [p.grad for p in self.parameters if p.grad is not None]
            if grads:
                torch._foreach_mul_(grads, scale.to(grads[0].device))
        return norm


def clip_grad_norm(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    placements: Mapping[str, Placement],
    mesh: Mesh,
    max_norm: float,
) -> Tensor:
    """Clip once. In a loop keep a `GradientNorm` instead."""
    return GradientNorm(named_parameters, placements, mesh).clip(max_norm)
