"""Stacked experts whose weights are in 8-bit floats, for inference.

    W_e  [E, out, in]  ->  e4m3 [E, out, in], and for each expert and output its largest entry / 448
    x    [S, in]       ->  e4m3, and for each row its largest entry / 448, in every step
    y = x W_e'         for the rows of expert e: grouped, summed in fp32, times both scales, in bf16
                       (on a CPU in the dtype of x)

transformers computes stacked experts in one place for every family (`grouped_mm_experts_forward`),
which hands their weights to one function; it gets a `StackedWeight` here, in the place of a tensor,
and `models.experts` asks that for the matmul. Experts that a family's own code multiplies are
rejected.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor, nn

from hocket.runtime.triton.grouped_gemm import scaled_grouped_mm, torch_has_scaled_kernel
from hocket.runtime.triton.quantize_rows import quantize_rows
from hocket.spec.capabilities import MULTIPLE_OF_8_BITS as MULTIPLE
from hocket.spec.capabilities import STACKED
from hocket.spec.errors import ModelError


class StackedWeight:
    """What experts in 8 bits have in the place of a weight.

    Attributes:
        weight: [E, in, out] e4m3, a view of one stored as [E, out, in].
        scale: [E, out] fp32.
    """

    def __init__(self, weight: Tensor, scale: Tensor) -> None:
        self.weight, self.scale = weight, scale

    def transpose(self, first: int, second: int) -> StackedWeight:
        """Itself: it is given to the grouped matmul as it is, however a family stores it."""
        return self

    def grouped_product(self, x: Tensor, offsets: Tensor) -> Tensor:
        """`x` [S, in], sorted by expert, times the weight of each expert; [S, out] of x's dtype.

        `offsets`: [E] int32, the end of each expert's rows; rows behind the last are undefined.
        """
        few, scale = quantize_rows(x)
        y = scaled_grouped_mm(few, self.weight, scale.view(-1), self.scale, offsets)
        return y.to(x.dtype)


def stacks_of(experts: nn.Module) -> list[str]:
    """Names of a module's own stacked matrices; of a module of linear layers none."""
    return [
        name
        for name, weight in experts._parameters.items()
        if weight is not None and weight.ndim == 3 and min(weight.shape[1:]) >= MULTIPLE
    ]


def can_be_stored(weight: Tensor) -> bool:
    """Whether the sizes of a stacked weight, on this rank, are ones that are multiplied."""
    return not any(size % MULTIPLE for size in weight.shape[1:])


def require_grouped(experts: nn.Module) -> None:
    """Raise ModelError for stacked experts whose matmuls cannot be done in 8 bits."""
    own: Any = experts
    name = type(experts).__name__
    known = hasattr(own, "_is_expert_parallel") and set(stacks_of(experts)) <= set(STACKED)
    if not known or own.config._experts_implementation != "grouped_mm":
        raise ModelError(
            f"{name} multiplies its experts in the model's own code, which cannot take weights in "
            "8 bits",
            hint="leave --quantization out",
        )
    device = next(experts.parameters(recurse=False)).device
    if device.type == "cuda":
        has = torch_has_scaled_kernel(torch.cuda.get_device_capability(device))
        if not has and importlib.util.find_spec("triton") is None:
            raise ModelError(
                "torch has no matmul of experts in 8 bits for this GPU, and triton, which has "
                "hocket's, is not installed",
                hint="pip install triton",
            )


@torch.no_grad()
def store_experts(experts: Any, names: list[str]) -> None:
    """Store these stacked weights of a module in 8 bits, in place."""
    for name in names:
        weight = experts._parameters[name].detach()
        transposed = bool(experts.is_transposed)  # the family has it as [E, in, out]
        rows = weight.transpose(1, 2).contiguous() if transposed else weight
        few, scale = quantize_rows(rows.reshape(-1, rows.shape[-1]))
        few = few.view(rows.shape)
        stored = few.transpose(1, 2) if transposed else few
        experts._parameters[name] = nn.Parameter(stored, requires_grad=False)
        experts.register_buffer(f"{name}_scales", scale.view(rows.shape[:2]), persistent=False)
    kind: type[nn.Module] = type(experts)
    if not issubclass(kind, _Fp8Experts):
        own = tuple(name for name in STACKED if name in experts._parameters)
        experts.__class__ = _in_8_bits(kind, own)


class _Fp8Experts(nn.Module):
    """A module of stacked experts (by class swap) that hands `StackedWeight`s to its forward."""


def _stacked(name: str) -> property:
    def weight_of(experts: Any) -> Any:
        weight = experts._parameters[name]
        scale = experts._buffers.get(f"{name}_scales")
        if scale is None:
            return weight
        return StackedWeight(weight if experts.is_transposed else weight.transpose(1, 2), scale)

    return property(weight_of)


def _in_8_bits(kind: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    own = {name: _stacked(name) for name in names}
    return type(f"Fp8{kind.__name__}", (_Fp8Experts, kind), own)
