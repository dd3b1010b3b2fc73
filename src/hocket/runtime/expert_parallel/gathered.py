"""Tokens gathered over the ranks that hold all experts: no size depends on what routers choose.

    gather          [C, H] of each rank, its choices and weights -> all-gather -> [ep C, ...]
    (my experts)    choices of other ranks' experts are sorted to the end and not multiplied
    scatter         [ep C, H] -> reduce-scatter -> [C, H], what the experts of all ranks made

The host reads nothing, and a CUDA graph can hold it: the all-gather dispatcher of Megatron-Core and
vLLM. The price grows with the step: the arrays of the experts have k C rows for each of ep ranks,
of which on average one in ep is multiplied; the others are allocated, copied and masked. So it is
for decode steps and small batches; training and long prompts are dispatched, with one host read.

Legend: C tokens of the rank that has most, k experts of a token, H hidden.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hocket.runtime.collectives import all_gather, reduce_scatter
from hocket.runtime.mesh import Axis
from hocket.runtime.record import Recorder
from hocket.spec.expert_dispatch import GATHERED_ROWS

Tokens = tuple[Tensor, Tensor, Tensor]
"""Hidden states [T, H], choices [T, k] and routing weights [T, k]."""


@dataclasses.dataclass(eq=False)
class GatheredTokens:
    """Which steps are gathered, for all experts of a stage.

    Attributes:
        rows: tokens of the rank that has most. None: all have as many.
        always: gather whatever the number of rows: while a graph is captured.
    """

    rows: int | None = None
    always: bool = False

    def takes(self, tokens: int, choices: int, ranks: int) -> bool:
        """Whether a step is gathered; the same on all ranks.

        Args:
            tokens: of this rank. choices: k. ranks: that hold all experts.
        """
        extra = (ranks - 1) * (self.rows or tokens) * choices
        return self.always or extra <= GATHERED_ROWS


def gather_tokens(given: Tokens, rows: int, axis: Axis, recorder: Recorder) -> Tokens:
    """The tokens of all ranks of the axis, `rows` of each, in one all-gather.

    Padding has no expert (-1) and no weight.
    """
    hidden, index, weights = given
    missing = rows - len(hidden)
    if missing:
        hidden, weights = (F.pad(x, (0, 0, 0, missing)) for x in (hidden, weights))
        index = F.pad(index, (0, 0, 0, missing), value=-1)
    found: Tokens = _Gather.apply(hidden, index, weights, (axis, recorder))  # type: ignore[no-untyped-call]
    return found


def scatter_outputs(whole: Tensor, tokens: int, axis: Axis, recorder: Recorder) -> Tensor:
    """[ep C, H] of what this rank's experts made to the sum over ranks for its own tokens."""
    found: Tensor = _Scatter.apply(whole, (axis, recorder))  # type: ignore[no-untyped-call]
    return found[:tokens]


def own_choices(index: Tensor, first: int, count: int) -> Tensor:
    """Choices [N, k] as numbers among experts `first` to `first + count`; `count` for all else."""
    own = index.long() - first
    return own.masked_fill((own < 0) | (own >= count), count)


def load_of(own: Tensor, count: int) -> Tensor:
    """[count] int64, rows of each of this rank's experts in the result of `own_choices`."""
    flat = own.reshape(-1)
    return flat.new_zeros(count + 1).scatter_add_(0, flat, torch.ones_like(flat))[:count]


class _Gather(torch.autograd.Function):
    """Backward sums the gradients of both over the ranks, and keeps this rank's own."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, hidden: Tensor, index: Tensor, weights: Tensor, among: tuple[Axis, Recorder]
    ) -> Tokens:
        ctx.among = among
        axis, recorder = among
        parts = [x.contiguous().view(torch.uint8) for x in (hidden, weights, index.int())]
        packed = all_gather(torch.cat(parts, -1), axis, recorder)
        found = torch.split(packed, [part.shape[-1] for part in parts], -1)
        kinds = hidden.dtype, weights.dtype, torch.int32
        whole = [x.contiguous().view(kind) for x, kind in zip(found, kinds, strict=True)]
        ctx.mark_non_differentiable(whole[2])
        return whole[0], whole[2], whole[1]

    @staticmethod
    def backward(ctx: Any, dx: Tensor, _: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        # In the dtype of the first, as `regions._CopyTwo`.
        both = torch.cat([dx, dy.to(dx.dtype)], -1)
        own = reduce_scatter(both, *ctx.among)
        first, second = torch.split(own, [dx.shape[-1], dy.shape[-1]], -1)
        return first.contiguous(), None, second.to(dy.dtype), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, among: tuple[Axis, Recorder]) -> Tensor:  # type: ignore[override]
        ctx.among = among
        return reduce_scatter(whole, *among)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return all_gather(grad.contiguous(), *ctx.among), None
