"""Tensor-parallel experts: every rank holds a slice of every expert.

The first product of each expert is split by output, the second by input, so that the whole block
costs one all-reduce forward (of its output) and one backward (of the gradients of its input and of
the routing weights, together). With sequence parallelism the router sees a slice of the tokens: the
tokens, their routing weights and their choices are gathered, the output is summed in slices.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hocket.runtime.mesh import Axis
from hocket.runtime.record import Recorder
from hocket.runtime.tensor_parallel.regions import copy_to_axis, copy_two_to_axis, reduce_from_axis
from hocket.runtime.tensor_parallel.sequence import gather_sequence, gather_whole, scatter_sum
from hocket.spec.errors import ModelError


class TensorParallelExperts(nn.Module):
    """A module of stacked experts, `forward(hidden_states, top_k_index, top_k_weights)`, or as in
    Llama 4, `forward(hidden_states)` of tokens that were sorted by expert and weighted before.

    Shapes: hidden_states [tokens, H], top_k_index and top_k_weights [tokens, k]; output
    [tokens, H]. Made by class swap; the module's own forward does the products.
    """

    axis: Axis
    recorder: Recorder
    slices: bool = False

    def forward(
        self,
        hidden_states: Tensor,
        top_k_index: Tensor | None = None,
        top_k_weights: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        if top_k_index is None or top_k_weights is None:
            if self.slices:
                raise ModelError("experts with sorted tokens do not support sequence parallelism")
            hidden_states = copy_to_axis(hidden_states, self.axis, self.recorder)
            out = super().forward(hidden_states, **kwargs)  # type: ignore[misc]
            return reduce_from_axis(out, self.axis, self.recorder)
        if self.slices:
            hidden_states, top_k_weights = self._gather(hidden_states, top_k_weights)
            top_k_index = gather_sequence(top_k_index, self.axis, self.recorder)
            out = super().forward(hidden_states, top_k_index, top_k_weights, **kwargs)  # type: ignore[misc]
            return scatter_sum(out, self.axis, self.recorder)
        hidden_states, top_k_weights = copy_two_to_axis(
            hidden_states, top_k_weights, self.axis, self.recorder
        )
        out = super().forward(hidden_states, top_k_index, top_k_weights, **kwargs)  # type: ignore[misc]
        return reduce_from_axis(out, self.axis, self.recorder)

    def _gather(self, hidden: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Both whole; in one message where their dtypes agree, as do their gradients."""
        if hidden.dtype != weights.dtype:
            return (
                gather_whole(hidden, self.axis, self.recorder),
                gather_whole(weights, self.axis, self.recorder),
            )
        both = gather_whole(torch.cat([hidden, weights], -1), self.axis, self.recorder)
        found = torch.split(both, [hidden.shape[-1], weights.shape[-1]], -1)
        return found[0].contiguous(), found[1]


def sliced_experts_class(kind: type[nn.Module]) -> type[nn.Module]:
    """The tensor-parallel form of a class of stacked experts."""
    return type(f"TensorParallel{kind.__name__}", (TensorParallelExperts, kind), {})
