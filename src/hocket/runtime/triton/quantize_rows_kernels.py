"""The Triton kernel that rounds rows to 8-bit floats, each by its own largest entry.

Import this module only where Triton is installed; `quantize_rows` does so at its first call.
"""

# ruff: noqa: PLR0917  a kernel's arguments have places
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def quantize_rows_kernel(
    x, out, scale, num_columns, x_stride_row, LARGEST: tl.constexpr, BLOCK: tl.constexpr
):
    """One program a row: its largest entry, then its entries over it. The second pass reads the
    row from the cache."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    largest = tl.zeros([BLOCK], dtype=tl.float32)
    for begin in range(0, num_columns, BLOCK):
        inside = begin + at < num_columns
        part = tl.load(x + row * x_stride_row + begin + at, mask=inside, other=0.0)
        largest = tl.maximum(largest, tl.abs(part.to(tl.float32)))
    own = tl.maximum(tl.max(largest, axis=0), 1e-12) / LARGEST
    tl.store(scale + row, own)
    for begin in range(0, num_columns, BLOCK):
        inside = begin + at < num_columns
        part = tl.load(x + row * x_stride_row + begin + at, mask=inside, other=0.0)
        few = (part.to(tl.float32) / own).to(tl.float8e4nv, fp_downcast_rounding="rtne")
        tl.store(out + row * num_columns + begin + at, few, mask=inside)
