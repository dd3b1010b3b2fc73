"""Grouped matmul of experts, as Triton kernels behind operators of PyTorch.

    grouped_mm(x, weight, offsets)[i] = x[i] @ weight[g]      for rows i of group g

torch's own (`torch.nn.functional.grouped_mm`) has a CUDA kernel for bfloat16 on compute capability
9.x and 10.x; for other dtypes and GPUs it reads the offsets on the host and multiplies group by
group (torch 2.13, `aten/src/ATen/native/cuda/GroupedBlas.cpp`), which stalls the device in every
expert layer and cannot be captured in a CUDA graph. This one reads nothing: the grid follows from
shapes. float32 is multiplied by three TF32 matmuls (tf32x3), which round at about 2**-21.

    scaled_grouped_mm(x, weight, ...)[i] = x[i] @ weight[g] * x_scale[i] * weight_scale[g]

of 8-bit floats (e4m3) is torch's on compute capability 9.x: its kernel is written for Hopper, and
multiplies rows and columns of one scale each (torch 2.13, `aten/src/ATen/native/cuda/
ScaledGroupMM.cu`; K and N must be multiples of 16, the weight stored [E, N, K], the result is
bfloat16). Its check admits 10.x too, whose instructions that kernel has not. Everywhere else from
8.9 on it is the kernel above; on a CPU a loop.

Forward and both gradients are checked against a loop over groups in Triton's interpreter, and
compiled for every architecture of `compile`. Not executed on a GPU yet.

Legend: S rows, sorted by group; E groups; K and N sides of a group's matrix.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from typing import Any

import torch
from torch import Tensor

from hocket.runtime.triton import FUSED
from hocket.runtime.triton.quantize_rows import output_dtype

DTYPES = (torch.float16, torch.bfloat16, torch.float32)

E4M3 = torch.float8_e4m3fn

LOWEST_CAPABILITY = (8, 0)
"""The compute capability that the kernels are compiled for at least."""


@dataclasses.dataclass(frozen=True, slots=True)
class GemmTile:
    """What one program computes.

    Attributes:
        rows, columns: of the result.
        depth: of one iteration.
        num_warps, num_stages: of Triton's compiler.
    """

    rows: int
    columns: int
    depth: int
    num_warps: int
    num_stages: int

    def __str__(self) -> str:
        return f"{self.rows} x {self.columns} x {self.depth}"

    def constants(self, dtype: torch.dtype) -> dict[str, object]:
        """The values of a kernel's compile-time arguments."""
        return {
            "BLOCK_M": self.rows, "BLOCK_N": self.columns, "BLOCK_K": self.depth,
            "PRECISION": "tf32x3" if dtype == torch.float32 else "ieee",
        }  # fmt: skip

    def forward_constants(self, dtype: torch.dtype) -> dict[str, object]:
        """The same of the kernel of the result."""
        return {**self.constants(dtype), "SCALED": dtype == E4M3}


_HALF = (GemmTile(16, 128, 64, 4, 3), GemmTile(64, 128, 32, 4, 3), GemmTile(128, 128, 32, 8, 3))
_SINGLE = (GemmTile(16, 64, 32, 4, 3), GemmTile(64, 64, 32, 8, 2))
_EIGHT_BITS = (
    GemmTile(16, 128, 128, 4, 3), GemmTile(64, 128, 64, 4, 3), GemmTile(128, 128, 64, 8, 3),
)  # fmt: skip
"""Tiles that none of the architectures of `compile` spills, and that fit the smallest shared
memory among them."""


def tiles_of(dtype: torch.dtype) -> tuple[GemmTile, ...]:
    """The tiles of rows of a dtype, from the fewest rows to the most; the last is that of a
    weight's gradient."""
    return {torch.float32: _SINGLE, E4M3: _EIGHT_BITS}.get(dtype, _HALF)


def gemm_tile(dtype: torch.dtype, num_rows: int, num_groups: int) -> GemmTile:
    """The smallest tile that holds an average group, or the largest."""
    tiles = tiles_of(dtype)
    return next((t for t in tiles if t.rows * num_groups >= num_rows), tiles[-1])


