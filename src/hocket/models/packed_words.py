"""Packed words: weights of 2, 4 or 8 bits in words of 32, of GPTQ, AWQ and compressed-tensors.

The formats are in the table of `models.dequantized`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hocket.models.dequantized import Box, Dequantized, floats, raw, unfit_tensors
from hocket.models.disk_tensor import DiskTensor
from hocket.models.weight_headers import printable_key
from hocket.spec.errors import WeightsError

# The column of each value of an AWQ word, from the lowest bits on.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


class Grouped(Dequantized):
    """GPTQ and AWQ: integers with a scale and a zero point for each group of inputs."""

    def __init__(
        self,
        name: str,
        bits: int,
        qweight: DiskTensor,
        *,
        qzeros: DiskTensor,
        scales: DiskTensor,
        g_idx: DiskTensor | None,
        awq: bool = False,
        zeros_less_one: bool = False,
    ) -> None:
        per = 32 // bits
        shape: tuple[int, int] = (0, 0)
        if len(qweight.shape) == 2:
            rows, columns = qweight.shape
            shape = (columns * per, rows) if awq else (columns, rows * per)
        out, inputs = shape
        groups = scales.shape[0] if scales.shape else 0
        if (
            qweight.dtype != torch.int32
            or qzeros.dtype != torch.int32
            or not groups
            or scales.shape != (groups, out)
            or qzeros.shape != (groups, -(-out // per))
            or (g_idx is not None and g_idx.shape != (inputs,))
            or (g_idx is None and inputs % groups)
        ):
            raise unfit_tensors(name, qweight.shape, scales.key, scales.shape)
        super().__init__(shape, qweight, qzeros, scales, g_idx)
        self._bits, self._per, self._awq, self._less_one = bits, per, awq, zeros_less_one
        self._qweight, self._qzeros, self._scales, self._g_idx = qweight, qzeros, scales, g_idx
        self._groups = groups

    def _values(self, box: Box) -> Tensor:
        outputs, inputs = box
        if self._awq:
            packed = self._columns(self._qweight, inputs, outputs)
        else:
            words = slice(inputs.start // self._per, -(-inputs.stop // self._per))
            packed = unpacked(raw(self._qweight, (words, outputs)), self._bits, dim=0)
            start = inputs.start - words.start * self._per
            packed = packed[start : start + inputs.stop - inputs.start]
        if self._g_idx is not None:
            group = raw(self._g_idx, (inputs,)).long()
            if int(group.min()) < 0 or int(group.max()) >= self._groups:
                raise WeightsError(
                    f"{printable_key(self._g_idx.key)} names group {int(group.max())} of "
                    f"{self._groups}"
                )
        else:
            group = torch.arange(inputs.start, inputs.stop) // (self.shape[1] // self._groups)
        lowest = int(group.min())
        span = slice(lowest, int(group.max()) + 1)
        zeros = self._columns(self._qzeros, span, outputs)
        if self._less_one:
            zeros = (zeros + 1) & ((1 << self._bits) - 1)
        scales = floats(self._scales, (span, outputs))
        group = group - lowest
        return ((packed - zeros[group]).to(torch.float32) * scales[group]).T

    def _columns(self, tensor: DiskTensor, rows: slice, outputs: slice) -> Tensor:
        """Some columns of a tensor whose words run along them."""
        words = slice(outputs.start // self._per, -(-outputs.stop // self._per))
        found = unpacked(
            raw(tensor, (rows, words)), self._bits, dim=1, order=_AWQ_ORDER if self._awq else None
        )
        start = outputs.start - words.start * self._per
        return found[:, start : start + outputs.stop - outputs.start]


class Packed(Dequantized):
    """compressed-tensors' pack-quantized: words along the input."""

    def __init__(
        self,
        bits: int,
        offset: int,
        shape: tuple[int, ...],
        packed: DiskTensor,
        *,
        scale: DiskTensor,
        zero: DiskTensor | None,
        g_idx: DiskTensor | None,
    ) -> None:
        per = 32 // bits
        fits = len(shape) == 2 and len(scale.shape) == 2 and packed.dtype == torch.int32
        if (
            not fits
            or packed.shape != (shape[0], -(-shape[1] // per))
            or scale.shape[0] not in (1, shape[0])
            or not scale.shape[1]
            or (g_idx is None and shape[1] % scale.shape[1])
            or (g_idx is not None and g_idx.shape != shape[1:])
            or (zero is not None and zero.shape != (-(-scale.shape[0] // per), scale.shape[1]))
        ):
            raise unfit_tensors(packed.key, packed.shape, scale.key, scale.shape)
        super().__init__(shape, packed, scale, zero, g_idx)
        self._bits, self._per, self._offset = bits, per, offset
        self._packed, self._scale, self._zero, self._g_idx = packed, scale, zero, g_idx

    def _values(self, box: Box) -> Tensor:
        outputs, inputs = box
        words = slice(inputs.start // self._per, -(-inputs.stop // self._per))
        values = unpacked(raw(self._packed, (outputs, words)), self._bits, dim=1)
        start = inputs.start - words.start * self._per
        values = values[:, start : start + inputs.stop - inputs.start] - self._offset
        rows = outputs if self._scale.shape[0] > 1 else slice(0, 1)
        groups = slice(0, self._scale.shape[1])
        scale = floats(self._scale, (rows, groups))
        if self._g_idx is not None:
            group = raw(self._g_idx, (inputs,)).long()
            if int(group.min()) < 0 or int(group.max()) >= groups.stop:
                raise WeightsError(
                    f"{printable_key(self._g_idx.key)} names a group that has no scale"
                )
        else:
            group = torch.arange(inputs.start, inputs.stop) // (self.shape[1] // groups.stop)
        if self._zero is not None:
            zero_words = slice(rows.start // self._per, -(-rows.stop // self._per))
            zero = unpacked(raw(self._zero, (zero_words, groups)), self._bits, dim=0)
            first = rows.start - zero_words.start * self._per
            zero = zero[first : first + rows.stop - rows.start] - self._offset
            values = values - zero[:, group]
        return values.to(torch.float32) * scale[:, group]


def unpacked(words: Tensor, bits: int, *, dim: int, order: Sequence[int] | None = None) -> Tensor:
    """Integers of `bits` from words of 32, along one dim; `order`: the place of each in a word."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    if order is not None:
        shifts = shifts[torch.argsort(torch.tensor(order))]
    wide = words.unsqueeze(dim + 1) >> shifts.view(-1, *(1 for _ in words.shape[dim + 1 :]))
    return (wide & ((1 << bits) - 1)).flatten(dim, dim + 1)
