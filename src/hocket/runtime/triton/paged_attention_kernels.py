"""The Triton kernels of paged attention: one attends, one merges what splits of the keys gave.

Import this module only where Triton is installed; `paged_attention` does so at its first call.

One program attends with one tile of queries of one sequence and one key/value head:

                              keys of the sequence, BLOCK_N at a time, through its block table
                               lo                                         hi
    tile: BLOCK_M rows         |----------|----------|----------|----------|
      token 0, head 0          |  visible                       |##########|   # not visible:
      token 0, head 1          |                                |##########|   after the query,
      token 1, head 0          |                                    |######|   or before its window
      token 1, head 1          |                                    |######|
      ...                      |------ split 0 ------|------ split 1 ------|

GROUP is 2 in this drawing.

The GROUP query heads that share a key/value head are rows of the same tile, so that a key is read
once for all of them and a decode step of one token still fills a tensor core's tile. Rows are
numbered token by token over the sequence (row = token * GROUP + head), so GROUP can be any number.

Where the cache holds a part of each block (SPAN above BLOCK_SIZE), the keys of a sequence are those
of its parts, one after the other: `_held` of a position is how many of them come before it.

Softmax is computed online in base 2 (Milakov and Gimelshein 2018; FlashAttention-2, Dao 2023,
section 3.1); splits of the keys are merged by their log-sum-exp (Flash-Decoding, Dao et al. 2023).
"""