def torch_has_kernel(dtype: torch.dtype, capability: tuple[int, int]) -> bool:
    """Whether torch's grouped matmul runs on the device alone."""
    return dtype == torch.bfloat16 and capability[0] in (9, 10)


def torch_has_scaled_kernel(capability: tuple[int, int]) -> bool:
    """Whether torch's grouped matmul of 8-bit floats has a kernel for the device."""
    return capability[0] == 9


def takes(weight: Tensor) -> bool:
    """Whether a weight is multiplied here: on CUDA, where torch has no kernel for it."""
    if not weight.is_cuda or weight.dtype not in DTYPES:
        return False
    capability = torch.cuda.get_device_capability(weight.device)
    return (
        capability >= LOWEST_CAPABILITY
        and not torch_has_kernel(weight.dtype, capability)
        and importlib.util.find_spec("triton") is not None
    )


def grouped_mm(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """Multiply each group of rows by its own matrix; differentiable in `x` and `weight`.

    Args:
        x: [S, K] of any strides, rows sorted by group.
        weight: [E, K, N] of any strides (a transposed view is read in place).
        offsets: [E] int32, the end of each group in S, ascending. Rows behind the last one belong
            to no group: their result and gradient are zero.

    Returns:
        [S, N], contiguous, of x's dtype.

    Raises:
        ValueError: shapes or dtypes other than these.
    """
    if x.ndim != 2 or weight.ndim != 3 or x.shape[1] != weight.shape[1]:
        raise ValueError(f"x {tuple(x.shape)} does not fit weight {tuple(weight.shape)}")
    if tuple(offsets.shape) != (weight.shape[0],) or offsets.dtype != torch.int32:
        raise ValueError(
            f"offsets {offsets.dtype} {tuple(offsets.shape)}: int32, one for each of "
            f"{weight.shape[0]} groups"
        )
    if x.dtype not in DTYPES or weight.dtype != x.dtype:
        raise ValueError(f"x {x.dtype} and weight {weight.dtype}: float16, bfloat16 or float32")
    out: Tensor = torch.ops.hocket.grouped_mm(x, weight, offsets.contiguous())
    return out


def scaled_grouped_mm(
    x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor, offsets: Tensor
) -> Tensor:
    """Multiply each group of rows by its own matrix, in 8-bit floats; no gradient.

    Args:
        x: [S, K] e4m3, contiguous, rows sorted by group.
        weight: [E, K, N] e4m3, a view of one stored [E, N, K]; K and N multiples of 16.
        x_scale: [S] float32. weight_scale: [E, N] float32, contiguous.
        offsets: [E] int32, as of `grouped_mm`. Rows behind the last one are undefined.

    Returns:
        [S, N] bfloat16, summed in float32; on a CPU float32.
    """
    ops: Any = torch.ops
    if x.is_cuda and torch_has_scaled_kernel(torch.cuda.get_device_capability(x.device)):
        found: Tensor = ops.aten._scaled_grouped_mm(
            x, weight, x_scale, weight_scale, offs=offsets, out_dtype=torch.bfloat16
        )
    else:
        found = ops.hocket.scaled_grouped_mm(x, weight, x_scale, weight_scale, offsets)
    return found


def _scaled_by_loop(
    x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor, offsets: Tensor
) -> Tensor:
    out = x.new_zeros(x.shape[0], weight.shape[2], dtype=torch.float32)
    kind, begin = torch.nn.functional.ScalingType.RowWise, 0
    for group, end in enumerate(offsets.tolist()):
        if end > begin:
            rows, columns = x_scale[begin:end, None], weight_scale[group][None]
            out[begin:end] = torch.nn.functional.scaled_mm(
                x[begin:end], weight[group], rows, kind, columns, kind, output_dtype=torch.float32
            )
        begin = end
    return out


def _scaled_by_triton(
    x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor, offsets: Tensor
) -> Tensor:
    out = _fake_scaled(x, weight, x_scale, weight_scale, offsets)
    return _multiply(x, weight, offsets, out, (x_scale, weight_scale))


def _fake_scaled(x: Tensor, weight: Tensor, *_: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[2], dtype=output_dtype(x))


def _grouped_mm(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    return _multiply(x, weight, offsets, _fake_grouped_mm(x, weight, offsets), (offsets, offsets))


def _multiply(
    x: Tensor, weight: Tensor, offsets: Tensor, out: Tensor, scales: tuple[Tensor, Tensor]
) -> Tensor:
    from hocket.runtime.triton.grouped_gemm_kernels import grouped_mm_kernel

    (num_rows, inner), (num_groups, _, outer) = x.shape, weight.shape
    if not out.numel():
        return out
    tile = gemm_tile(x.dtype, num_rows, num_groups)
    grid = num_rows // tile.rows + num_groups + 1, -(-outer // tile.columns)
    grouped_mm_kernel[grid](
        x, weight, offsets, out, *scales, num_rows, num_groups, inner, outer, *x.stride(),
        *weight.stride(), **tile.forward_constants(x.dtype), num_warps=tile.num_warps,
        num_stages=tile.num_stages, **FUSED,
    )  # fmt: skip
    return out


def _fake_grouped_mm(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[2])


def _weight_gradient(x: Tensor, gradient: Tensor, offsets: Tensor, weight: Tensor) -> Tensor:
    from hocket.runtime.triton.grouped_gemm_kernels import grouped_weight_gradient_kernel

    num_groups, inner, outer = weight.shape
    out = torch.empty_like(weight)
    if not out.numel():
        return out
    tile = tiles_of(x.dtype)[-1]
    grid = -(-inner // tile.rows), -(-outer // tile.columns), num_groups
    grouped_weight_gradient_kernel[grid](
        x, gradient, offsets, out, inner, outer, *x.stride(), *gradient.stride(), *out.stride(),
        **tile.constants(x.dtype), num_warps=tile.num_warps, num_stages=tile.num_stages,
        **FUSED,
    )  # fmt: skip
    return out


def _fake_weight_gradient(x: Tensor, gradient: Tensor, offsets: Tensor, weight: Tensor) -> Tensor:
    return torch.empty_like(weight)


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x, weight, offsets = ctx.saved_tensors
    ops: Any = torch.ops.hocket
    of_x = of_weight = None
    if ctx.needs_input_grad[0]:
        of_x = ops.grouped_mm(gradient, weight.transpose(1, 2), offsets)
    if ctx.needs_input_grad[1]:  # in the strides of the weight, so that nothing copies it later
        of_weight = ops.grouped_mm_weight_gradient(x, gradient, offsets, weight)
    return of_x, of_weight, None


_LIBRARY: Any = torch.library.Library("hocket", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("grouped_mm(Tensor x, Tensor weight, Tensor offsets) -> Tensor")
_LIBRARY.define(
    "grouped_mm_weight_gradient(Tensor x, Tensor gradient, Tensor offsets, Tensor weight) -> Tensor"
)
_LIBRARY.define(
    "scaled_grouped_mm(Tensor x, Tensor weight, Tensor x_scale, Tensor weight_scale, "
    "Tensor offsets) -> Tensor"
)
_LIBRARY.impl("scaled_grouped_mm", _scaled_by_triton, "CUDA")
_LIBRARY.impl("scaled_grouped_mm", _scaled_by_loop, "CPU")
torch.library.register_fake("hocket::scaled_grouped_mm", _fake_scaled, lib=_LIBRARY)
for _key in ("CUDA", "CPU"):  # CPU: Triton's interpreter
    _LIBRARY.impl("grouped_mm", _grouped_mm, _key)
    _LIBRARY.impl("grouped_mm_weight_gradient", _weight_gradient, _key)
torch.library.register_fake("hocket::grouped_mm", _fake_grouped_mm, lib=_LIBRARY)
torch.library.register_fake(
    "hocket::grouped_mm_weight_gradient", _fake_weight_gradient, lib=_LIBRARY
)
torch.library.register_autograd("hocket::grouped_mm", _backward, setup_context=_save, lib=_LIBRARY)
