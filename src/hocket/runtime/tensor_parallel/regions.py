"""Regions: where a tensor passes between being replicated and being held in parts.

    forward      backward     function
    nothing      all-reduce   copy_to_axis      whole, then used by layers that are split
    all-reduce   nothing      reduce_from_axis  partial sums, then whole
    all-gather   split        gather_from_axis  parts of the last dim, then whole
    split        all-gather   split_to_axis     whole, then parts of the last dim

(The functions f and g of Shoeybi et al. 2019, section 3.)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hocket.runtime.collectives import all_gather, all_reduce, traced_all_reduce
from hocket.runtime.mesh import Axis
from hocket.runtime.record import Recorder
from hocket.runtime.tensor_parallel.shards import Shards


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, recorder: Recorder) -> Tensor:  # type: ignore[override]
        ctx.axis, ctx.recorder = axis, recorder
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        # In place: the gradient comes fresh out of the matrix products of split layers.
        grad = grad.contiguous()
        all_reduce(grad, ctx.axis, ctx.recorder)
        return grad, None, None


class _TracedCopy(torch.autograd.Function):
    """As `_Copy`, in a graph that the compiler holds."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:  # type: ignore[override]
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return traced_all_reduce(grad, ctx.axis), None


class _TracedReduce(torch.autograd.Function):
    """As `_Reduce`, in a graph that the compiler holds."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:  # type: ignore[override]
        return traced_all_reduce(x, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return grad, None


class _CopyTwo(torch.autograd.Function):
    """Two tensors whose gradients travel in one all-reduce."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, y: Tensor, axis: Axis, recorder: Recorder
    ) -> tuple[Tensor, Tensor]:
        ctx.axis, ctx.recorder = axis, recorder
        return x.view_as(x), y.view_as(y)

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, dx: Tensor, dy: Tensor
    ) -> tuple[Tensor | None, ...]:
        # In the first one's dtype: of activations in bf16 and their routing weights in fp32, fp32
        # would double the bytes, and what reads either gradient next is in bf16.
        flat = torch.cat([dx.reshape(-1), dy.reshape(-1).to(dx.dtype)])
        all_reduce(flat, ctx.axis, ctx.recorder)
        first, second = torch.split(flat, [dx.numel(), dy.numel()])
        return first.view_as(dx), second.view_as(dy).to(dy.dtype), None, None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, recorder: Recorder) -> Tensor:  # type: ignore[override]
        out = x.clone(memory_format=torch.contiguous_format)
        all_reduce(out, axis, recorder)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return grad, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, shards: Shards, axis: Axis, recorder: Recorder
    ) -> Tensor:
        ctx.shards = shards
        return _whole(x, shards, axis, recorder)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        # Every rank computes the loss from the whole, so each keeps its part.
        return ctx.shards.take(grad), None, None, None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, shards: Shards, axis: Axis, recorder: Recorder
    ) -> Tensor:
        ctx.shards, ctx.axis, ctx.recorder = shards, axis, recorder
        return shards.take(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        assert not ctx.shards.has_copies, "replicated shards have no plain inverse"
        return _whole(grad, ctx.shards, ctx.axis, ctx.recorder), None, None, None


def _whole(part: Tensor, shards: Shards, axis: Axis, recorder: Recorder) -> Tensor:
    return shards.order(all_gather(part, axis, recorder, dim=-1, sizes=shards.sizes))


def copy_to_axis(x: Tensor, axis: Axis, recorder: Recorder) -> Tensor:
    """`x`, whole on every rank; its gradient is summed over the axis."""
    if axis.size == 1 or not (x.requires_grad and torch.is_grad_enabled()):
        return x
    if torch.compiler.is_compiling():
        traced: Tensor = _TracedCopy.apply(x, axis)  # type: ignore[no-untyped-call]
        return traced
    out: Tensor = _Copy.apply(x, axis, recorder)  # type: ignore[no-untyped-call]
    return out


def copy_two_to_axis(x: Tensor, y: Tensor, axis: Axis, recorder: Recorder) -> tuple[Tensor, Tensor]:
    """As `copy_to_axis` for two tensors, whose gradients are summed in one all-reduce."""
    if axis.size == 1 or not torch.is_grad_enabled():
        return x, y
    if not (x.requires_grad and y.requires_grad):
        return copy_to_axis(x, axis, recorder), copy_to_axis(y, axis, recorder)
    out: tuple[Tensor, Tensor] = _CopyTwo.apply(x, y, axis, recorder)  # type: ignore[no-untyped-call]
    return out


def reduce_from_axis(x: Tensor, axis: Axis, recorder: Recorder) -> Tensor:
    """The sum of `x` over the axis, in a new tensor; the gradient passes unchanged."""
    if axis.size == 1:
        return x
    out: Tensor = _Reduce.apply(x, axis, recorder)  # type: ignore[no-untyped-call]
    return out


def reduce_in_place(x: Tensor, axis: Axis, recorder: Recorder) -> Tensor:
    """As `reduce_from_axis`, over `x` itself, without an autograd node.

    Right only where nobody else reads `x` and the operation that made it does not save its
    result: a matrix product, an embedding.
    """
    if axis.size > 1:
        if torch.compiler.is_compiling():
            traced: Tensor = _TracedReduce.apply(x, axis)  # type: ignore[no-untyped-call]
            return traced
        all_reduce(x, axis, recorder)
    return x


def gather_from_axis(x: Tensor, shards: Shards, axis: Axis, recorder: Recorder) -> Tensor:
    """The parts `x` [..., rows of this rank] of the axis as one tensor [..., all rows]."""
    if axis.size == 1:
        return x
    out: Tensor = _Gather.apply(x, shards, axis, recorder)  # type: ignore[no-untyped-call]
    return out


def split_to_axis(x: Tensor, shards: Shards, axis: Axis, recorder: Recorder) -> Tensor:
    """This rank's part of `x` [..., all rows]."""
    if axis.size == 1:
        return x
    out: Tensor = _Split.apply(x, shards, axis, recorder)  # type: ignore[no-untyped-call]
    return out