# ruff: noqa: PLR0917, SIM102  a kernel's arguments have places; Triton needs the nesting
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _sequence_of(cu_seqlens_q, tile, num_rows, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """The last sequence r whose first tile, cu_seqlens_q[r] * GROUP // BLOCK_M + r, is <= tile.

    A sequence of n tokens gets n * GROUP // BLOCK_M + 1 tiles or one fewer, never less than it
    needs, and the grid needs no length on the host: T * GROUP // BLOCK_M + R tiles are enough.
    """
    low = 0
    high = num_rows
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(cu_seqlens_q + middle) * GROUP // BLOCK_M + middle <= tile:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _held(position, offset, BLOCK_SIZE: tl.constexpr, SPAN: tl.constexpr):
    """Tokens of a sequence before `position` that the cache holds."""
    held = position
    if SPAN != BLOCK_SIZE:
        rest = tl.minimum(tl.maximum(position % SPAN - offset, 0), BLOCK_SIZE)
        held = position // SPAN * BLOCK_SIZE + rest
    return held


@triton.jit(do_not_specialize=["window", "offset", "num_tokens", "num_rows", "max_blocks"])
def attend_kernel(
    query,  # [T, Hq, D]
    key_cache,  # [blocks, BLOCK_SIZE, Hkv, D]
    value_cache,  # [blocks, BLOCK_SIZE, Hkv, DV]
    block_tables,  # [R, max_blocks] int32
    seqused_k,  # [R] int32
    cu_seqlens_q,  # [R + 1] int32
    sinks,  # [Hq]; not read without HAS_SINKS
    out,  # [splits, T, Hq, DV]: float32 with SPLIT, else of the result's dtype and one split
    lse,  # [splits, T, Hq] float32: base 2 with SPLIT, else natural and only with RETURN_LSE
    scale,
    softcap,
    window,
    offset,  # of the held part of a block, in the SPAN tokens that the block has; 0 without
    query_stride_token,
    query_stride_head,
    num_tokens,
    num_rows,
    max_blocks,
    num_kv_heads,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    D_PAD: tl.constexpr,
    DV_PAD: tl.constexpr,
    SPLIT: tl.constexpr,
    ONE_TILE: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    RETURN_LSE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid: (tiles, Hkv, splits). The last tiles see the most keys and start first."""
    LOG2E: tl.constexpr = 1.4426950408889634
    LN2: tl.constexpr = 0.6931471805599453
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)

    # 1. Which sequence, and which rows of it.
    if ONE_TILE:
        row = tile
        begin = tl.load(cu_seqlens_q + row)
        first = 0
    else:
        row = _sequence_of(cu_seqlens_q, tile, num_rows, GROUP, BLOCK_M)
        begin = tl.load(cu_seqlens_q + row)
        first = (tile - (begin * GROUP // BLOCK_M + row)) * BLOCK_M
    count = tl.load(cu_seqlens_q + row + 1) - begin
    if first >= count * GROUP:
        return
    length = tl.load(seqused_k + row)
    context = length - count  # tokens of the sequence before its first query

    rows = first + tl.arange(0, BLOCK_M)
    token = rows // GROUP
    head = kv_head * GROUP + rows % GROUP
    valid = token < count
    d = tl.arange(0, D_PAD)
    dv = tl.arange(0, DV_PAD)
    q = tl.load(
        query
        + (begin + token).to(tl.int64)[:, None] * query_stride_token
        + head[:, None] * query_stride_head
        + d[None, :],
        mask=valid[:, None] & (d < D)[None, :],
        other=0.0,
    )

    # 2. Which keys: none that no row of the tile can see, and of those this split's.
    lo = 0
    hi = length
    if CAUSAL:
        hi = tl.minimum(hi, context + tl.minimum((first + BLOCK_M - 1) // GROUP + 1, count))
    if HAS_WINDOW:
        lo = tl.maximum(context + first // GROUP - window + 1, 0)
        lo = _held(lo, offset, BLOCK_SIZE, SPAN) // BLOCK_N * BLOCK_N
    hi = _held(hi, offset, BLOCK_SIZE, SPAN)
    if SPLIT:
        blocks = tl.cdiv(tl.maximum(hi - lo, 0), BLOCK_N)
        per_split = tl.cdiv(blocks, tl.num_programs(2)) * BLOCK_N
        lo += split * per_split
        hi = tl.minimum(hi, lo + per_split)
    # Of each row: from `oldest` on, and before `after`.
    after = tl.full([BLOCK_M], 0, tl.int32) + hi
    if CAUSAL:
        after = tl.minimum(hi, _held(context + token + 1, offset, BLOCK_SIZE, SPAN))
    oldest = _held(context + token + 1 - window, offset, BLOCK_SIZE, SPAN)

    # 3. Online softmax over them. A sink is a score without a value, counted once.
    top = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if HAS_SINKS:
        if split == 0:
            top = tl.load(sinks + head, mask=valid, other=0.0).to(tl.float32) * LOG2E
            total += 1.0
    acc = tl.zeros([BLOCK_M, DV_PAD], tl.float32)
    table = block_tables + row.to(tl.int64) * max_blocks
    for start in tl.range(lo, hi, BLOCK_N):
        at = start + tl.arange(0, BLOCK_N)
        inside = at < hi
        block = tl.load(table + at // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        slot = (block * BLOCK_SIZE + at % BLOCK_SIZE) * num_kv_heads + kv_head
        # What lies beyond `hi` may never have been written: a NaN times a weight of 0 is a NaN.
        k = tl.load(
            key_cache + slot[None, :] * D + d[:, None],
            mask=inside[None, :] & (d < D)[:, None],
            other=0.0,
        )
        v = tl.load(
            value_cache + slot[:, None] * DV + dv[None, :],
            mask=inside[:, None] & (dv < DV)[None, :],
            other=0.0,
        )
        k = k.to(q.dtype)  # of a cache in 8 bits; else it has that dtype
        v = v.to(q.dtype)
        scores = tl.dot(q, k, input_precision=PRECISION) * scale
        if HAS_SOFTCAP:  # tanh(x) = 1 - 2 / (exp(2x) + 1), which saturates without overflow
            bent = 1.0 - 2.0 / (tl.exp2(scores * (2.0 * LOG2E / softcap)) + 1.0)
            scores = softcap * bent
        visible = at[None, :] < after[:, None]
        if HAS_WINDOW:
            visible = visible & (at[None, :] >= oldest[:, None])
        scores = tl.where(visible, scores * LOG2E, -float("inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        shift = tl.where(higher == -float("inf"), 0.0, higher)  # -inf - -inf is a NaN
        weights = tl.exp2(scores - shift[:, None])
        shrink = tl.exp2(top - shift)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None]
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=PRECISION)
        top = higher

    # 4. Rows that saw nothing are zero; of splits that saw nothing only the log-sum-exp is read.
    divisor = tl.where(total == 0.0, 1.0, total)
    result = acc / divisor[:, None]
    num_heads = num_kv_heads * GROUP
    place = (split * num_tokens + begin + token).to(tl.int64) * num_heads + head
    saved = valid
    if SPLIT:
        saved = saved & (total > 0.0)
        tl.store(lse + place, top + tl.log2(divisor), mask=valid)
    elif RETURN_LSE:
        tl.store(lse + place, (top + tl.log2(divisor)) * LN2, mask=valid)
    tl.store(
        out + place[:, None] * DV + dv[None, :],
        result.to(out.dtype.element_ty),
        mask=saved[:, None] & (dv < DV)[None, :],
    )


@triton.jit(do_not_specialize=["num_places", "splits"])
def merge_kernel(
    partial,  # [splits, T, Hq, DV] float32
    lse,  # [splits, T, Hq] float32, base 2
    out,  # [T, Hq, DV]
    weight,  # [T, Hq] float32, natural; not written without RETURN_LSE
    num_places,  # T * Hq
    splits,
    DV: tl.constexpr,
    DV_PAD: tl.constexpr,
    SPLITS_PAD: tl.constexpr,
    RETURN_LSE: tl.constexpr,
):
    """Grid: (T * Hq,). out = sum of 2 ** lse_s * partial_s over splits s / sum of 2 ** lse_s."""
    LN2: tl.constexpr = 0.6931471805599453
    place = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS_PAD)
    dv = tl.arange(0, DV_PAD)
    at = split * num_places + place
    given = tl.load(lse + at, mask=split < splits, other=-float("inf"))
    top = tl.max(given, 0)
    weights = tl.exp2(given - tl.where(top == -float("inf"), 0.0, top))
    values = tl.load(
        partial + at[:, None] * DV + dv[None, :],
        mask=(weights > 0.0)[:, None] & (dv < DV)[None, :],
        other=0.0,
    )
    total = tl.sum(weights, 0)
    divisor = tl.where(total == 0.0, 1.0, total)
    result = tl.sum(values * weights[:, None], 0) / divisor
    if RETURN_LSE:
        tl.store(weight + place, (top + tl.log2(divisor)) * LN2)
    tl.store(out + place * DV + dv, result.to(out.dtype.element_ty), mask=dv < DV)
