"""Chunks of prompts attended on a CPU without kernels of ours, one by one.

A chunk attends with the kernel for whole sequences: to itself causally, to what was there before
without a mask, and the two are joined by the logarithms of their sums of exponentials.

Legend: c tokens of a chunk, A query heads, K key/value heads, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hocket.serving.engine.attention import Options
from hocket.serving.engine.attention_pieces import attend_piece
from hocket.serving.engine.attention_step import Chunk
from hocket.serving.engine.cache import read

_NEAR_BYTES = 1 << 20
"""Keys and values of a head that lie near the core while a chunk attends to them."""

_flash: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def near(chunk: Chunk, keys: Tensor, values: Tensor) -> bool:
    """Whether a head's keys and values of all that a chunk attends to stay near the core."""
    size = (keys.shape[-1] + values.shape[-1]) * keys.element_size()
    return (chunk.start + chunk.count) * size <= _NEAR_BYTES


def attend_chunk(
    chunk: Chunk,
    own: tuple[Tensor, Tensor, Tensor],
    keys: Tensor,
    values: Tensor,
    options: Options,
) -> Tensor:
    """One chunk of a prompt, its `own` query [1, A, c, D], key and value [1, K, c, D], to
    [c, A, D]."""
    query, key, value = own
    total = chunk.start + chunk.count
    windowed = options.window is not None and options.window < total
    if options.softcap is not None or windowed:
        return _explicit(chunk, query, keys, values, options)
    out, weight = attend_to_chunk(query, key, value, options.scaling, causal=True)
    if chunk.start:
        heads, block = keys.shape[1], keys.shape[2]
        blocks = chunk.blocks[: (chunk.start + block - 1) // block]
        k = gathered(keys, blocks, query.dtype)[:, :, : chunk.start]
        v = gathered(values, blocks, query.dtype)[:, :, : chunk.start]
        # Queries of the heads that share a key lie one after the other: no key is repeated.
        _, num_heads, count, size = query.shape
        asked = query.reshape(1, heads, num_heads // heads * count, size)
        before, old = attend_to_chunk(asked, k, v, options.scaling, causal=False)
        before, old = before.reshape(out.shape), old.reshape(weight.shape)
        share = torch.sigmoid(weight - old).unsqueeze(-1).to(out.dtype)
        out = torch.lerp(before, out, share)
        weight = torch.logaddexp(weight, old)
    return sunk(out[0].transpose(0, 1), weight[0].t(), options.sinks)


def sunk(out: Tensor, weight: Tensor, sinks: Tensor | None) -> Tensor:
    """What was attended to [..., A, D], with the logarithm of the sum of exponentials [..., A],
    once a sink takes its share."""
    if sinks is None:
        return out
    share = torch.sigmoid(weight - sinks.to(weight.dtype))
    return out * share.unsqueeze(-1).to(out.dtype)


def attend_to_chunk(
    q: Tensor, k: Tensor, v: Tensor, scaling: float, *, causal: bool
) -> tuple[Tensor, Tensor]:
    """The attended values and, per query, the logarithm of the sum of exponentials.

    The operator is called below torch's own checks: it reads the last dimension as if its stride
    were 1, whatever it is, so tensors with another stride are copied here.
    """
    q, k, v = (dense(x) for x in (q, k, v))
    width = v.shape[-1]
    if width != q.shape[-1]:  # the kernel wants one width
        v = nn.functional.pad(v, (0, q.shape[-1] - width))
    out, weight = _flash(q, k, v, is_causal=causal, scale=scaling)
    return out[..., :width], weight


def dense(x: Tensor) -> Tensor:
    """`x`, copied if the entries of its last dimension are not adjacent in memory."""
    return x if x.stride(-1) == 1 else x.contiguous()


def gathered(pool: Tensor, blocks: Tensor, dtype: torch.dtype) -> Tensor:
    """A sequence's blocks as [1, K, tokens, D] of a dtype."""
    # Picked first: of the transposed pool, all of it would be copied before a block is picked.
    picked = read(pool, blocks, dtype)
    count, heads, block, width = picked.shape
    return picked.transpose(0, 1).reshape(1, heads, count * block, width)


def _explicit(
    chunk: Chunk, query: Tensor, keys: Tensor, values: Tensor, options: Options
) -> Tensor:
    """With a window or a softcap: scores and mask of this chunk alone."""
    _, num_heads, count, size = query.shape
    heads, block = keys.shape[1], keys.shape[2]
    group = num_heads // heads
    oldest = 0
    if options.window is not None:
        oldest = max(0, chunk.start + 1 - options.window)
    skipped = oldest // block
    end = chunk.start + count - skipped * block
    k = gathered(keys, chunk.blocks[skipped:], query.dtype)[0, :, :end]
    v = gathered(values, chunk.blocks[skipped:], query.dtype)[0, :, :end]
    at = torch.arange(chunk.start, chunk.start + count).unsqueeze(1)
    seen = torch.arange(end) + skipped * block
    hidden = seen > at
    if options.window is not None:
        hidden |= seen <= at - options.window
    asked = query[0].reshape(heads, group, count, size)
    mixed, weight = attend_piece(asked, k, v, hidden, options)
    out = mixed.reshape(num_heads, count, -1).transpose(0, 1)
    return sunk(out, weight.view(num_heads, count).t(), options.sinks).to(v.dtype)
