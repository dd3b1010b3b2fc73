"""Merged projections: query, key and value in one product, gate and up in another.

The attention modules call their projections one after the other, with the same input. Each of them
becomes a facade before one merged weight: the first that is called computes the product for all,
the others take their columns of it.

    q_proj(x)  ->  x [q_proj | k_proj | v_proj]  ->  columns of q
    k_proj(x)  ->                                    columns of k
    v_proj(x)  ->                                    columns of v, and the output is freed

Names stay; each module's own weight becomes a view of the merged one, so that nothing is held
twice. Column-parallel layers are merged likewise: every rank merges what it holds. Projections that
a family has fused itself, and ones whose weights are transposed or tied, are left alone.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hocket.runtime.fp8_weights import product_of
from hocket.runtime.linear import DeferrableLinear
from hocket.runtime.tensor_parallel.layers import ColumnParallelLinear

_SIBLINGS = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
)
"""Names of modules that families feed the same tensor."""
_LINE = 64
"""Bytes that the core's cache holds together."""
_LONG = 16
"""Lines from which a row of a stored weight is long: one more hardly costs memory."""


class Merged:
    """One weight in place of several.

    Attributes:
        weight: [sum of outputs, in].
        bias: [sum of outputs], or None.
        sizes: outputs of each part.
        wasted: products that were made for one part alone, since another was fed another tensor.
    """

    def __init__(self, parts: list[nn.Linear]) -> None:
        weights = [part.weight.data for part in parts]
        self.sizes = [int(weight.shape[0]) for weight in weights]
        self.weight = torch.cat(weights)
        self.few_bits = product_of(parts)
        self.bias: Tensor | None = None
        found = next((part.bias.data for part in parts if part.bias is not None), None)
        if found is not None:
            self.bias = torch.cat(
                [
                    found.new_zeros(weight.shape[0]) if part.bias is None else part.bias.data
                    for part, weight in zip(parts, weights, strict=True)
                ]
            )
        self.wasted = 0
        self._source: Tensor | None = None
        self._columns: list[Tensor | None] = []
        self._left = 0

    def lay_inputs_first(self) -> Tensor:
        """Store the weight as [in, out]; its shape stays."""
        if self.weight.dtype == torch.float32:
            self.weight = inputs_first(self.weight)
        return self.weight

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """`x` [..., in] times the merged weight, plus `bias`."""
        if self.few_bits is not None:
            y = self.few_bits(x, self.weight.t())
            return y if bias is None else y + bias
        return F.linear(x, self.weight, bias)

    def columns(self, part: int, x: Tensor) -> Tensor:
        """What projection number `part` makes of `x`: a view of the merged product."""
        if self._source is not x or self._columns[part] is None:
            if self._left:
                self.wasted += 1
            self._source = x
            y = self.product(x, self.bias)
            self._columns = list(y.split(self.sizes, dim=-1))  # type: ignore[no-untyped-call]
            self._left = len(self.sizes)
        found = self._columns[part]
        assert found is not None
        self._columns[part] = None
        self._left -= 1
        if not self._left:
            self._source = None
        return found


class MergedLinear(nn.Linear):
    """A projection (by class swap) that takes its columns of a merged product."""

    merged: Merged
    part: int

    def forward(self, input: Tensor) -> Tensor:
        return self.merged.columns(self.part, input)


def merge_projections(module: nn.Module) -> list[tuple[Merged, list[nn.Linear]]]:
    """Merge what can be merged in a module that holds its values, in place, for inference.

    Returns:
        Every merged weight with the modules that stand before it, for `unmerge_wasted`.
    """
    uses = _uses(module)
    found: list[tuple[Merged, list[nn.Linear]]] = []
    for parent in module.modules():
        for names in _SIBLINGS:
            parts: list[Any] = [getattr(parent, name, None) for name in names]
            if not _same_form(parts) or any(uses[id(part.weight)] > 1 for part in parts):
                continue
            merged = Merged(parts)
            begin = 0
            for index, part in enumerate(parts):
                end = begin + merged.sizes[index]
                part.weight = nn.Parameter(merged.weight[begin:end], requires_grad=False)
                if part.bias is not None:
                    assert merged.bias is not None
                    part.bias = nn.Parameter(merged.bias[begin:end], requires_grad=False)
                begin = end
                part.unmerged = type(part)
                part.__class__ = MergedLinear
                part.merged, part.part = merged, index
            found.append((merged, parts))
    return found


