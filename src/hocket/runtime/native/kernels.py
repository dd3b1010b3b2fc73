"""Kernels: `kernels.c` and its neighbours called with tensors in fp32 on the CPU.

`CpuKernels.load` gives them, or None where there are none: callers then use torch.

Legend: T tokens, R decoding rows, N rows, V vocabulary, A query heads, K key/value heads, D head
size of queries and keys, E of values, B block size.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from hocket.runtime.native.library import library

_WIDE, _TILE = 16, 8
"""As in `kernels.c`."""


def kernels_take(*tensors: Tensor) -> bool:
    """Whether a kernel may be given these: fp32 on the CPU, entries of the last dim in a row, and
    nothing that autograd follows."""
    for x in tensors:
        if x.dtype != torch.float32 or x.device.type != "cpu" or x.stride(-1) != 1:
            return False
        if x.requires_grad and torch.is_grad_enabled():
            return False
    return True


def rows_at(x: Tensor, dtype: torch.dtype = torch.float32) -> int:
    """The address of a tensor on the CPU whose last dimension is dense; other strides are passed
    to the kernel. Every pointer that a kernel gets is taken here or by `whole_at`: a kernel reads
    what it is given as if it had this type and these strides."""
    assert x.dtype is dtype, (x.dtype, dtype)
    assert x.is_cpu, x.device
    assert x.stride(-1) == 1 or x.shape[-1] <= 1, (x.shape, x.stride())
    return x.data_ptr()


def whole_at(x: Tensor, dtype: torch.dtype = torch.float32) -> int:
    """The address of a contiguous tensor on the CPU."""
    assert x.dtype is dtype, (x.dtype, dtype)
    assert x.is_cpu, x.device
    assert x.is_contiguous(), (x.shape, x.stride())
    return x.data_ptr()


class CpuKernels:
    """The compiled functions; none of them uses more than one thread."""

    def __init__(self, found: Any) -> None:
        self._rms_norm = found.hocket_rms_norm
        self._silu_product = found.hocket_silu_product
        self._rotate = found.hocket_rotate
        self._store = found.hocket_store
        self._attend = found.hocket_attend
        self._decode = found.hocket_decode
        self._attend_chunk = found.hocket_attend_chunk
        self._product = found.hocket_product
        self._half_product = found.hocket_half_product
        self._half_scratch = found.hocket_half_scratch
        self._largest = found.hocket_largest
        self._sum = found.hocket_sum
        self._layer = found.hocket_layer
        self._layer_scratch = found.hocket_layer_scratch
        self._scratch = torch.empty(0)

    @staticmethod
    @functools.cache
    def load() -> CpuKernels | None:
        """The kernels of this process, compiled now if they never were; None without."""
        found = library()
        return None if found is None else CpuKernels(found)

    def rms_norm(self, x: Tensor, weight: Tensor, offset: float, eps: float) -> Tensor:
        """`x` [1, T, H] or [1, T, A, D] over the root of its last dim's mean square, times
        `weight + offset`."""
        out = torch.empty(x.shape)
        width = x.shape[-1]
        inner, inner_stride = (x.shape[2], x.stride(2)) if x.dim() == 4 else (1, 0)
        self._rms_norm(
            rows_at(x), x.shape[1], x.stride(1), inner, inner_stride, width,
            whole_at(weight), offset, eps, out.data_ptr(),
        )  # fmt: skip
        return out

    def silu_product(self, gate: Tensor, up: Tensor) -> Tensor:
        """silu(gate) * up, of [1, T, I] each."""
        out = torch.empty(gate.shape)
        self._silu_product(
            rows_at(gate), gate.stride(1), rows_at(up), up.stride(1),
            gate.shape[1], gate.shape[2], out.data_ptr(),
        )  # fmt: skip
        return out

    def rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Query [1, A, T, D] and key [1, K, T, D] at their positions; cosine and sine [1, T, D],
        contiguous. The results are views [1, A, T, D] and [1, K, T, D] of tokens in a row."""
        _, queries, tokens, size = q.shape
        keys = k.shape[1]
        out = torch.empty(1, tokens, queries + keys, size)
        cosine, sine, at = whole_at(cos), whole_at(sin), out.data_ptr()
        row = (queries + keys) * size
        self._rotate(
            rows_at(q), queries, tokens, q.stride(1), q.stride(2), size, cosine, sine, at, row
        )
        at += queries * size * 4
        self._rotate(
            rows_at(k), keys, tokens, k.stride(1), k.stride(2), size, cosine, sine, at, row
        )
        out = out.transpose(1, 2)
        return out[:, :queries], out[:, queries:]

    def store(self, new: Tensor, places: Tensor, pool: Tensor) -> None:
        """Write `new` [1, K, T, D] into a pool [blocks, K, B, D] at `places` [T]."""
        _, heads, tokens, width = new.shape
        self._store(
            rows_at(new), heads, tokens, new.stride(1), new.stride(2), width,
            whole_at(places, torch.long), pool.shape[2], whole_at(pool),
        )  # fmt: skip

    def attend(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        tables: Tensor,
        lengths: Tensor,
        *,
        longest: int,
        scaling: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Query [R, A, D] to [R, A, E], attending to pools [blocks, K, B, D] and [.., E].

        Args:
            tables: [R, columns] int64, the rows' blocks. lengths: [R] int64, their tokens.
            longest: at least the largest of `lengths`.
            window: tokens that are seen. softcap: of scores. sinks: [A], fp32.
        """
        rows, num_heads, size = q.shape
        _, heads, block, width = values.shape
        most = -(-longest // _WIDE) * _WIDE
        out = torch.empty(rows, num_heads, width)
        self._attend(
            rows_at(q), q.stride(0), q.stride(1), whole_at(keys), whole_at(values),
            rows_at(tables, torch.long), tables.stride(0), whole_at(lengths, torch.long), rows,
            heads, num_heads // heads, size, width, block, window or 0, scaling, softcap or 0.0,
            None if sinks is None else whole_at(sinks), self._room(num_heads * most), most,
            out.data_ptr(),
        )  # fmt: skip
        return out

    def decode(
        self,
        merged: Tensor,
        cos: Tensor,
        sin: Tensor,
        keys: Tensor,
        values: Tensor,
        *,
        places: Tensor,
        tables: Tensor,
        lengths: Tensor,
        longest: int,
        group: int,
        scaling: float,
        window: int | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """`rotate`, `store` and `attend` at once, of rows of one token: [R, A * D].

        Args:
            merged: [R, (A + 2 K) * D], query, key and value heads; contiguous.
            cos, sin: [1, R, D], contiguous.
            group: query heads of a key/value head. The rest: as of `store` and `attend`.
        """
        rows = merged.shape[0]
        _, heads, block, size = keys.shape
        most = -(-longest // _WIDE) * _WIDE
        num_heads = heads * group
        out = torch.empty(rows, num_heads * size)
        self._decode(
            whole_at(merged), rows, whole_at(cos), whole_at(sin), whole_at(places, torch.long),
            whole_at(keys), whole_at(values), rows_at(tables, torch.long), tables.stride(0),
            whole_at(lengths, torch.long), heads, group, size, block, window or 0, scaling,
            None if sinks is None else whole_at(sinks), self._room(num_heads * (size + most)),
            most, out.data_ptr(),
        )  # fmt: skip
        return out

    def attend_chunk(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        table: Tensor,
        *,
        start: int,
        scaling: float,
        out: Tensor,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        """Query [1, A, c, D] of the tokens `start` to `start + c` of a sequence to `out` [c, A, E].

        Each attends to what is up to itself in the pools [blocks, K, B, D] and [.., E], at the
        blocks of `table`, int64; their own keys and values are there already.
        """
        assert out.is_contiguous()
        _, num_heads, count, size = q.shape
        _, heads, block, width = values.shape
        most = -(-(start + count) // _WIDE) * _WIDE
        self._attend_chunk(
            rows_at(q), q.stride(1), q.stride(2), whole_at(keys), whole_at(values),
            whole_at(table, torch.long), start, count, heads, num_heads // heads, size, width,
            block, window or 0, scaling, softcap or 0.0,
            None if sinks is None else whole_at(sinks), self._room((size + width + _TILE) * most),
            most, out.data_ptr(),
        )  # fmt: skip

    def _room(self, entries: int) -> int:
        """The address of so many entries, until it is asked for again."""
        if self._scratch.numel() < entries:
            self._scratch = torch.empty(entries)
        return self._scratch.data_ptr()

    def product(self, x: Tensor, weight: Tensor, added: Tensor | None = None) -> Tensor:
        """`x` [N, in] or [1, N, in] times `weight` [in, out], its outputs side by side and at least
        16, plus `added` [N, out] or [out]; shaped as `x`."""
        depth, width = weight.shape
        out = torch.empty(*x.shape[:-1], width)
        self._product(
            rows_at(x), x.stride(-2), x.shape[-2], rows_at(weight), weight.stride(0),
            depth, width,
            None if added is None else rows_at(added),
            added.stride(0) if added is not None and added.dim() == 2 else 0, out.data_ptr(),
        )  # fmt: skip
        return out

    def half_product(self, x: Tensor, weight: Tensor, added: Tensor | None = None) -> Tensor:
        """`x` [N, in] or [1, N, in] times the transpose of `weight` [out, in], in bfloat16, its
        inputs side by side and its outputs at least 32, plus `added` [N, out] or [out]; in fp32,
        shaped as `x`. Of some rows, `x` may be rounded to bfloat16."""
        width, depth = weight.shape
        rows = x.shape[-2]
        out = torch.empty(*x.shape[:-1], width)
        self._half_product(
            rows_at(x), x.stride(-2), rows, rows_at(weight, torch.bfloat16), weight.stride(0),
            depth, width,
            None if added is None else rows_at(added),
            added.stride(0) if added is not None and added.dim() == 2 else 0, out.data_ptr(),
            self._room(self._half_scratch(rows, depth)),
        )  # fmt: skip
        return out

    def sum(self, sums: int, x: Tensor, added: Tensor | None) -> int:
        """Sum `x` over tensor ranks in place, plus `added` of as many entries, both contiguous;
        `sums` is the address of what says how (`native.sums`). Not 0: it failed."""
        at = whole_at(x)
        more = None if added is None else whole_at(added)
        return int(self._sum(sums, at, x.numel(), more, at))

    def layer(self, layer: int, step: Any, x: Tensor, out: Tensor) -> int:
        """A whole layer (`engine.whole_layer`) of rows that decode, from `x` to `out`, contiguous
        both; `layer` is the address of what it is made of. Not 0: a sum failed."""
        step.known.scratch = self._room(self._layer_scratch(layer, step.rows, step.most))
        return int(self._layer(layer, step.address, whole_at(x), whole_at(out)))

    def largest(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The largest entry of each row of `x` [N, V] and its id, of equals the first: [N] and
        [N]. NaN where the row holds one; its id means nothing."""
        rows = x.shape[0]
        values, ids = torch.empty(rows), torch.empty(rows, dtype=torch.long)
        self._largest(rows_at(x), rows, x.stride(0), x.shape[1], values.data_ptr(), ids.data_ptr())
        return values, ids
