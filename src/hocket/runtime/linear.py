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

Parameters = tuple[Tensor, Tensor | None]
Pending = tuple[Tensor, Tensor | None, Tensor, Tensor, bool]
"""Weight, bias, input, gradient of the output, whether the weight is transposed."""


class WeightGradients:
    """Weight gradients put off: collected while `deferring`, computed by `run`."""

    def __init__(self) -> None:
        self._pending: list[Pending] = []
        self._deferring = False

    @contextmanager
    def deferring(self) -> Iterator[None]:
        """Inside the block, backward leaves out the weights of the layers that use this."""
        self._deferring = True
        try:
            yield
        finally:
            self._deferring = False

    def _add(self, pending: Pending) -> None:
        if self._deferring:
            self._pending.append(pending)
        else:
            self.run([pending])

    def take(self) -> list[Pending]:
        """What was put off so far, to be handed to `run` later."""
        pending, self._pending = self._pending, []
        return pending

    @staticmethod
    def run(pending: list[Pending]) -> None:
        """Accumulate the gradients of `pending`. Hooks on the parameters fire as in backward."""
        for weight, bias, x, grad, transposed in pending:
            x, grad = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
            if weight.requires_grad:
                gradient = x.t() @ grad if transposed else grad.t() @ x
                torch.autograd.backward(weight, gradient)
            if bias is not None and bias.requires_grad:
                torch.autograd.backward(bias, grad.sum(0))


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    transposed: bool = False,
    weight_gradients: WeightGradients | None = None,
) -> Tensor:
    """`x` [..., in] times `weight` [out, in] (if `transposed`, [in, out]), plus `bias` [out]."""
    if weight_gradients is not None and x.requires_grad and torch.is_grad_enabled():
        y: Tensor = _Halved.apply(x, (weight, bias), transposed, weight_gradients)  # type: ignore[no-untyped-call]
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


class _Halved(torch.autograd.Function):
    """A linear layer whose parameters are no part of the graph.

    As part of it they would be visited by every backward, and their hooks would fire for a
    gradient that has not come.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, parameters: Parameters, transposed: bool, queue: WeightGradients
    ) -> Tensor:
        weight, bias = parameters
        ctx.save_for_backward(x)
        ctx.parameters, ctx.transposed, ctx.queue = parameters, transposed, queue
        return F.linear(x, weight.t() if transposed else weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        weight, bias = ctx.parameters
        dx = grad @ (weight.t() if ctx.transposed else weight)
        ctx.queue._add((weight, bias, x, grad, ctx.transposed))
        return dx, None, None, None
