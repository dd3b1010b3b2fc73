"""Overlap: weight gradients of column-parallel layers, during the collective of the input's.

    backward, as torch orders it    dx | dW | all-reduce of dx, and a wait
    here                            dx | all-reduce of dx begins | dW meanwhile | wait
    with sequence parallelism       gather of x begins | dx meanwhile |
                                    reduce-scatter of dx begins | dW meanwhile | wait

(Korthikanti et al. 2022, section 4.2.2, and Megatron-LM's `LinearWithGradAccumulationAndAsync-
Communication`, for all layers that share an input at once.) The order is autograd's own: of what is
ready it runs what was made last, so that nodes made in the order

    End, a Weight for each layer, Begin, the layers

run backward as the layers' dx, Begin (which starts the collective), the Weights, End (which
waits). No buffer of the collective is read, written or freed between Begin and End: its input is
held by its work, its output by the node that End gets it from. On CPU, where a collective takes
the cores that would compute, layers run as torch orders them. Not executed on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hocket.runtime.collectives import all_reduce, reduce_scatter_flat
from hocket.runtime.linear import Again, weight_gradient
from hocket.runtime.mesh import Axis
from hocket.runtime.record import Recorder


def overlaps(x: Tensor) -> bool:
    """Whether layers of this input overlap, unless a test wants it otherwise."""
    return x.is_cuda


class Overlap:
    """One forward of the layers that share an input, and its backward.

    Attributes:
        axis, recorder: of the layers.
        gathered: makes the whole input of the slice, with sequence parallelism; else None.
        finish: waits for the collective of the input's gradient.
        pending: what each layer's weight gradient is computed from.
    """

    def __init__(self, axis: Axis, recorder: Recorder, gathered: Again | None) -> None:
        self.axis, self.recorder, self.gathered = axis, recorder, gathered
        self.finish: Callable[[], None] | None = None
        self.pending: dict[int, tuple[Tensor, Tensor]] = {}


Late = tuple[Overlap, Tensor, int]
"""An overlap, a layer's weight as its backward sees it, and the layer's number."""


def begin(
    x: Tensor, layers: Iterable[nn.Module], axis: Axis, recorder: Recorder, *,
    gathered: Again | None, whole: Callable[[Tensor], Tensor],
) -> tuple[Tensor, dict[int, Late]]:  # fmt: skip
    """The input of layers, and by id what each runs with (`overlapped_linear`), once.

    Args:
        x: whole on every rank, or a slice of the sequence if `gathered` is given.
        layers: those that share it. One that multiplies in another way, or whose weight's gradient
            is not wanted or is deferred, runs as ever on what is returned.
        whole: makes the layers' input of `x`, without a gradient.
    """
    overlap = Overlap(axis, recorder, gathered)
    x = _End.apply(x, overlap)  # type: ignore[no-untyped-call]
    late: dict[int, Late] = {}
    layer: Any
    for number, layer in enumerate(layers):
        if layer.weight.requires_grad and layer.weight_gradients is None and layer.product is None:
            weight = _Weight.apply(layer.weight, overlap, number, layer.transposed)  # type: ignore[no-untyped-call]
            late[id(layer)] = (overlap, weight, number)
    return _Begin.apply(x, overlap, whole), late  # type: ignore[no-untyped-call]


def overlapped_linear(
    x: Tensor, bias: Tensor | None, late: Late, *, transposed: bool, piece: Tensor | None
) -> Tensor:
    """As `runtime.linear.linear` for a layer of an overlap; `piece`: the slice of `x` to keep."""
    overlap, weight, number = late
    y: Tensor = _Overlapped.apply(x, weight, bias, overlap, number, transposed, piece)  # type: ignore[no-untyped-call]
    return y


class _End(torch.autograd.Function):
    """Made first, so backward comes here last: wait for the input's gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, overlap: Overlap) -> Tensor:  # type: ignore[override]
        ctx.overlap = overlap
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        finish, ctx.overlap.finish = ctx.overlap.finish, None
        assert finish is not None, "backward came to the input before its gradient's collective"
        finish()
        return grad, None


class _Weight(torch.autograd.Function):
    """A layer's weight; its gradient is computed here, behind `_Begin`."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, weight: Tensor, overlap: Overlap, number: int, transposed: bool
    ) -> Tensor:
        ctx.overlap, ctx.number, ctx.transposed = overlap, number, transposed
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, nothing: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        grad, x = ctx.overlap.pending.pop(ctx.number)
        if ctx.overlap.gathered is not None:
            x = ctx.overlap.gathered(x)
        flat = grad.reshape(-1, grad.shape[-1])
        return weight_gradient(x, flat, ctx.transposed), None, None, None


class _Begin(torch.autograd.Function):
    """The input as the layers read it; backward, the collective of its gradient begins."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, overlap: Overlap, whole: Callable[[Tensor], Tensor]
    ) -> Tensor:
        ctx.overlap = overlap
        return x.view_as(x) if overlap.gathered is None else whole(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        overlap: Overlap = ctx.overlap
        axis, recorder = overlap.axis, overlap.recorder
        start = recorder.mark()
        out = given = grad.contiguous()
        if overlap.gathered is None:
            kind = "all-reduce"  # in place: the gradient comes fresh out of matmuls
            work = all_reduce(given, axis, recorder, async_op=True)
        else:
            kind = "reduce-scatter"
            *lead, rows, width = grad.shape
            dealt = grad.reshape(-1, axis.size, rows // axis.size, width).transpose(0, 1)
            given = dealt.contiguous().view(-1)
            out = given.new_empty(given.numel() // axis.size)
            work = reduce_scatter_flat(out, given, axis, recorder)
            out = out.view(*lead, rows // axis.size, width)

        def finish() -> None:
            if work is not None:
                work.wait()
                _note(recorder, start, kind, axis, given)

        overlap.finish = finish
        return out, None, None


class _Overlapped(torch.autograd.Function):
    """A layer, whose backward gives the input's gradient alone."""

    @staticmethod
    def forward(  # type: ignore[override]  # noqa: PLR0917 (autograd passes by position)
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        overlap: Overlap,
        number: int,
        transposed: bool,
        piece: Tensor | None,
    ) -> Tensor:
        if overlap.gathered is not None:
            overlap.gathered.promise()
        ctx.save_for_backward(x if piece is None else piece, weight)
        ctx.overlap, ctx.number, ctx.transposed = overlap, number, transposed
        return F.linear(x, weight.t() if transposed else weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        kept, weight = ctx.saved_tensors
        overlap: Overlap = ctx.overlap
        if overlap.gathered is not None:
            overlap.gathered.begin(kept)
        dx = None
        if ctx.needs_input_grad[0]:
            dx = grad @ (weight.t() if ctx.transposed else weight)
        overlap.pending[ctx.number] = (grad, kept)
        db = grad.reshape(-1, grad.shape[-1]).sum(0) if ctx.needs_input_grad[2] else None
        # `_Weight` computes the gradient; autograd has to be given something of its shape.
        nothing = grad.new_empty((), dtype=weight.dtype).expand(weight.shape)
        return dx, nothing, db, None, None, None, None


def _note(recorder: Recorder, start: Any, kind: str, axis: Axis, tensor: Tensor) -> None:
    recorder.add(
        start, "communication", kind, f"{kind} {axis.name}", axis=axis.name,
        bytes=tensor.numel() * tensor.element_size(),
    )  # fmt: skip
