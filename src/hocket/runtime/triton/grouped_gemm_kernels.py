"""The Triton kernels of grouped matmuls: rows by the matrix of their group, and its gradient.

Import this module only where Triton is installed; `grouped_gemm` does so at its first call.

Rows are sorted by group, and `offsets[g]` is the end of group g. The host knows S and E, never an
offset: the grid of the rows has S // BLOCK_M + E + 1 tiles, which is enough whatever the offsets
are, and each program finds its group by a search in them.

      rows   0      offsets[0]        offsets[1] = offsets[2]     offsets[3]      S
             |----------|-----------------|---------------------------|-----------|
      group       0              1         (2 has none)      3           no group: zeros
      tiles   0    1      2    3    4      5  6    7    8       9    10

A tile begins where its group or the tile before it does, so no tile has rows of two groups.

Legend: S rows, E groups, K and N sides of a group's matrix.
"""

# ruff: noqa: PLR0917  a kernel's arguments have places
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _group_of(offsets, tile, num_groups, BLOCK_M: tl.constexpr):
    """The last group g whose first tile, begin(g) // BLOCK_M + g, is <= tile.

    Group `num_groups` is the rows behind the last offset. A group of n rows gets n // BLOCK_M + 1
    tiles or one more, never fewer than it needs.
    """
    low = 0
    high = num_groups + 1
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(offsets + middle - 1) // BLOCK_M + middle <= tile:
            low = middle
        else:
            high = middle
    return low


@triton.jit(do_not_specialize=["num_rows", "num_groups"])
def grouped_mm_kernel(
    x,  # [S, K]
    weight,  # [E, K, N]
    offsets,  # [E] int32
    out,  # [S, N], contiguous
    x_scale,  # [S] float32; not read without SCALED
    weight_scale,  # [E, N] float32, contiguous; not read without SCALED
    num_rows,
    num_groups,
    K,
    N,
    x_stride_row,
    x_stride_k,
    weight_stride_group,
    weight_stride_k,
    weight_stride_n,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    SCALED: tl.constexpr,
):
    """Grid: (S // BLOCK_M + E + 1, tiles of N). Rows of group g times weight[g]; others: 0. SCALED:
    of 8-bit floats, times the scale of the row and that of the group's column."""
    tile = tl.program_id(0)
    group = _group_of(offsets, tile, num_groups, BLOCK_M)
    begin = 0
    if group > 0:
        begin = tl.load(offsets + group - 1)
    end = num_rows
    depth = 0
    if group < num_groups:
        end = tl.load(offsets + group)
        depth = K
    first = begin + (tile - (begin // BLOCK_M + group)) * BLOCK_M
    if first >= end:
        return
    rows = first + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    inside = (rows < end)[:, None]
    wanted = (columns < N)[None, :]
    left = x + rows.to(tl.int64)[:, None] * x_stride_row + k[None, :] * x_stride_k
    right = (
        weight
        + group.to(tl.int64) * weight_stride_group
        + k.to(tl.int64)[:, None] * weight_stride_k
        + columns.to(tl.int64)[None, :] * weight_stride_n
    )
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in tl.range(0, depth, BLOCK_K):
        left_of = k < K - start
        a = tl.load(left, mask=inside & left_of[None, :], other=0.0)
        b = tl.load(right, mask=left_of[:, None] & wanted, other=0.0)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
        left += BLOCK_K * x_stride_k
        right += BLOCK_K * weight_stride_k
    if SCALED:
        present = tl.minimum(group, num_groups - 1).to(tl.int64)
        of_rows = tl.load(x_scale + rows, mask=rows < end, other=0.0)
        of_columns = tl.load(weight_scale + present * N + columns, mask=columns < N, other=0.0)
        acc = acc * of_rows[:, None] * of_columns[None, :]
    target = out + rows.to(tl.int64)[:, None] * N + columns[None, :]
    tl.store(target, acc.to(out.dtype.element_ty), mask=inside & wanted)


@triton.jit(do_not_specialize=["num_groups"])
def grouped_weight_gradient_kernel(
    x,  # [S, K]
    gradient,  # [S, N]
    offsets,  # [E] int32
    out,  # [E, K, N]
    K,
    N,
    x_stride_row,
    x_stride_k,
    gradient_stride_row,
    gradient_stride_n,
    out_stride_group,
    out_stride_k,
    out_stride_n,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid: (tiles of K, tiles of N, E). out[g] = x of group g, transposed, times its gradient.

    BLOCK_M by BLOCK_N is the tile of the result, BLOCK_K the rows of one iteration. The matrix of
    a group without rows is zero.
    """
    group = tl.program_id(2)
    begin = 0
    if group > 0:
        begin = tl.load(offsets + group - 1)
    end = tl.load(offsets + group)
    ks = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.arange(0, BLOCK_K)
    inside = (ks < K)[:, None]
    wanted = (columns < N)[None, :]
    at = (begin + row).to(tl.int64)
    left = x + at[None, :] * x_stride_row + ks[:, None] * x_stride_k
    right = gradient + at[:, None] * gradient_stride_row + columns[None, :] * gradient_stride_n
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in tl.range(begin, end, BLOCK_K):
        left_of = row < end - start
        a = tl.load(left, mask=inside & left_of[None, :], other=0.0)
        b = tl.load(right, mask=left_of[:, None] & wanted, other=0.0)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
        left += BLOCK_K * x_stride_row
        right += BLOCK_K * gradient_stride_row
    target = (
        out
        + group.to(tl.int64) * out_stride_group
        + ks.to(tl.int64)[:, None] * out_stride_k
        + columns.to(tl.int64)[None, :] * out_stride_n
    )
    tl.store(target, acc.to(out.dtype.element_ty), mask=inside & wanted)