def lay_inputs_first(module: nn.Module) -> int:
    """Store the weights of linear layers as [in, out] on CPU in fp32, in place; shapes stay.

    Weights are read from memory once a step, and by a product of few rows faster that way: the
    library needs no rearranged copy of them first. A weight that is an embedding too keeps its
    rows together, since tokens are looked up by rows.

    Returns:
        How many weights were rearranged.
    """
    shared = _uses(module)
    done: dict[int, Tensor] = {}
    child: Any
    for child in module.modules():
        if isinstance(child, MergedLinear) and id(child.merged) not in done:
            done[id(child.merged)] = child.merged.lay_inputs_first()
    for child in module.modules():
        if isinstance(child, MergedLinear):
            merged = child.merged
            begin = sum(merged.sizes[: child.part])
            child.weight.data = merged.weight[begin : begin + merged.sizes[child.part]]
        elif (
            isinstance(child, nn.Linear)
            and shared[id(child.weight)] == 1
            and not getattr(child, "transposed", False)
            and child.weight.dtype == torch.float32
        ):
            child.weight.data = inputs_first(child.weight.data)
            done[id(child)] = child.weight
    return len(done)


def inputs_first(weight: Tensor) -> Tensor:
    """A copy of `weight` [out, in], stored as [in, out]; its shape stays.

    Long rows begin a line of the core's cache and are an odd number of lines apart, so that 64 that
    follow each other begin at 64 different places of a page. Those that begin at the same ones meet
    in the same few lines of the cache: of 4096 outputs in fp32, a product of 64 rows took 1.67
    times as long as with rows a line further apart, one of 256 rows 1.06 times; of 768 and 1280
    outputs, which begin at four places, one of 32 rows by the kernel took 1.06 times as long.
    """
    outputs, inputs = weight.shape
    line = _LINE // weight.element_size()
    lines = -(-outputs // line)
    apart = outputs if lines < _LONG else (lines | 1) * line
    stored = weight.new_empty(inputs, apart)[:, :outputs]
    stored.copy_(weight.t())
    return stored.t()


def _uses(module: nn.Module) -> dict[int, int]:
    uses: dict[int, int] = {}
    for parent in module.modules():
        for parameter in parent._parameters.values():
            if parameter is not None:
                uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    return uses


def unmerge_wasted(merges: list[tuple[Merged, list[nn.Linear]]]) -> int:
    """Undo merges whose parts turned out, in a forward, to be fed different tensors.

    Returns:
        How many stay merged.
    """
    kept = 0
    for merged, parts in merges:
        part: Any
        if merged.wasted or merged._left:
            for part in parts:
                part.__class__ = part.unmerged
                del part.merged, part.part, part.unmerged
        else:
            kept += 1
    return kept


def in_8_bits(part: Any) -> bool:
    """Whether a linear layer's weight is stored in 8-bit floats."""
    return isinstance(part, DeferrableLinear | ColumnParallelLinear) and (
        product_of([part]) is not None
    )


def _same_form(parts: list[Any]) -> bool:
    """Whether all are linear layers of one kind that take the same input and need no message."""
    first = parts[0]
    for part in parts:
        if type(part) is ColumnParallelLinear:
            if part.gather is not None or part.transposed:
                return False
        elif type(part) is not nn.Linear and not in_8_bits(part):
            return False
        if part._forward_pre_hooks or part._forward_hooks:
            return False
        same = (
            type(part) is type(first)
            and part.weight.dtype == first.weight.dtype
            and in_8_bits(part) == in_8_bits(first)
            and part.weight.shape[1] == first.weight.shape[1]
        )
        if not same:
            return False
    return True
