"""State: what recurrences and causal convolutions hand on from chunk to chunk, over context ranks.

Rank r has chunks r and 2c - 1 - r (`split`). What comes before its front chunk is on rank r - 1;
what comes before its back chunk is on rank r + 1 or, on the last rank, its own front chunk:

    front chunks   0 -> 1 -> ... -> c-1
                                     |
    back chunks    0 <- 1 <- ... <- c-1

    inputs   a convolution of W taps gets the last W - 1 inputs of the chunk before, from all ranks
             at once
    state    a chunk makes T h + f of the state h before it: f is what its scan ends in when begun
             at zero, T what it does to any state. Scans run at once on all ranks; then h goes along
             the line, to which each rank applies its T and adds its f (Dao and Gu 2024,
             Transformers are SSMs, section 8.2)

Gradients go the other way, in the same numbers of messages. Receives and sends of a line follow
each other on every rank, so no order of them can deadlock, also where a communicator runs one
operation after the other.

Legend: B rows, C channels, S tokens of the whole sequence, c context ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hocket.runtime.collectives import CollectiveWork, exchange, irecv, isend
from hocket.runtime.mesh import Axis
from hocket.runtime.record import Recorder
from hocket.spec.errors import OptionError


def previous_inputs(inputs: Tensor, width: int, axis: Axis, recorder: Recorder) -> Tensor:
    """The last `width` inputs before each chunk: [B, C, S/c] to [2, B, C, width], zeros before the
    sequence.

    Raises:
        OptionError: chunks are shorter than `width`.
    """
    size = inputs.shape[-1] // 2
    if size < width:
        raise OptionError(
            f"chunks of {size} tokens (sequence / 2 cp) are shorter than the {width} earlier "
            "inputs that a convolution of the model reads",
            hint=f"--seq-len {2 * axis.size * width}",
        )
    ends = torch.stack([inputs[..., size - width : size], inputs[..., 2 * size - width :]])
    found = _Inputs.apply(ends, axis, recorder)  # type: ignore[no-untyped-call]
    assert isinstance(found, Tensor)
    return found


def previous_states(
    ends: Tensor, decay: Tensor, axis: Axis, recorder: Recorder, *, matrix: bool = False
) -> Tensor:
    """The state before each chunk, [2, B, ...].

    Args:
        ends: f, in which the scan of each chunk ends when it begins at zero, [2, B, ...].
        decay: T of each chunk. With `matrix` [2, ..., K, K] for states [2, ..., K, V], else of a
            shape that broadcasts to that of the states.
    """
    found = _States.apply(ends, decay, matrix, axis, recorder)  # type: ignore[no-untyped-call]
    assert isinstance(found, Tensor)
    return found


def _along(tensor: Tensor, axis: Axis, recorder: Recorder, step: int) -> Tensor:
    """Hand a tensor to index + `step`, and return that of index - `step`; zeros at the end of the
    line."""
    tensor = tensor.contiguous()
    target, source = (
        index if 0 <= index < axis.size else None
        for index in (axis.index + step, axis.index - step)
    )
    coming = torch.zeros_like(tensor) if source is None else torch.empty_like(tensor)
    exchange(tensor, coming, axis, recorder, target=target, source=source).wait()
    return coming


class _Inputs(torch.autograd.Function):
    """Ends of the chunks, [2, ...], to the ends of those before them."""

    @staticmethod
    def forward(ctx: Any, ends: Tensor, axis: Axis, recorder: Recorder) -> Tensor:  # type: ignore[override]
        ctx.among = axis, recorder
        front = _along(ends[0], axis, recorder, 1)
        back = _along(ends[1], axis, recorder, -1)
        if axis.index == axis.size - 1:
            back = ends[0]
        return torch.stack([front, back])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        axis, recorder = ctx.among
        front = _along(grad[0], axis, recorder, -1)
        back = _along(grad[1], axis, recorder, 1)
        if axis.index == axis.size - 1:
            front = grad[1]
        return torch.stack([front, back]), None, None


class Line:
    """Messages of one pass along the ranks, and back."""

    def __init__(self, axis: Axis, recorder: Recorder) -> None:
        self.axis, self.recorder = axis, recorder
        self.sent: list[tuple[Tensor, CollectiveWork]] = []

    def take(self, like: Tensor, peer: int) -> Tensor:
        """What index `peer` sends; zeros if there is no such rank."""
        if not 0 <= peer < self.axis.size:
            return torch.zeros_like(like)
        found = torch.empty_like(like, memory_format=torch.contiguous_format)
        irecv(found, self.axis, peer, self.recorder).wait()
        return found

    def give(self, tensor: Tensor, peer: int) -> None:
        """Send to index `peer`; nothing if there is no such rank."""
        if 0 <= peer < self.axis.size:
            tensor = tensor.contiguous()
            self.sent.append((tensor, isend(tensor, self.axis, peer, self.recorder)))

    def end(self) -> None:
        """Wait until all that was sent has left."""
        for _, work in self.sent:
            work.wait()


class _States(torch.autograd.Function):
    """`previous_states`."""

    @staticmethod
    def forward(  # type: ignore[override]  # noqa: PLR0917
        ctx: Any, ends: Tensor, decay: Tensor, matrix: bool, axis: Axis, recorder: Recorder
    ) -> Tensor:  # fmt: skip
        me, line = axis.index, Line(axis, recorder)

        def end(chunk: int, before: Tensor) -> Tensor:
            factor = decay[chunk]
            return ends[chunk] + (factor @ before if matrix else factor * before)

        front = line.take(ends[0], me - 1)
        middle = end(0, front)
        line.give(middle, me + 1)
        back = line.take(ends[1], me + 1) if me + 1 < axis.size else middle
        if me:
            line.give(end(1, back), me - 1)
        line.end()
        before = torch.stack([front, back])
        ctx.save_for_backward(decay, before)
        ctx.matrix, ctx.among = matrix, (axis, recorder)
        return before

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        decay, before = ctx.saved_tensors
        axis, recorder = ctx.among
        me, line = axis.index, Line(axis, recorder)

        def start(chunk: int, of_end: Tensor) -> Tensor:
            factor = decay[chunk]
            return grad[chunk] + (factor.mT @ of_end if ctx.matrix else factor * of_end)

        back = line.take(grad[1], me - 1)
        middle = start(1, back)
        line.give(middle, me + 1)
        front = line.take(grad[0], me + 1) if me + 1 < axis.size else middle
        if me:
            line.give(start(0, front), me - 1)
        line.end()
        ends = torch.stack([front, back])
        product = ends @ before.mT if ctx.matrix else ends * before
        return ends, product.sum_to_size(decay.shape), None, None, None
