"""Dequantized: a weight that is stored in few bits, read to floats box by box.

W is the weight as the model has it, [O, I] (out, in), of experts [E, I, O] or [E, O, I].

    method              tensors in the file                           W[o, i]
    fp8, fbgemm_fp8,    W F8 or I8; W_scale_inv or W_scale: one,      W times its scale
    compressed-tensors  [O, 1], or one a block of rows and columns
    mxfp4               W_blocks U8 [E, O, I/32, 16],                 E2M1 times 2^(scale - 127)
                        W_scales U8 [E, O, I/32]
    gptq                qweight I32 [I/p, O], qzeros [I/g, O/p],      (q - z[k, o]) scales[k, o],
                        scales [I/g, O], g_idx [I]                    k = g_idx[i]
    awq                 qweight I32 [I, O/p], qzeros, scales          the same, k = i // g
    compressed-tensors  weight_packed I32 [O, I/p],                   (q - 2^(b-1) - z) scale
     (pack-quantized)   weight_scale [O, I/g], weight_zero_point
    bitsandbytes        weight U8 [O I / 2, 1], absmax, quant_map     map[q] times absmax of 64
                        weight I8 [O, I], SCB [O]                     q SCB / 127

p values of b bits are in one word of 32, the first in the lowest bits. GPTQ: Frantar et al. 2022,
arXiv:2210.17323; AWQ: Lin et al. 2023, arXiv:2306.00978;
NF4: Dettmers et al. 2023, arXiv:2305.14314, section 3; E2M1 and its scales: OCP Microscaling
Formats 1.0, section 5.3.3.

Of a box only the bytes that it is made of are read, a part at a time (bitsandbytes' blocks run
across rows: there whole rows are read).
"""

from __future__ import annotations

import abc
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hocket.models.disk_tensor import DiskTensor, box_parts
from hocket.models.weight_headers import printable_key
from hocket.spec.errors import WeightsError

Box = Sequence[slice]

_AT_ONCE = 1 << 20
"""Most elements that are converted at once."""

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class Dequantized(abc.ABC):
    """One weight of a quantized file; `read` and `whole` are those of a `DiskTensor`.

    Attributes:
        shape: of the weight as the model has it.
        dtype: of what `whole` returns.
        keys: the file's tensors that it is made of.
    """

    dtype = torch.float32

    def __init__(self, shape: Sequence[int], *tensors: DiskTensor | None) -> None:
        self.shape = tuple(shape)
        self.keys = tuple(tensor.key for tensor in tensors if tensor is not None)

    def read(self, box: Box, to: Tensor) -> None:
        """Fill `to`, of the box's shape, any float dtype and any device.

        Raises:
            CheckpointError: the file has become shorter, or the disk does not answer.
        """
        first, sizes = [p.start for p in box], [p.stop - p.start for p in box]
        assert tuple(to.shape) == tuple(sizes), (self.keys, to.shape, sizes)
        if 0 in sizes:
            return
        for start, extent in box_parts(sizes, _AT_ONCE):
            here = [slice(s, s + n) for s, n in zip(start, extent, strict=True)]
            there = [slice(f + s, f + s + n) for f, s, n in zip(first, start, extent, strict=True)]
            to[tuple(here)].copy_(self._values(there))

    def whole(self) -> Tensor:
        """All of it, on the CPU, in fp32."""
        found = torch.empty(self.shape, dtype=self.dtype)
        self.read([slice(0, n) for n in self.shape], found)
        return found

    @abc.abstractmethod
    def _values(self, box: Box) -> Tensor:
        """The values of one box, in fp32."""


