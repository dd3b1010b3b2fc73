"""Vocabulary-parallel embedding: each rank holds some rows and knows only those tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from hocket.runtime.mesh import Axis
from hocket.runtime.record import Recorder
from hocket.runtime.tensor_parallel.regions import reduce_in_place
from hocket.runtime.tensor_parallel.sequence import scatter_sum


class VocabParallelEmbedding(nn.Embedding):
    """An embedding over rows `start .. start + rows` of the vocabulary.

    Input [B, S] token ids, output [B, S, H] summed over the ranks: a token is zero everywhere but
    where its row lies. With `slices` the output is this rank's slice of the sum, [B, S / tp, H].
    `summed`: another way to sum, that needs no gradient. Made by class swap; a subclass of
    `nn.Embedding` keeps its own forward.
    """

    axis: Axis
    recorder: Recorder
    start: int
    slices: bool = False
    summed: Callable[[Tensor], Tensor] | None = None

    def forward(self, input: Tensor) -> Tensor:
        rows = self.weight.shape[0]
        local = input - self.start
        foreign = (local < 0) | (local >= rows)
        if rows == 0:
            # No row to look up; the sum over nothing ties the result to the weight's graph.
            out = self.weight.new_zeros(*input.shape, self.weight.shape[1]) + self.weight.sum()
        else:
            padding = self.padding_idx
            if padding is not None:
                padding = padding - self.start if 0 <= padding - self.start < rows else None
            out = F.embedding(local.masked_fill_(foreign, 0), self.weight, padding)
            out = out.masked_fill_(foreign.unsqueeze(-1), 0)
        if self.slices:
            return scatter_sum(out, self.axis, self.recorder)
        if self.summed is not None:
            return self.summed(out)
        return reduce_in_place(out, self.axis, self.recorder)


def vocab_parallel_class(kind: type[nn.Module]) -> type[nn.Module]:
    """The vocabulary-parallel form of an embedding class.

    A subclass (Gemma's scaled embedding) stays in front, so that its `super().forward` finds the
    parallel one.
    """
    if kind is nn.Embedding:
        return VocabParallelEmbedding
    return type(f"VocabParallel{kind.__name__}", (kind, VocabParallelEmbedding), {})
