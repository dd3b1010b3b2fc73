"""Fused: parts of a model's own code that one kernel computes, on a CPU in fp32.

    RMS norm               six operations of torch, each over the whole hidden state   ->  1
    gate, activation, up   two, besides the products                                   ->  1
    rotary positions       ten                                                         ->  1

Families write these in similar ways: a module is taken as what it looks like only if it gives
the same numbers. Names and parameters stay.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hocket.runtime.native.kernels import CpuKernels, kernels_take
from hocket.serving.engine import attention
from hocket.serving.engine.projections import MergedLinear

_ROTATION = "apply_rotary_pos_emb"
_GATED = "self.down_proj(self.act_fn(self.gate_proj(x))*self.up_proj(x))"
_CLOSE = 1e-6
"""Differences of two ways to compute numbers of about 1."""


class Norm(nn.Module):
    """A norm of root mean squares (by class swap)."""

    weight: Tensor
    kernels: CpuKernels
    offset: float
    eps: float

    def forward(self, hidden_states: Tensor, *args: Any, **others: Any) -> Tensor:
        x = hidden_states
        if not args and not others and x.dim() in (3, 4) and x.shape[0] == 1 and kernels_take(x):
            return self.kernels.rms_norm(x, self.weight, self.offset, self.eps)
        return super().forward(x, *args, **others)  # type: ignore[no-any-return]


class Gated(nn.Module):
    """Products gated by a SiLU (by class swap)."""

    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module
    kernels: CpuKernels

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)
        if gate.dim() == 3 and gate.shape[0] == 1 and kernels_take(gate, up):
            return self.down_proj(self.kernels.silu_product(gate, up))  # type: ignore[no-any-return]
        return self.down_proj(F.silu(gate) * up)  # type: ignore[no-any-return]


class _Rotation:
    """Stands for a family's `apply_rotary_pos_emb`, for as long as the engine runs its model."""

    def __init__(self, original: Callable[..., tuple[Tensor, Tensor]], kernels: CpuKernels) -> None:
        self.original, self.kernels = original, kernels

    def __call__(
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **others: Any
    ) -> tuple[Tensor, Tensor]:
        shape = (1, q.shape[-2], q.shape[-1])
        if (
            args or others or attention.active() is None or q.dim() != 4 or q.shape[0] != 1
            or cos.shape != shape or sin.shape != shape or k.shape[-2:] != q.shape[-2:]
            or not (kernels_take(q, k, cos, sin) and cos.is_contiguous() and sin.is_contiguous())
        ):  # fmt: skip
            return self.original(q, k, cos, sin, *args, **others)
        return self.kernels.rotate(q, k, cos, sin)


@torch.inference_mode()
def fuse(module: nn.Module, kernels: CpuKernels) -> int:
    """Have kernels compute what they can of a module that holds its values, in place.

    Call after its projections have been merged.

    Returns:
        How many modules and functions were replaced.
    """
    found = 0
    for child in list(module.modules()):
        found += _fuse_norm(child, kernels) or _fuse_gated(child, kernels)
    homes = {type(child).__module__ for child in module.modules()}
    return found + sum(_fuse_rotation(sys.modules.get(home), kernels) for home in homes)


def _fuse_norm(child: Any, kernels: CpuKernels) -> bool:
    """A module that divides by the root mean square, with a weight or one more than it."""
    weight: Any = getattr(child, "weight", None)
    eps: Any = getattr(child, "variance_epsilon", getattr(child, "eps", None))
    plain = isinstance(weight, Tensor) and weight.dim() == 1 and isinstance(eps, float)
    if not plain or isinstance(child, Norm) or len(child._parameters) != 1 or child._modules:
        return False
    if hooked(child) or not kernels_take(weight) or weight.numel() < 2:
        return False
    # Of different sizes, one so small that eps counts.
    x = torch.randn(1, 3, weight.numel(), generator=torch.Generator().manual_seed(0))
    x *= torch.tensor([1.0, 30.0, eps**0.5]).view(1, 3, 1)
    try:
        expected = child(x)
    except Exception:  # whatever else looked like a norm
        return False
    if not isinstance(expected, Tensor) or expected.shape != x.shape:
        return False
    for offset in (0.0, 1.0):
        made = kernels.rms_norm(x, weight, offset, eps)
        if same(made, expected):
            swap(child, Norm)
            child.kernels, child.offset, child.eps = kernels, offset, eps
            return True
    return False


def _fuse_gated(child: Any, kernels: CpuKernels) -> bool:
    """A module whose forward is the product of a gate and its other half, and no more."""
    if isinstance(child, Gated) or not hasattr(child, "gate_proj") or hooked(child):
        return False
    try:
        lines = inspect.getsource(type(child).forward).splitlines()[1:]
    except (OSError, TypeError):
        return False
    text = "".join("".join(lines).split())
    if text not in (f"down_proj={_GATED}returndown_proj", f"return{_GATED}"):
        return False
    x = torch.linspace(-20, 20, 401)
    if not same(child.act_fn(x), F.silu(x)):
        return False
    gate = child.gate_proj
    weight = gate.merged.weight if isinstance(gate, MergedLinear) else gate.weight
    if weight.device.type != "cpu" or weight.dtype not in (torch.float32, torch.bfloat16):
        return False
    swap(child, Gated)
    child.kernels = kernels
    return True


def _fuse_rotation(home: Any, kernels: CpuKernels) -> bool:
    """The function of a family's code that turns queries and keys by halves."""
    function = getattr(home, _ROTATION, None)
    if function is None or isinstance(function, _Rotation):
        return False
    draw = torch.Generator().manual_seed(0)
    q, k = torch.randn(1, 4, 5, 8, generator=draw), torch.randn(1, 2, 5, 8, generator=draw)
    cos, sin = torch.randn(2, 1, 5, 8, generator=draw)
    try:
        expected = function(q, k, cos, sin)
    except Exception:  # another function of that name
        return False
    if not isinstance(expected, tuple) or len(expected) != 2:
        return False
    if not all(map(same, kernels.rotate(q, k, cos, sin), expected)):
        return False
    setattr(home, _ROTATION, _Rotation(function, kernels))
    return True


def hooked(child: nn.Module) -> bool:
    """Whether somebody watches a module: then it is left as it is."""
    return bool(child._forward_pre_hooks or child._forward_hooks)


def same(one: Tensor, other: object) -> bool:
    """Whether two ways gave the same numbers, but for rounding."""
    if not isinstance(other, Tensor) or one.shape != other.shape or one.dtype != other.dtype:
        return False
    return bool(((one - other).abs() <= _CLOSE * other.abs().clamp_min(1)).all())


def swap(child: nn.Module, kind: type[nn.Module]) -> None:
    """Make `child` of a class that is both."""
    was = type(child)
    child.__class__ = type(was.__name__, (kind, was), {})
