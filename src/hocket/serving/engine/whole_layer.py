"""Whole layers: all of a decoder layer for rows that decode, in one call of a kernel.

What `fused_layer` does in eight calls, each of which costs as much as a norm: the kernel goes from
product to product by itself, and of tensor ranks sums in between (`native.sums`). Its products are
those that read a weight once (`engine.products`), so it is for numbers of rows at which they are no
slower than torch's by more than the calls take.
"""

from __future__ import annotations

import ctypes
from typing import Any, ClassVar

import torch
from torch import Tensor

from hocket.runtime.native.kernels import CpuKernels, rows_at, whole_at
from hocket.runtime.native.sums import Sums
from hocket.serving.engine.attention import Options
from hocket.serving.engine.attention_step import StepIndices
from hocket.serving.engine.fused import Norm
from hocket.serving.engine.gemm_select import MOST_ROWS, SelectedGemm, is_exact

_SAVED = 100e-6
"""Seconds that one call takes less than eight."""
_WIDE = 16
"""As in `kernels.c`."""


class _Matrix(ctypes.Structure):
    """As `Matrix` in `layer.c`."""

    _fields_: ClassVar[list[tuple[str, Any]]] = [
        ("weight", ctypes.c_void_p),
        ("stride", ctypes.c_int64),
        ("depth", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("bias", ctypes.c_void_p),
        ("half", ctypes.c_int64),
    ]

    @classmethod
    def of(cls, product: SelectedGemm, bias: Tensor | None) -> _Matrix:
        width, depth = product.weight.shape
        stored = product.weight if product.half else product.turned
        at = None if bias is None else whole_at(bias)
        kind = torch.bfloat16 if product.half else torch.float32
        return cls(rows_at(stored, kind), stored.stride(0), depth, width, at, int(product.half))


class _Layer(ctypes.Structure):
    """As `Layer` in `layer.c`."""

    _fields_: ClassVar[list[tuple[str, Any]]] = [
        ("merged", _Matrix),
        ("out", _Matrix),
        ("gate_up", _Matrix),
        ("down", _Matrix),
        ("norms", ctypes.c_void_p * 2),
        ("offsets", ctypes.c_float * 2),
        ("eps", ctypes.c_float * 2),
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("sinks", ctypes.c_void_p),
        ("heads", ctypes.c_int64),
        ("group", ctypes.c_int64),
        ("size", ctypes.c_int64),
        ("block_size", ctypes.c_int64),
        ("window", ctypes.c_int64),
        ("scale", ctypes.c_float),
        ("sums", ctypes.c_void_p),
    ]


class _Step(ctypes.Structure):
    """As `Step` in `layer.c`."""

    _fields_: ClassVar[list[tuple[str, Any]]] = [
        ("rows", ctypes.c_int64),
        ("cosine", ctypes.c_void_p),
        ("sine", ctypes.c_void_p),
        ("places", ctypes.c_void_p),
        ("tables", ctypes.c_void_p),
        ("lengths", ctypes.c_void_p),
        ("columns", ctypes.c_int64),
        ("most", ctypes.c_int64),
        ("scratch", ctypes.c_void_p),
    ]


class DecodeStep:
    """What all layers of one step of decoding read: tokens' positions and where they are kept.

    Args:
        step: whose rows all decode.
        cosine, sine: [1, R, D], contiguous.
    """

    def __init__(self, step: StepIndices, cosine: Tensor, sine: Tensor) -> None:
        self.rows = step.num_decode
        self.most = -(-step.tables.shape[1] * step.block_size // _WIDE) * _WIDE
        self._held = (step, cosine, sine)
        self.known = _Step(
            self.rows, whole_at(cosine), whole_at(sine), whole_at(step.places, torch.long),
            rows_at(step.tables, torch.long), whole_at(step.lengths, torch.long),
            step.tables.stride(0), self.most, None,
        )  # fmt: skip
        self.address = ctypes.addressof(self.known)

    def turned_by(self, cosine: Tensor, sine: Tensor) -> bool:
        """Whether it was made of these."""
        return self._held[1] is cosine and self._held[2] is sine


class WholeLayer:
    """One decoder layer of this rank.

    Args:
        products: of query, key and value; of the attention's end; of gate and up; of the end.
        biases: of the first and the third.
        heads: query heads, key/value heads, size of a head.
        sums: over the tensor ranks; None: the layer is not split.
    """

    def __init__(
        self,
        kernels: CpuKernels,
        norms: tuple[Norm, Norm],
        products: tuple[SelectedGemm, SelectedGemm, SelectedGemm, SelectedGemm],
        *,
        biases: tuple[Tensor | None, Tensor | None],
        heads: tuple[int, int, int],
        options: Options,
        sums: Sums | None,
    ) -> None:
        assert options.softcap is None
        merged, out, gate_up, down = products
        self.kernels, self.sums = kernels, sums
        self._hidden = merged.turned.shape[0]
        sinks = None if options.sinks is None else options.sinks.float().contiguous()
        self._held = (norms, products, biases, sinks)
        num_heads, kv_heads, size = heads
        self._known = _Layer(
            _Matrix.of(merged, biases[0]),
            _Matrix.of(out, None),
            _Matrix.of(gate_up, biases[1]),
            _Matrix.of(down, None),
            (ctypes.c_void_p * 2)(*(whole_at(norm.weight) for norm in norms)),
            (ctypes.c_float * 2)(*(norm.offset for norm in norms)),
            (ctypes.c_float * 2)(*(norm.eps for norm in norms)),
            None,
            None,
            None if sinks is None else whole_at(sinks),
            kv_heads,
            num_heads // kv_heads,
            size,
            0,
            options.window or 0,
            options.scaling,
            None if sums is None else sums.address,
        )
        self._address = ctypes.addressof(self._known)
        self._rounds = any(product.half for product in products)
        later = [sum(lost) for lost in zip(*(one.lost for one in products), strict=True)]
        self._faster = tuple(seconds < _SAVED for seconds in later)

    def takes(self, rows: int) -> bool:
        """Whether so many rows are computed by it."""
        if not 0 < rows <= MOST_ROWS or not self._faster[(rows - 1).bit_length()]:
            return False
        if self._rounds and is_exact():
            return False
        if self.sums is None:
            return True
        # A recorded window shows every sum.
        return rows * self._hidden <= self.sums.room and not self.sums.recorder.recording

    def __call__(self, x: Tensor, step: DecodeStep, keys: Tensor, values: Tensor) -> Tensor:
        """`x` [1, R, H], contiguous, after this layer, whose keys and values are kept in the pools
        [blocks, K, B, D]. Raises as `Sums`."""
        known = self._known
        known.keys, known.values, known.block_size = (
            whole_at(keys),
            whole_at(values),
            keys.shape[2],
        )
        out = torch.empty(x.shape)
        if self.sums is not None:
            self.sums.begin(2, x.numel())
        ended = self.kernels.layer(self._address, step, x, out)
        if self.sums is not None:
            self.sums.end(ended)
        return out
