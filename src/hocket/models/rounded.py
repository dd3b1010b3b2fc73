"""RoundedProducts, RoundedCache: plain transformers whose matmuls multiply what 8-bit floats hold.

    W  [.., out, in]   each row rounded to e4m3 by its own largest entry / 448, once
    x  [.., T, in]     each row likewise, whenever some code of the model multiplies it by such a W
    y = x W'           of the rounded values, in the dtype of the model

By the definition of the format, and by no kernel: it is the reference of answers that are computed
in 8 bits. Matmuls are found below the model's code, by the storage of what is multiplied, so that
every family's own forward is executed, experts included.

A cache in 8 bits rounds keys and values, with the scale 1, where transformers' own takes them in.

Legend: T rows, `in` and `out` the sides of a weight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

LARGEST, LOWEST_EXPONENT, FRACTION_BITS = 448.0, -6, 3
"""Of e4m3 (Micikevicius et al. 2022, FP8 formats for deep learning, table 1)."""

SMALLEST = 1e-12
"""The largest entry of a row counts as no less."""

Columns = Sequence[Sequence[int]]
"""Of a weight's `in`: those of each tensor rank, whose rows have a scale of their own; empty: all
of them have one."""

_ATEN: Any = torch.ops.aten
_FACTORS = {_ATEN.mm: 0, _ATEN.bmm: 0, _ATEN.addmm: 1, _ATEN.baddbmm: 1}
"""Operators of torch that multiply matrices, and the place of the first."""


def e4m3(values: Tensor) -> Tensor:
    """The nearest numbers of e4m3, fp64: four significant bits, exponents from -6, ties to even,
    the largest at its bounds."""
    scaled = values.double().clamp(-LARGEST, LARGEST)
    exponent = scaled.abs().clamp(min=2.0**-30).log2().floor().clamp(min=LOWEST_EXPONENT)
    unit = 2.0 ** (exponent - FRACTION_BITS)
    return (scaled / unit).round() * unit


def rounded_to_e4m3(values: Tensor) -> Tensor:
    """[..., K], each row rounded by its own largest entry; fp64. Scales are found
    and divided by in fp32, as the format's users do."""
    scale = values.float().abs().amax(-1, keepdim=True).clamp(min=SMALLEST) / LARGEST
    return e4m3(values.float() / scale) * scale


class RoundedProducts(TorchDispatchMode):  # type: ignore[misc, no-untyped-call]
    """Inside this context the matmuls by some parameters of a model are those of 8-bit floats.

    Args:
        model: its parameters are rounded here, in place.
        columns: of each parameter that is, by name.

    Attributes:
        noise: what is added to an entry before it is rounded is drawn up to this part of the
            largest entry of its row. 0: nothing.
        missing: names of parameters that have not been multiplied by.
    """

    def __init__(self, model: nn.Module, columns: Mapping[str, Columns]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.noise = 0.0
        self.missing = set(columns)
        self._generator = torch.Generator()
        self._known: dict[int, tuple[str, list[Tensor]]] = {}
        for name, each in columns.items():
            parent, _, own = name.rpartition(".")
            module: Any = model.get_submodule(parent)
            weight = module._parameters[own]
            turned = type(module).__name__ == "Conv1D" or getattr(module, "is_transposed", False)
            rows = weight.data.transpose(-1, -2) if turned else weight.data
            ranks = [torch.tensor(one) for one in each]
            rows.copy_(_by_rank(rows, ranks))
            self._known[_storage(weight)] = name, ranks

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = _FACTORS.get(func.overloadpacket)
        if first is not None:
            args = list(args)
            args[first], args[first + 1] = self._factors(args[first], args[first + 1])
        return func(*args, **(kwargs or {}))

    def _factors(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        known = self._known.get(_storage(right))
        if known is not None:
            return self._rounded(left, *known), right
        known = self._known.get(_storage(left))
        if known is not None:
            return left, self._rounded(right.transpose(-1, -2), *known).transpose(-1, -2)
        return left, right

    def _rounded(self, x: Tensor, name: str, ranks: list[Tensor]) -> Tensor:
        self.missing.discard(name)
        return _by_rank(self.disturbed(x), ranks)

    def disturbed(self, x: Tensor) -> Tensor:
        """With noise, if there is any."""
        if not self.noise:
            return x
        drawn = torch.rand(x.shape, generator=self._generator, dtype=x.dtype) * 2 - 1
        return x + self.noise * drawn * x.abs().amax(-1, keepdim=True)


class RoundedCache(transformers.DynamicCache):
    """transformers' cache of one sequence, whose keys and values are those of e4m3.

    Args:
        config: of the model. products: whose noise is added to them.
    """

    def __init__(self, config: Any, products: RoundedProducts) -> None:
        super().__init__(config=config)
        self._products = products

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **others: Any
    ) -> tuple[Tensor, Tensor]:
        key, value = (
            e4m3(self._products.disturbed(x)).to(x.dtype) for x in (key_states, value_states)
        )
        return super().update(key, value, *args, **others)


def _by_rank(x: Tensor, ranks: list[Tensor]) -> Tensor:
    if not ranks:
        return rounded_to_e4m3(x).to(x.dtype)
    found = x.clone()
    for columns in ranks:
        found[..., columns] = rounded_to_e4m3(x[..., columns]).to(x.dtype)
    return found


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
