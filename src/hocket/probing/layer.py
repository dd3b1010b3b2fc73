"""Layer: what a decoder layer's code calls between its products, written out operation by
operation: norms, rotary positions, gated activation, residuals.

A forward's operations write where nothing was written for long, a backward's where memory of the
forward has just become free, and a product between two of them takes the nearest cache for itself.
Alone, one after another, such operations take about half the time.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hocket.probing.kernels import Make

HEAD = 32
"""Elements of a head, where keys are no narrower."""

Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True)
class LayerPiece:
    """One timed part of a layer, from its inputs on a graph of its own."""

    inputs: tuple[Tensor, ...]
    result: Tensor


class Layer:
    """A decoder layer of [T, H]: what its code calls between its products is timed. The products
    are not, but leave in the caches what a step's leave there.

    The feed-forward is three times as wide, keys are half as wide.

    Args:
        shape: T and H. make: tensors, of `dtype`.
        reads: the clock. settle: waits until what was called has run (CUDA).
    """

    def __init__(
        self,
        shape: tuple[int, int],
        make: Make,
        dtype: str,
        reads: Callable[[], float],
        settle: Callable[[], None],
    ) -> None:
        tokens, width = shape
        self._reads, self._settle = reads, settle
        self._stream, self._gradient = (make(shape, dtype) for _ in range(2))
        self._norm = make((width,), dtype).requires_grad_()
        self._turns = [make((tokens, min(HEAD, width // 2)), dtype) for _ in range(2)]
        self._weights = {
            "q": make((width, width), dtype),
            "k": make((width // 2, width), dtype),
            "o": make((width, width), dtype),
            "gate": make((3 * width, width), dtype),
            "up": make((3 * width, width), dtype),
            "down": make((width, 3 * width), dtype),
        }
        self._seconds = 0.0
        self._within: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()

    def traffic(self) -> tuple[LayerTraffic, LayerTraffic]:
        """Of what is timed of a forward, and of a backward."""
        forward, backward = LayerTraffic(), LayerTraffic()
        self._within = forward
        pieces = self.forward()
        self._within = backward
        self.backward(pieces)
        self._within = contextlib.nullcontext()
        return forward, backward

    def forward(self) -> dict[str, LayerPiece]:
        """What the backward needs."""
        x, turns = self._stream, self._turns
        found = {"norm": self._piece(_norm, x, self._norm)}
        for name in ("q", "k"):
            found[name] = self._piece(_turned, self._product(found["norm"], name), *turns)
        found["sum"] = self._piece(torch.add, x, self._product(found["q"], "o"))
        found["second norm"] = self._piece(_norm, found["sum"].result, self._norm)
        found["silu"] = self._piece(F.silu, self._product(found["second norm"], "gate"))
        up = self._product(found["second norm"], "up")
        found["gated"] = self._piece(torch.mul, found["silu"].result, up)
        down = self._product(found["gated"], "down")
        found["out"] = self._piece(torch.add, found["sum"].result, down)
        return found

    def backward(self, pieces: dict[str, LayerPiece]) -> None:
        """From the end to the start, letting go of each piece, as autograd does."""
        stream, g = self._back(pieces.pop("out"), self._gradient)
        g = self._product_back(pieces["gated"], "down", g)
        g, up = self._back(pieces.pop("gated"), g)
        (g,) = self._back(pieces.pop("silu"), g)
        normed = self._product_back(pieces["second norm"], "up", up)
        self._timed(normed.add_, self._product_back(pieces["second norm"], "gate", g))
        more, _ = self._back(pieces.pop("second norm"), normed)
        stream, g = self._back(pieces.pop("sum"), self._timed(torch.add, stream, more))
        (k,) = self._back(pieces.pop("k"), g[:, : len(self._weights["k"])].contiguous())
        g = self._product_back(pieces["q"], "o", g)
        (g,) = self._back(pieces.pop("q"), g)
        normed = self._product_back(pieces["norm"], "q", g)
        self._timed(normed.add_, self._product_back(pieces["norm"], "k", k))
        more, _ = self._back(pieces.pop("norm"), normed)
        self._timed(torch.add, stream, more)

    def taken(self) -> float:
        """Seconds that were timed since the last call."""
        taken, self._seconds = self._seconds, 0.0
        return taken

    def _piece(self, call: Callable[..., Tensor], *inputs: Tensor) -> LayerPiece:
        own = tuple(
            one if any(one is turn for turn in self._turns) else one.detach().requires_grad_()
            for one in inputs
        )
        return LayerPiece(own, self._timed(call, *own))

    def _back(self, piece: LayerPiece, gradient: Tensor) -> tuple[Tensor, ...]:
        wanted = [one for one in piece.inputs if one.requires_grad]
        return self._timed(torch.autograd.grad, piece.result, wanted, gradient)

    def _timed(self, call: Callable[..., Result], *given: Any) -> Result:
        self._settle()
        start = self._reads()
        with self._within:
            result = call(*given)
        self._settle()
        self._seconds += self._reads() - start
        return result

    def _product(self, piece: LayerPiece, name: str) -> Tensor:
        return torch.mm(piece.result.detach(), self._weights[name].t())

    def _product_back(self, piece: LayerPiece, name: str, gradient: Tensor) -> Tensor:
        torch.mm(gradient.t(), piece.result.detach())
        return torch.mm(gradient, self._weights[name])


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions: halves of each head turned into each other; a view of [T, width]."""
    heads = x.view(1, len(x), -1, cos.shape[-1]).transpose(1, 2)
    first, second = heads.chunk(2, dim=-1)
    turned = heads * cos + torch.cat((-second, first), dim=-1) * sin
    return turned.transpose(1, 2).reshape(x.shape)


class LayerTraffic(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what runs within, as `models.trace.eager` counts the operations of a model.

    Attributes:
        calls: views are none. bytes: that they read and write together. made: that they write.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls = self.bytes = self.made = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given, made = _tensors((args, kwargs or {})), _tensors(result)
        known = {one.untyped_storage().data_ptr() for one in given}
        seen = all(one.untyped_storage().data_ptr() in known for one in made)
        if given and made and (func._schema.is_mutable or not seen):
            written = sum(_nbytes(one) for one in made)
            self.calls += 1
            self.made += written
            self.bytes += written + sum(_nbytes(one) for one in given)
        return result


def _nbytes(tensor: Tensor) -> int:
    """An expanded tensor has no more than what it is expanded from."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return []
    return [tensor for one in value for tensor in _tensors(one)]
