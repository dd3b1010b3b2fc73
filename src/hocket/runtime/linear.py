"""Linear: the one function all parallel linear layers go through.

Its backward can be halved, so that a schedule may run the input's gradient (I) at once, because
the stage before waits for it, and the weight's gradient (W) where there would be a bubble (zero
bubble pipeline parallelism, Qi et al. 2023). Where nothing is deferred it is `F.linear` and costs
nothing more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CONV1D = "Conv1D"
"""What transformers calls GPT-2's linear layers."""

Parameters = tuple[Tensor, Tensor | None]
Input = Tensor | Callable[[], Tensor]
"""The input of a product, or what makes it again."""

Pending = tuple[Tensor, Tensor | None, Input, Tensor, bool]
"""Weight, bias, input, gradient of the output, whether the weight is transposed."""


class Again(Protocol):
    """Makes the input of products again from the part of it that was kept."""

    def promise(self) -> None:
        """One more product will ask, once in its backward."""

    def begin(self, part: Tensor, /) -> None:
        """Begin to make it, concurrently with what is computed meanwhile."""

    def __call__(self, part: Tensor, /) -> Tensor:
        """The whole input."""


Kept = tuple[Tensor, Again]
"""The part of an input that is kept for backward, and what makes the input of it."""


class WeightGradients:
    """Deferred weight gradients: collected while `deferring`, computed by `run`."""

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
        """What was deferred so far, to be handed to `run` later."""
        pending, self._pending = self._pending, []
        return pending

    @staticmethod
    @torch.no_grad()
    def run(pending: list[Pending]) -> None:
        """Accumulate the gradients of `pending`, and empty it: what one was computed from is freed
        before the next. Hooks on the parameters fire as in backward."""
        pending.reverse()
        while pending:
            weight, bias, source, grad, transposed = pending.pop()
            grad = grad.reshape(-1, grad.shape[-1])
            if weight.requires_grad:
                x = source if isinstance(source, Tensor) else source()
                _accumulate(weight, weight_gradient(x, grad, transposed))
                del x
            if bias is not None and bias.requires_grad:
                _accumulate(bias, grad.sum(0))


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    transposed: bool = False,
    weight_gradients: WeightGradients | None = None,
    kept: Kept | None = None,
    product: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> Tensor:
    """`x` [..., in] times `weight` [out, in] (if `transposed`, [in, out]), plus `bias` [out].

    `kept` says what to keep of `x` for the weight's gradient, where that is not `x` itself.
    `product` multiplies `x` with the weight as [in, out] in another way, which keeps `x`; None: as
    torch does.
    """
    y: Tensor
    if product is not None:
        halved = weight_gradients is not None and weight.requires_grad
        assert not halved, "its backward cannot be halved"
        y = product(x, weight if transposed else weight.t())
        return y if bias is None else y + bias.to(y.dtype)
    if torch.is_grad_enabled():
        trained = weight.requires_grad or (bias is not None and bias.requires_grad)
        if weight_gradients is not None and trained and x.requires_grad:
            y = _Halved.apply(x, (weight, bias), transposed, weight_gradients, kept)  # type: ignore[no-untyped-call]
            return y
        if kept is not None and weight.requires_grad:
            y = _KeptInPart.apply(x, weight, bias, transposed, *kept)  # type: ignore[no-untyped-call]
            return y
    return F.linear(x, weight.t() if transposed else weight, bias)


def weight_gradient(x: Tensor, grad: Tensor, transposed: bool) -> Tensor:
    """Of input [..., in] and the output's gradient [N, out]."""
    x = x.reshape(-1, x.shape[-1])
    return x.t() @ grad if transposed else grad.t() @ x


def _accumulate(parameter: Tensor, gradient: Tensor) -> None:
    """Add to a parameter's gradient as a backward does; its values may be elsewhere (ZeRO-3).

    Not by `torch.autograd.backward(parameter, gradient)`, which widens the gradient, and then
    copies it because its caller refers to it: two more tensors of the size of the weight.
    """
    with torch._C.DisableTorchFunctionSubclass():  # which would ask after them
        if parameter.grad is None:
            parameter.grad = gradient.to(parameter.grad_dtype or parameter.dtype)
        else:
            parameter.grad.add_(gradient)
        del gradient  # before a hook copies it into a bucket
        hooks = parameter._post_accumulate_grad_hooks  # type: ignore[attr-defined]
        for hook in list((hooks or {}).values()):
            hook(parameter)


