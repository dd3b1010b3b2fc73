"""Tensor-parallel experts: every rank holds a slice of every expert.

The first product of each expert is split by output, the second by input, so that the whole block
costs one all-reduce forward (of its output) and one backward (of the gradients of its input and of
the routing weights, together).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from hocket.runtime.mesh import Axis
from hocket.runtime.record import Recorder
from hocket.runtime.tensor_parallel.regions import copy_two_to_axis, reduce_from_axis


class TensorParallelExperts(nn.Module):
    """A module of stacked experts, `forward(hidden_states, top_k_index, top_k_weights)`.

    Shapes: hidden_states [tokens, H], top_k_index and top_k_weights [tokens, k]; output
    [tokens, H]. Made by class swap; the module's own forward does the products.
    """

    axis: Axis
    recorder: Recorder

    def forward(
        self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, **kwargs: Any
    ) -> Tensor:
        hidden_states, top_k_weights = copy_two_to_axis(
            hidden_states, top_k_weights, self.axis, self.recorder
        )
        out = super().forward(hidden_states, top_k_index, top_k_weights, **kwargs)  # type: ignore[misc]
        return reduce_from_axis(out, self.axis, self.recorder)


def expert_parallel_class(kind: type[nn.Module]) -> type[nn.Module]:
    """The tensor-parallel form of a class of stacked experts."""
    return type(f"TensorParallel{kind.__name__}", (TensorParallelExperts, kind), {})
