"""Flex attention: soft caps, attention sinks and unequal head sizes without a matrix of S x S.

PyTorch's flex attention (`torch.nn.attention.flex_attention`; Dong et al., arXiv 2412.05496)
generates one kernel from a function of a score and a description of what queries see:

    causal, windows, documents   a block mask and, inside blocks, `lowest[query] <= key <= query`
    soft cap c                   score -> c tanh(score / c)
    sink s of a head             out * sigmoid(lse - s): its share of the softmax, taken afterwards

In all three a query sees one interval of keys, which ends with itself and whose first key never
moves back from one query to the next. So the block mask follows from the first keys alone, with
tensors of B x (S / 128)^2: `create_block_mask` would compute S x S. Nothing is read from the
device.

Compiled once in a process for each combination of shapes (`torch.compile`, which needs a C compiler
on the machine); within a layer that is being compiled it becomes part of the layer's graph.

Not executed on a GPU yet. On a CPU, tests put PyTorch's own unfused implementation in the place of
the generated kernel, forward and backward.

Legend: B rows, S tokens, A query heads, K key/value heads, D and E head sizes of keys and values.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from hocket.spec.attention_kernel import shared_memory_limit

BLOCK = 128
"""Queries and keys of a block, the default of flex attention."""

_TRITON = {"BACKEND": "TRITON"}
"""Not CuTe's kernels, whose backward has no gradient of the log-sum-exp, nor those of decoding."""

_SMALL_TILES = {"fwd_BLOCK_M": 32, "fwd_BLOCK_N": 32, "fwd_num_stages": 1}
"""Of float32: 96 KiB of shared memory at head size 256."""

_SMALL_HALF_TILES = {
    "fwd_BLOCK_M": 64, "fwd_BLOCK_N": 32, "fwd_num_stages": 2, "bwd_num_stages": 1,
    "bwd_BLOCK_M1": 32, "bwd_BLOCK_N1": 32, "bwd_BLOCK_M2": 32, "bwd_BLOCK_N2": 32,
}  # fmt: skip
"""Of 16 bits: 68 KiB at head size 256."""


def kernel_options(
    dtype: torch.dtype, sizes: tuple[int, int], capability: tuple[int, int]
) -> dict[str, Any]:
    """Tiles of a kernel for head sizes of keys and values: PyTorch's own (2.13) where they fit into
    the shared memory of the GPU, which they are not chosen by.

    `python -m tests.rehearsal.flex_kernels` compiles all of them without a GPU."""
    small = shared_memory_limit(capability) < shared_memory_limit((8, 0))
    size, widest = sizes[0], max(sizes)
    if dtype == torch.float32:
        fits = size == 64 if small else size in (64, 128, 256)
        return _TRITON if fits else {**_TRITON, **_SMALL_TILES}
    tuned = small or capability >= (9, 0) or size in (192, 256)
    fits = widest <= 128 or (tuned and not small)
    return _TRITON if fits else {**_TRITON, **_SMALL_HALF_TILES}


def lowest_keys(cu_seqlens: Tensor, *, window: int, rows: int, length: int) -> Tensor:
    """The first key that each query sees, in its row: [B, S] int32.

    Args:
        cu_seqlens: [N + 1] int32, first token of each sequence in B * S, and B * S.
        window: tokens that a query sees, itself included.
        rows, length: B and S.
    """
    device = cu_seqlens.device
    token = torch.arange(rows * length, device=device, dtype=torch.int32)
    sequence = torch.searchsorted(cu_seqlens, token, right=True) - 1
    begin = cu_seqlens[sequence].view(rows, length)
    begin = begin - torch.arange(rows, device=device, dtype=torch.int32).unsqueeze(1) * length
    query = torch.arange(length, device=device, dtype=torch.int32)
    return torch.maximum(begin, query - (window - 1))


def block_mask(lowest: Tensor) -> BlockMask:
    """The block mask of queries that see the keys from `lowest` [B, S] to themselves.

    The same as `create_block_mask` makes of that rule, which it would try on each of S x S pairs.
    """
    length = lowest.shape[1]
    first = torch.arange(0, length, BLOCK, device=lowest.device)
    last = (first + (BLOCK - 1)).clamp(max=length - 1)
    query_first, query_last = first.unsqueeze(1), last.unsqueeze(1)
    # [B, blocks of queries, blocks of keys]
    some = (first <= query_last) & (last >= lowest[:, first].unsqueeze(2))
    every = (last <= query_first) & (first >= lowest[:, last].unsqueeze(2))
    # A block of fewer queries than BLOCK is never full, and neither is one of fewer keys.
    every = every & (query_last - query_first == BLOCK - 1) & (last - first == BLOCK - 1)

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (key >= lowest[batch, query])

    return BlockMask.from_kv_blocks(
        *_ordered(some & ~every), *_ordered(every), BLOCK, visible, (length, length)
    )


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Number of key blocks of each query block [B, 1, Q], and their order [B, 1, Q, K]."""
    order = torch.argsort(blocks.int(), dim=-1, descending=True, stable=True)
    return blocks.sum(-1).int().unsqueeze(1), order.int().unsqueeze(1)


def flex_attend(  # noqa: PLR0917
    query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scale: float | None,
    softcap: float | None, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """Attention of query [B, A, S, D], key [B, K, S, D] and value [B, K, S, E]: [B, A, S, E].

    Args:
        mask: what queries see.
        scale: of the scores. None: 1 / sqrt(D).
        softcap: bound of the scores, by a hyperbolic tangent. None: none.
        sinks: [A], of each head a score that has no value. None: none.
    """
    bend = None if softcap is None else _bent(softcap)
    grouped = key.shape[1] != query.shape[1]
    sizes = query.shape[-1], value.shape[-1]
    capability = torch.cuda.get_device_capability() if query.is_cuda else (8, 0)
    options: Any = kernel_options(query.dtype, sizes, capability)
    if sinks is None:
        out: Any = flex_attention(
            query, key, value, bend, mask, scale, grouped, kernel_options=options
        )
        return out  # type: ignore[no-any-return]
    out, aux = flex_attention(
        query, key, value, bend, mask, scale, grouped, kernel_options=options,
        return_aux=AuxRequest(lse=True),
    )  # fmt: skip
    assert aux.lse is not None
    kept = torch.sigmoid(aux.lse - sinks.float().unsqueeze(-1))
    return (out * kept.unsqueeze(-1)).to(out.dtype)


def _bent(softcap: float) -> Callable[..., Tensor]:
    def bend(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return bend


@functools.cache
def compiled_flex_attend() -> Callable[..., Tensor]:
    """`flex_attend`, compiled. A graph break or too many shapes is an error: what would run
    instead is the unfused implementation, with its matrix of S x S."""
    return torch.compile(flex_attend, dynamic=False, fullgraph=True)
