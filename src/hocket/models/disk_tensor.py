"""DiskTensor: one tensor of a weight file, of which only the boxes asked for are read.

    the whole tensor, row by row          a box of it
    . . . . . . . .
    . . a a a . . .                       a a a     one run of bytes a row: a row is one read
    . . b b b . . .                       b b b
    . . . . . . . .

Dims that a box takes whole join the run, so that rows of a matrix are one read and columns are
one read a row. A box goes through a small staging buffer, a part at a time: besides the tensor it
is read into, nothing of its size is ever held.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from hocket.spec.tensor_file import ITEM_BYTES, TensorFile

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
"""Dtypes that a model's tensors may have, by the format's name."""

QUANTIZED_DTYPES = {
    **DTYPES,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip
"""Dtypes that the tensors of a quantized weight may have besides."""

STAGED_BYTES = 4 << 20
"""Most bytes of a file that are held at once while they are converted."""


class DiskTensor:
    """One tensor of a file.

    Args:
        file: open.
        key: its name there.

    Attributes:
        key, shape, dtype: as the file has it.
    """

    def __init__(self, file: TensorFile, key: str) -> None:
        entry = file.entries[key]
        self.shape = entry.shape
        self.dtype = QUANTIZED_DTYPES[entry.dtype]
        self._item = ITEM_BYTES[entry.dtype]
        self._file = file
        self.key = key

    def read(self, box: Sequence[slice], to: Tensor) -> None:
        """Fill `to`, of the box's shape, any dtype and any device.

        Raises:
            CheckpointError: the file has become shorter, or the disk does not answer.
        """
        first = [part.start for part in box]
        sizes = [part.stop - part.start for part in box]
        assert tuple(to.shape) == tuple(sizes), (self.key, to.shape, sizes)
        if 0 in sizes:
            return
        staging = torch.empty(min(STAGED_BYTES, math.prod(sizes) * self._item), dtype=torch.uint8)
        raw: Any = staging.numpy()
        view = memoryview(raw)
        for start, size in box_parts(sizes, STAGED_BYTES // self._item):
            count = math.prod(size) * self._item
            self._stage([f + s for f, s in zip(first, start, strict=True)], size, view[:count])
            staged = staging[:count].view(self.dtype).view(size)
            to[tuple(slice(s, s + n) for s, n in zip(start, size, strict=True))].copy_(staged)

    def whole(self) -> Tensor:
        """All of it, on the CPU, in its own dtype."""
        found = torch.empty(self.shape, dtype=self.dtype)
        self.read([slice(0, n) for n in self.shape], found)
        return found

    def _stage(self, first: Sequence[int], sizes: Sequence[int], view: memoryview) -> None:
        """Read one box into the buffer, run by run."""
        strides = [math.prod(self.shape[dim + 1 :]) for dim in range(len(sizes))]
        dim = len(sizes)  # dims from here on lie in one run, and the one before, in part
        while dim > 0 and sizes[dim - 1] == self.shape[dim - 1]:
            dim -= 1
        outer = max(dim - 1, 0)
        run = math.prod(sizes[outer:]) * self._item
        base = sum(f * s for f, s in zip(first, strides, strict=True))
        at = 0
        for index in itertools.product(*(range(n) for n in sizes[:outer])):
            offset = base + sum(i * s for i, s in zip(index, strides, strict=False))
            self._file.read_into(self.key, offset * self._item, view[at : at + run])
            at += run


def box_parts(sizes: Sequence[int], most: int) -> Iterator[tuple[list[int], list[int]]]:
    """A box in parts of at most `most` elements, in order: (first index, extent) of each."""
    if math.prod(sizes) <= most:
        yield [0] * len(sizes), list(sizes)
        return
    # The first dim whose single rows are small enough is cut; those before it go one by one.
    dim = next(d for d in range(len(sizes)) if math.prod(sizes[d + 1 :]) <= most)
    step = most // math.prod(sizes[dim + 1 :])
    for index in itertools.product(*(range(n) for n in sizes[:dim])):
        for start in range(0, sizes[dim], step):
            yield (
                [*index, start, *(0 for _ in sizes[dim + 1 :])],
                [*(1 for _ in index), min(step, sizes[dim] - start), *sizes[dim + 1 :]],
            )
