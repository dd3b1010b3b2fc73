"""Column- and row-parallel linear layers, made by class swap.

    x, whole -copy-> h = x W1[my outputs], in parts -> y = h W2[my inputs] -reduce-> y, whole

With sequence parallelism x and y are slices of the sequence: x is gathered, y summed in slices.

A layer keeps its module's name, its parameters' names and Hugging Face's way of storing them
(`Conv1D` keeps its weight transposed); only the parameters' values become local.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from hocket.runtime.linear import Kept, WeightGradients, linear
from hocket.runtime.mesh import Axis
from hocket.runtime.record import Recorder
from hocket.runtime.tensor_parallel import overlap
from hocket.runtime.tensor_parallel.regions import (
    copy_to_axis,
    gather_from_axis,
    reduce_in_place,
    split_to_axis,
)
from hocket.runtime.tensor_parallel.sequence import IN_GRAPH, SequenceEntry, scatter_sum
from hocket.runtime.tensor_parallel.shards import Shards


class SharedInput:
    """The way of one tensor into the split layers that share it.

    Query, key and value (or gate and up) are fed the same tensor: all of them use one autograd
    node, so that backward sums one gradient instead of three. References are dropped when the
    last of the `layers` siblings has asked.
    """

    __slots__ = (
        "_asked", "_copied", "_late", "_source", "axis", "layers", "overlaps", "recorder",
    )  # fmt: skip

    def __init__(self, axis: Axis, recorder: Recorder) -> None:
        self.axis = axis
        self.recorder = recorder
        self.layers: list[nn.Module] = []
        self.overlaps = overlap.overlaps
        self._late: dict[int, overlap.Late] = {}
        self._source: Tensor | None = None
        self._copied: Tensor | None = None
        self._asked = 0

    def __call__(self, x: Tensor, layer: nn.Module) -> tuple[Tensor, None, overlap.Late | None]:
        """(`x` for the layer's matmul, nothing to keep in its place, what the layer runs with where
        it overlaps)."""
        if not (x.requires_grad and torch.is_grad_enabled()):
            return x, None, None
        if self._source is not x or self._copied is None:
            self._source = x
            self._asked = 0
            self._copy(x)
        self._asked += 1
        late = self._late.pop(id(layer), None) if self._late else None
        copied = self._copied
        assert copied is not None
        if self._asked == len(self.layers):
            self.close()
        return copied, None, late

    def close(self) -> None:
        """Forget the input."""
        self._source = self._copied = None
        self._late = {}

    def _copy(self, x: Tensor) -> None:
        if self.axis.size > 1 and self.overlaps(x) and not torch.compiler.is_compiling():
            self._copied, self._late = overlap.begin(
                x, self.layers, self.axis, self.recorder, gathered=None, whole=lambda given: given
            )
        else:
            self._copied, self._late = copy_to_axis(x, self.axis, self.recorder), {}


def close_after(module: nn.Module, entry: SharedInput) -> None:
    """Let an entry forget its input when a module's forward ends."""

    def after(_: nn.Module, args: Any, output: Any) -> None:
        entry.close()

    setattr(after, IN_GRAPH, True)
    module.register_forward_hook(after)


class RegionStreams(Protocol):
    """Random streams that differ between tensor ranks only where tensors are in parts."""

    def enter_sharded(self) -> None:
        """From here on tensors are in parts."""

    def enter_replicated(self) -> None:
        """From here on all ranks compute the same."""

    def leave_sharded(self) -> None:
        """From here on tensors are as they are between split blocks."""


class _ParallelLinear(nn.Linear):
    """What column- and row-parallel layers share; never made directly."""

    axis: Axis
    recorder: Recorder
    transposed: bool
    weight_gradients: WeightGradients | None = None
    product: Callable[[Tensor, Tensor], Tensor] | None = None
    streams: RegionStreams | None = None

    def _linear(self, x: Tensor, bias: Tensor | None, kept: Kept | None = None) -> Tensor:
        return linear(
            x,
            self.weight,
            bias,
            transposed=self.transposed,
            weight_gradients=self.weight_gradients,
            kept=kept,
            product=self.product,
        )

    def extra_repr(self) -> str:
        rows, columns = self.weight.shape
        return (
            f"{rows} x {columns} of {self.in_features} -> {self.out_features}, tp {self.axis.size}"
        )


class ColumnParallelLinear(_ParallelLinear):
    """A linear layer that holds some of its outputs.

    Input [..., in], whole on every rank or a slice of the sequence, as its `entry` says; output
    [..., out of this rank], or [..., out] if the plan says `gather_output`.
    """

    entry: SharedInput | SequenceEntry
    gather: Shards | None

    def _entered(self, input: Tensor) -> Tensor:
        input, kept, late = self.entry(input, self)
        if late is None:
            return self._linear(input, self.bias, kept)
        piece = None if kept is None else kept[0]
        return overlap.overlapped_linear(
            input, self.bias, late, transposed=self.transposed, piece=piece
        )

    def forward(self, input: Tensor) -> Tensor:
        y = self._entered(input)
        streams = self.streams if self.training else None
        if self.gather is not None:
            if streams is not None:
                streams.enter_replicated()
            return gather_from_axis(y, self.gather, self.axis, self.recorder)
        if streams is not None:
            streams.enter_sharded()
        return y


class RowParallelLinear(_ParallelLinear):
    """A linear layer that holds some of its inputs.

    Input [..., in of this rank], or [..., in] if the plan says `scatter_input`; output [..., out],
    summed over the ranks; the bias is added once, after the sum. With `slices` the output is this
    rank's slice of the sequence. `summed`: another way to sum, that needs no gradient.
    """

    scatter: Shards | None
    slices: bool = False
    summed: Callable[[Tensor], Tensor] | None = None

    def forward(self, input: Tensor) -> Tensor:
        if self.streams is not None and self.training:
            self.streams.leave_sharded()
        if self.scatter is not None:
            input = split_to_axis(input, self.scatter, self.axis, self.recorder)
        y = self._linear(input, None)
        if self.slices:
            y = scatter_sum(y, self.axis, self.recorder)
        elif self.summed is not None:
            y = self.summed(y)
        else:
            y = reduce_in_place(y, self.axis, self.recorder)
        return y if self.bias is None else y + self.bias


class VocabParallelHead(ColumnParallelLinear):
    """The output head: logits stay split by vocabulary, for the vocabulary-parallel loss.

    Input [B, S, H], output [B, S, V of this rank].

    Attributes:
        start: first vocabulary row of this rank.
        sizes: vocabulary rows of each rank.
        shards: the rows of every rank.
    """

    start: int
    sizes: list[int]
    shards: Shards

    def forward(self, input: Tensor) -> Tensor:
        return self._entered(input)

    def gathered(self, logits: Tensor) -> Tensor:
        """Whole logits [B, S, V] of this rank's [B, S, V of this rank]."""
        return gather_from_axis(logits, self.shards, self.axis, self.recorder)
