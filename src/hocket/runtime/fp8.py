"""Fp8: the linear layers' products in 8-bit floats, as torchao's float8 training does them.

    forward    y  = q(x) q(W)'        q: divided by the tensor's own largest entry, rounded
    backward   dx = q(dy) q(W)           to e4m3 (values) or e5m2 (gradients)
               dW = q(dy)' q(x)

Weights, gradients and everything between products stay in bf16, and the masters in fp32
(Micikevicius et al. 2022, FP8 formats for deep learning). The embedding and the output head are
left alone: their errors matter most. A rank of tp scales its own slices.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hocket.runtime.linear import DeferrableLinear
from hocket.spec.errors import ModelError, OptionError
from hocket.spec.install import install_line
from hocket.spec.plan import StagePlan

MULTIPLE = 16
"""Both sizes of a weight are divisible by it, or its products stay in bf16."""

Product = Callable[[Tensor, Tensor], Tensor]
"""`x` [..., in] times a transposed weight [in, out]."""


@functools.cache
def fp8_matmul(emulate: bool = False) -> Product:
    """The product of torchao.

    Args:
        emulate: round to 8 bits and multiply in fp32, on any device: slow, to see what fp8 does.

    Raises:
        OptionError: torchao is not installed.
    """
    try:
        from torchao.float8.config import Float8LinearConfig
        from torchao.float8.float8_linear import Float8Linear, matmul_with_hp_or_float8_args
    except ImportError as error:
        raise OptionError(
            f"fp8 matmuls need torchao, which cannot be imported: {error}",
            hint=install_line("fp8"),
        ) from None
    # Tokens of a microbatch are an inner size too, of dW, and may be any number.
    config = Float8LinearConfig(pad_inner_dim=True, emulate=emulate)
    with torch.device("meta"):
        settings = Float8Linear(MULTIPLE, MULTIPLE, bias=False, config=config).linear_mm_config

    def multiply(x: Tensor, weight_t: Tensor) -> Tensor:
        found: Tensor = matmul_with_hp_or_float8_args.apply(x, weight_t, settings, config)
        return found

    return multiply


def multiply_in_fp8(
    module: nn.Module, plan: StagePlan | None, *, emulate: bool = False
) -> list[str]:
    """Let the linear layers inside a stage's blocks multiply in fp8.

    Returns:
        Their names.

    Raises:
        ModelError: there is none.
        OptionError: torchao is not installed.
    """
    found = []
    child: Any
    if plan is not None:
        for name, child in module.get_submodule(plan.layers).named_modules():
            plain = type(child) is nn.Linear
            if not (plain or hasattr(type(child), "product")) or _odd(child.weight):
                continue
            if plain:
                child.__class__ = DeferrableLinear
            child.product = fp8_matmul(emulate)
            found.append(name)
    if not found:
        raise ModelError(
            f"{type(module).__name__} has no linear layer whose sizes are multiples of {MULTIPLE}: "
            "nothing of it could be multiplied in fp8",
            hint="--dtype bf16",
        )
    return found


def _odd(weight: Tensor) -> bool:
    return any(size % MULTIPLE for size in weight.shape)