class BlockScaled(Dequantized):
    """8-bit values with a scale for each block, row or tensor.

    Args:
        weight: F8 or I8. scale: with as many dims, or fewer where it is one for all.
        block: rows and columns of a block; where they do not give the scale's shape, blocks divide
            the weight evenly.
        zero: subtracted before scaling, of the scale's shape.

    Raises:
        WeightsError: a scale whose shape fits no division of the weight.
    """

    def __init__(
        self,
        weight: DiskTensor,
        scale: DiskTensor,
        block: tuple[int, int] = (128, 128),
        *,
        zero: DiskTensor | None = None,
        factor: float = 1.0,
    ) -> None:
        super().__init__(weight.shape, weight, scale, zero)
        self._weight, self._scale, self._zero, self._factor = weight, scale, zero, factor
        dims = len(weight.shape)
        wanted = scale.shape if math.prod(scale.shape) != 1 else (1,) * dims
        if len(wanted) == 1 and dims == 2 and wanted[0] == weight.shape[0]:
            wanted = (wanted[0], 1)  # one a row
        self._grid = tuple(wanted)
        asked = (*(1 for _ in weight.shape[:-2]), *block)[-dims:]
        if tuple(-(-n // b) for n, b in zip(weight.shape, asked, strict=True)) == self._grid:
            self._blocks: tuple[int, ...] = asked
        elif len(self._grid) == dims and all(
            n % count == 0 for n, count in zip(weight.shape, self._grid, strict=True)
        ):
            self._blocks = tuple(n // c for n, c in zip(weight.shape, self._grid, strict=True))
        else:
            raise unfit_tensors(weight.key, weight.shape, scale.key, scale.shape)

    def _values(self, box: Box) -> Tensor:
        values = floats(self._weight, box)
        if self._zero is not None:
            values -= self._grid_values(self._zero, box)
        return values * (self._grid_values(self._scale, box) * self._factor)

    def _grid_values(self, tensor: DiskTensor, box: Box) -> Tensor:
        """The block values of every element of a box, in its shape or as broadcast."""
        grid = [
            slice(part.start // b, -(-part.stop // b))
            for part, b in zip(box, self._blocks, strict=True)
        ]
        if math.prod(self._grid) == 1:
            own: Box = [slice(0, n) for n in tensor.shape]
        else:
            own = grid[: len(tensor.shape)]
        found = floats(tensor, own).reshape([g.stop - g.start for g in grid])
        for dim, (part, g, b) in enumerate(zip(box, grid, self._blocks, strict=True)):
            if g.stop - g.start > 1:
                found = found.index_select(dim, torch.arange(part.start, part.stop) // b - g.start)
        return found


class Mxfp4(Dequantized):
    """gpt-oss's experts: E2M1 in blocks of 32 along the input, [E, O, I] in the file, [E, I, O]
    in the model."""

    def __init__(self, blocks: DiskTensor, scales: DiskTensor) -> None:
        if (
            len(blocks.shape) != 4
            or blocks.shape[-1] != 16
            or blocks.shape[:-1] != scales.shape
            or {blocks.dtype, scales.dtype} != {torch.uint8}
        ):
            raise unfit_tensors(blocks.key, blocks.shape, scales.key, scales.shape)
        experts, out, groups, _ = blocks.shape
        super().__init__((experts, groups * 32, out), blocks, scales)
        self._blocks, self._scales = blocks, scales

    def _values(self, box: Box) -> Tensor:
        experts, inputs, outputs = box
        groups = slice(inputs.start // 32, -(-inputs.stop // 32))
        words = raw(self._blocks, (experts, outputs, groups, slice(0, 16)))
        exponents = raw(self._scales, (experts, outputs, groups)).to(torch.int32) - 127
        table = torch.tensor((*_E2M1, *(-v for v in _E2M1)))
        pairs = torch.stack((table[(words & 15).long()], table[(words >> 4).long()]), -1)
        values = torch.ldexp(pairs.flatten(-2), exponents.unsqueeze(-1)).flatten(-2)
        start = inputs.start - groups.start * 32
        return values[..., start : start + inputs.stop - inputs.start].transpose(1, 2)


class FourBit(Dequantized):
    """bitsandbytes' NF4 and FP4: a table's values, scaled by the largest of each block.

    Args:
        state: of the file, JSON: shape, blocksize and, where the scales are quantized themselves,
            nested_blocksize and nested_offset.
    """

    def __init__(
        self,
        state: Mapping[str, Any],
        weight: DiskTensor,
        absmax: DiskTensor,
        table: DiskTensor,
        nested: tuple[DiskTensor, DiskTensor] | None,
    ) -> None:
        try:
            shape = tuple(int(n) for n in state["shape"])
            self._block = int(state["blocksize"])
            self._nested_block = int(state["nested_blocksize"]) if nested else 1
            self._offset = float(state["nested_offset"]) if nested else 0.0
        except (KeyError, TypeError, ValueError):
            raise WeightsError(f"{printable_key(weight.key)} has no readable quant_state") from None
        elements = math.prod(shape)
        blocks = -(-elements // self._block) if self._block > 0 else 0
        if (
            len(shape) != 2
            or min(shape) < 1
            or weight.dtype != torch.uint8
            or math.prod(weight.shape) != -(-elements // 2)
            or absmax.shape != (blocks,)
            or table.shape != (16,)
            or (
                nested is not None
                and (
                    absmax.dtype != torch.uint8
                    or self._nested_block < 1
                    or nested[0].shape != (-(-blocks // self._nested_block),)
                    or nested[1].shape != (256,)
                )
            )
        ):
            raise unfit_tensors(weight.key, weight.shape, absmax.key, absmax.shape)
        super().__init__(shape, weight, absmax, table, *(nested or ()))
        self._weight, self._absmax, self._table, self._nested = weight, absmax, table, nested

    def _values(self, box: Box) -> Tensor:
        rows, columns = box
        step = max(1, _AT_ONCE // self.shape[1])
        return torch.cat(
            [
                self._rows(row, min(row + step, rows.stop))[:, columns]
                for row in range(rows.start, rows.stop, step)
            ]
        )

    def _rows(self, start: int, stop: int) -> Tensor:
        width = self.shape[1]
        first, last = start * width, stop * width
        packed = _flat(self._weight, first // 2, -(-last // 2))
        codes = (
            torch.stack((packed >> 4, packed & 15), -1)
            .flatten()[first % 2 :][: last - first]
            .long()
        )
        blocks = slice(first // self._block, -(-last // self._block))
        if self._nested is None:
            scales = floats(self._absmax, (blocks,))
        else:
            most, table = self._nested
            code = raw(self._absmax, (blocks,)).long()
            outer = slice(blocks.start // self._nested_block, -(-blocks.stop // self._nested_block))
            number = torch.arange(blocks.start, blocks.stop) // self._nested_block - outer.start
            scales = table.whole()[code] * floats(most, (outer,))[number] + self._offset
        block = torch.arange(first, last) // self._block - blocks.start
        return (self._table.whole().to(torch.float32)[codes] * scales[block]).view(-1, width)


def raw(tensor: DiskTensor, box: Box) -> Tensor:
    """A box of a file's tensor, in its own dtype."""
    found = torch.empty([p.stop - p.start for p in box], dtype=tensor.dtype)
    tensor.read(box, found)
    return found


def floats(tensor: DiskTensor, box: Box) -> Tensor:
    """A box of a file's tensor, in fp32."""
    found = torch.empty([p.stop - p.start for p in box], dtype=torch.float32)
    tensor.read(box, found)
    return found


def _flat(tensor: DiskTensor, start: int, stop: int) -> Tensor:
    """Elements of a tensor of one row, or of one column."""
    box = [slice(0, 1) for _ in tensor.shape]
    box[max(range(len(box)), key=lambda dim: tensor.shape[dim])] = slice(start, stop)
    return raw(tensor, box).flatten()


def unfit_tensors(
    key: str, shape: Sequence[int], other: str, other_shape: Sequence[int]
) -> WeightsError:
    """The error of two tensors of one weight whose shapes do not fit."""
    return WeightsError(
        f"the quantized weight {printable_key(key)} is {list(shape)}, and {printable_key(other)} "
        "is "
        f"{list(other_shape)}: they do not fit each other"
    )
