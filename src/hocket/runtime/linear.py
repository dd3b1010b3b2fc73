"""Linear: the one function all parallel linear layers go through.

Its backward can be halved, so that a schedule may run the input's gradient (I) at once, because
the stage before waits for it, and the weight's gradient (W) where there would be a bubble (zero
bubble pipeline parallelism, Qi et al. 2023). Where nothing is deferred it is `F.linear` and costs
nothing more.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class WeightGradients:
    """Weight gradients put off: collected while `deferring`, computed by `run`."""

    def __init__(self) -> None:
        self._pending: list[tuple[Tensor, Tensor | None, Tensor, Tensor, bool]] = []
        self._deferring = False

    @contextmanager
    def deferring(self) -> Iterator[None]:
        """Inside the block, backward leaves out the weights of the layers that use this."""
        self._deferring = True
        try:
            yield
        finally:
            self._deferring = False

    def take(self) -> list[tuple[Tensor, Tensor | None, Tensor, Tensor, bool]]:
        """What was put off so far, to be handed to `run` later."""
        pending, self._pending = self._pending, []
        return pending

    @staticmethod
    def run(pending: list[tuple[Tensor, Tensor | None, Tensor, Tensor, bool]]) -> None:
        """Accumulate the gradients of `pending`. Hooks on the parameters fire as in backward."""
        for weight, bias, x, grad, transposed in pending:
            dweight, dbias = _weight_gradient(x, grad, bias is not None, transposed)
            leaves = [weight] if bias is None else [weight, bias]
            torch.autograd.backward(leaves, [dweight] if dbias is None else [dweight, dbias])


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    transposed: bool = False,
    weight_gradients: WeightGradients | None = None,
) -> Tensor:
    """`x` [..., in] times `weight` [out, in] (if `transposed`, [in, out]), plus `bias` [out]."""
    if weight_gradients is not None and torch.is_grad_enabled():
        y: Tensor = _Halved.apply(x, weight, bias, transposed, weight_gradients)  # type: ignore[no-untyped-call]
        return y
    return F.linear(x, weight.t() if transposed else weight, bias)


class DeferrableLinear(nn.Linear):
    """A linear layer (by class swap) whose weight gradient can be put off."""

    weight_gradients: WeightGradients | None = None

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias, weight_gradients=self.weight_gradients)


def defer_weight_gradients(module: nn.Module, weight_gradients: WeightGradients) -> None:
    """Let every linear layer of `module` use `weight_gradients`; plain ones change their class."""
    child: Any
    for child in module.modules():
        if type(child) is nn.Linear:
            child.__class__ = DeferrableLinear
        if hasattr(type(child), "weight_gradients"):
            child.weight_gradients = weight_gradients


def _weight_gradient(
    x: Tensor, grad: Tensor, with_bias: bool, transposed: bool
) -> tuple[Tensor, Tensor | None]:
    x2, grad2 = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
    dweight = x2.t() @ grad2 if transposed else grad2.t() @ x2
    return dweight, grad2.sum(0) if with_bias else None


class _Halved(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]  # noqa: PLR0917 (autograd passes by position)
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        transposed: bool,
        weight_gradients: WeightGradients,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        ctx.transposed, ctx.weight_gradients = transposed, weight_gradients
        return F.linear(x, weight.t() if transposed else weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight, bias = ctx.saved_tensors
        dx = dweight = dbias = None
        if ctx.needs_input_grad[0]:
            dx = grad @ (weight.t() if ctx.transposed else weight)
        if ctx.needs_input_grad[1]:
            queue: WeightGradients = ctx.weight_gradients
            if queue._deferring:
                queue._pending.append((weight, bias, x, grad, ctx.transposed))
            else:
                dweight, dbias = _weight_gradient(x, grad, bias is not None, ctx.transposed)
        return dx, dweight, dbias, None, None
