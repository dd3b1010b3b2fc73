"""Rows rounded to 8-bit floats (e4m3), each by its own largest entry: one kernel on a GPU.

Of a step that decodes few rows, PyTorch's eight kernels for this would take longer than the matmul
that follows. On other devices, and where Triton is not installed, those eight compute it. Compiled
for the architectures of `compile` that have 8-bit floats, compared with the eight in Triton's
interpreter. Not executed on a GPU yet.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from typing import Any

import torch
from torch import Tensor

from hocket.runtime.triton import FUSED

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
"""The largest value of e4m3 (Micikevicius et al. 2022, FP8 formats for deep learning, table 1)."""

SMALLEST = 1e-12
"""A row's largest entry is no less, so that a row of zeros stays one."""


@dataclasses.dataclass(frozen=True, slots=True)
class RowTile:
    """Columns that a program has at once; `num_warps`, `num_stages`: of Triton's compiler."""

    columns: int = 1024
    num_warps: int = 4
    num_stages: int = 1

    @property
    def rows(self) -> int:
        """Of a program."""
        return 1

    def __str__(self) -> str:
        return f"{self.rows} x {self.columns}"

    def constants(self) -> dict[str, object]:
        """The values of the kernel's compile-time arguments."""
        return {"BLOCK": self.columns, "LARGEST": LARGEST}


TILE = RowTile()


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows in 8 bits, and what each is to be multiplied by.

    Args:
        x: [T, K], floating point.

    Returns:
        [T, K] in e4m3, contiguous, and [T, 1] in float32.
    """
    found: tuple[Tensor, Tensor] = torch.ops.hocket.quantize_rows(x)
    return found


def output_dtype(x: Tensor) -> torch.dtype:
    """Of a matmul of quantized rows: GPUs have kernels for one, a CPU's sums are kept as they
    are."""
    return torch.bfloat16 if x.is_cuda else torch.float32


def quantized_by_torch(x: Tensor) -> tuple[Tensor, Tensor]:
    """The same by PyTorch's operations."""
    scale = x.abs().amax(-1, keepdim=True).float().clamp(min=SMALLEST) / LARGEST
    return (x.float() / scale).to(E4M3), scale


def quantized_by_triton(x: Tensor) -> tuple[Tensor, Tensor]:
    """The same by the kernel."""
    from hocket.runtime.triton.quantize_rows_kernels import quantize_rows_kernel

    x = x if x.stride(-1) == 1 else x.contiguous()
    out, scale = _fake(x)
    if out.numel():
        quantize_rows_kernel[(x.shape[0],)](
            x, out, scale, x.shape[1], x.stride(0), **TILE.constants(), num_warps=TILE.num_warps,
            num_stages=TILE.num_stages, **FUSED,
        )  # fmt: skip
    return out, scale


def _on_cuda(x: Tensor) -> tuple[Tensor, Tensor]:
    if importlib.util.find_spec("triton") is None:
        return quantized_by_torch(x)
    return quantized_by_triton(x)


def _fake(x: Tensor) -> tuple[Tensor, Tensor]:
    return (
        x.new_empty(x.shape, dtype=E4M3),
        x.new_empty((x.shape[0], 1), dtype=torch.float32),
    )


_LIBRARY: Any = torch.library.Library("hocket", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("quantize_rows(Tensor x) -> (Tensor, Tensor)")
_LIBRARY.impl("quantize_rows", _on_cuda, "CUDA")
_LIBRARY.impl("quantize_rows", quantized_by_torch, "CPU")
torch.library.register_fake("hocket::quantize_rows", _fake, lib=_LIBRARY)