class DeferrableLinear(nn.Linear):
    """A linear layer (by class swap) whose weight gradient can be deferred, or whose product is
    another."""

    weight_gradients: WeightGradients | None = None
    product: Callable[[Tensor, Tensor], Tensor] | None = None

    def forward(self, input: Tensor) -> Tensor:
        return linear(
            input,
            self.weight,
            self.bias,
            weight_gradients=self.weight_gradients,
            product=self.product,
        )


class DeferrableConv1D(nn.Module):
    """As `DeferrableLinear`, of GPT-2's linear layers, which keep their weight as [in, out]."""

    weight: Tensor
    bias: Tensor
    weight_gradients: WeightGradients | None = None
    product: Callable[[Tensor, Tensor], Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        return linear(
            x,
            self.weight,
            self.bias,
            transposed=True,
            weight_gradients=self.weight_gradients,
            product=self.product,
        )


_TRANSPOSED: dict[type[nn.Module], type[nn.Module]] = {}


def deferrable(kind: type[nn.Module]) -> type[nn.Module]:
    """The class that a plain linear layer of this one changes to; of other modules its own."""
    if kind is nn.Linear:
        return DeferrableLinear
    if kind.__name__ == CONV1D and not issubclass(kind, DeferrableConv1D):
        if kind not in _TRANSPOSED:
            _TRANSPOSED[kind] = type(CONV1D, (DeferrableConv1D, kind), {})
        return _TRANSPOSED[kind]
    return kind


def is_transposed(layer: nn.Module) -> bool:
    """Whether a linear layer keeps its weight as [in, out]."""
    if isinstance(layer, nn.Linear):
        return bool(getattr(layer, "transposed", False))
    return issubclass(deferrable(type(layer)), DeferrableConv1D)


def block_linears(module: nn.Module, blocks: str) -> Iterator[tuple[str, Any]]:
    """The linear layers below `blocks` that have a weight of their own, by name; while they are
    walked through they may be changed."""
    for name, child in list(module.get_submodule(blocks).named_modules(prefix=blocks)):
        known = isinstance(child, nn.Linear) or is_transposed(child)
        if known and child._parameters.get("weight") is not None:
            yield name, child


def defer_weight_gradients(module: nn.Module, weight_gradients: WeightGradients) -> None:
    """Let every linear layer of `module` use `weight_gradients`; plain ones change their class."""
    child: Any
    for child in module.modules():
        child.__class__ = deferrable(type(child))
        if hasattr(type(child), "weight_gradients"):
            child.weight_gradients = weight_gradients


class _Halved(torch.autograd.Function):
    """A linear layer whose parameters are no part of the graph.

    As part of it they would be visited by every backward, and their hooks would fire for a
    gradient that has not come.
    """

    @staticmethod
    def forward(  # type: ignore[override]  # noqa: PLR0917 (autograd passes by position)
        ctx: Any,
        x: Tensor,
        parameters: Parameters,
        transposed: bool,
        queue: WeightGradients,
        kept: Kept | None,
    ) -> Tensor:
        weight, bias = parameters
        part, again = (x, None) if kept is None else kept
        if again is not None and weight.requires_grad:
            again.promise()
        ctx.save_for_backward(part)
        ctx.parameters, ctx.transposed, ctx.queue, ctx.again = parameters, transposed, queue, again
        return F.linear(x, weight.t() if transposed else weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        # Detached: until W, what is saved would refer to the graph behind it and so to the input of
        # the stage; the logits' gradient, a view of the logits, as well.
        part = ctx.saved_tensors[0].detach()
        weight, bias = ctx.parameters
        dx = grad @ (weight.t() if ctx.transposed else weight)
        source = part if ctx.again is None else partial(ctx.again, part)
        ctx.queue._add((weight, bias, source, grad.detach(), ctx.transposed))
        return dx, None, None, None, None


class _KeptInPart(torch.autograd.Function):
    """A linear layer whose input is made again in backward from the part of it that was kept."""

    @staticmethod
    def forward(  # type: ignore[override]  # noqa: PLR0917 (autograd passes by position)
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        transposed: bool,
        part: Tensor,
        again: Again,
    ) -> Tensor:
        again.promise()
        ctx.save_for_backward(part, weight)
        ctx.transposed, ctx.again = transposed, again
        return F.linear(x, weight.t() if transposed else weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        part, weight = ctx.saved_tensors
        dx = db = None
        if part.is_cuda:
            ctx.again.begin(part)
        if ctx.needs_input_grad[0]:
            dx = grad @ (weight.t() if ctx.transposed else weight)
        flat = grad.reshape(-1, grad.shape[-1])
        dw = weight_gradient(ctx.again(part), flat, ctx.transposed)
        if ctx.needs_input_grad[2]:
            db = flat.sum(0)
        return dx, dw, db, None, None, None
