"""Tensor parallelism: layers that hold plain local tensors and call collectives themselves.

The pairing is Megatron-LM's (Shoeybi et al. 2019, section 3): a column-parallel layer, then a
row-parallel one, so that attention and MLP each cost one all-reduce forward and one backward.
"""

from hocket.runtime.tensor_parallel.apply import apply_tensor_parallel, copies_needed
from hocket.runtime.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from hocket.runtime.tensor_parallel.embedding import VocabParallelEmbedding
from hocket.runtime.tensor_parallel.gradients import PartialGradients
from hocket.runtime.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelHead,
)

__all__ = [
    "ColumnParallelLinear",
    "PartialGradients",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "VocabParallelHead",
    "apply_tensor_parallel",
    "copies_needed",
    "vocab_parallel_cross_entropy",
]
