"""Packed weights: a second copy of each matrix, laid out as oneDNN multiplies few rows by it.

A step of decoding multiplies as many rows as requests run. With 4 to 64 rows the library for whole
matrices leaves half of some cores unused; oneDNN has kernels for them, which want the weights in
blocks of their own. With one or two rows what its call costs by itself is more than it saves, and
with many rows each new number of them would be prepared anew: both take the weight as it was.
On other processors the library for whole matrices is the faster one. So both are timed once:

    rows            1     4     8    16    32    64
    as it is       1.1   2.3   2.9   4.3   5.9   8.1     ms, 5.0M weights in fp32, one thread of
    packed         1.5   1.4   2.1   2.6   4.0   7.0     an AMD EPYC
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hocket.serving.engine.projections import Merged, MergedLinear

MOST_BYTES = 256 << 20
"""Of the second copies on a rank; larger models do without any."""
LEAST_ROWS, MOST_ROWS = 3, 64
GAIN = 1.05
"""Times as fast as the weights as they are: what makes copies worth their memory."""
_TRIED_ROWS, _TRIALS = 16, 5


class PackedWeight:
    """A weight [out, in] twice: as it is, and packed."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """`x` [..., in] times the weight, plus `bias`: [..., out]."""
        if LEAST_ROWS <= x.numel() // self.weight.shape[1] <= MOST_ROWS:
            y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, bias, "none", [], "")
            return y
        return F.linear(x, self.weight, bias)


class PackedLinear(nn.Linear):
    """A linear layer (by class swap) with a packed weight."""

    held: PackedWeight

    def forward(self, input: Tensor) -> Tensor:
        return self.held.product(input, self.bias)


def pack(module: nn.Module, *, tried: bool = True) -> int:
    """Pack the weights of a module's linear layers, in place, on a CPU in fp32.

    Layers that are split over tensor ranks are left alone.

    Call after the weights have been laid out and merged for good; what they are is not changed.

    Args:
        tried: only if that was faster, here and now, than the weights as they are.

    Returns:
        Bytes of the copies; 0 where there are none: too large, not faster, or no library for them.
    """
    found: list[tuple[Any, Tensor]] = []
    merged: set[int] = set()
    child: Any
    for child in module.modules():
        if isinstance(child, MergedLinear):
            if id(child.merged) not in merged:
                merged.add(id(child.merged))
                found.append((child.merged, child.merged.weight))
        elif type(child) is nn.Linear:
            found.append((child, child.weight))
    found = [(one, weight) for one, weight in found if weight.dtype == torch.float32]
    size = sum(weight.numel() * weight.element_size() for _, weight in found)
    there: Any = torch.backends.mkldnn
    if size > MOST_BYTES or not there.is_available():
        return 0
    copies = [PackedWeight(weight) for _, weight in found]
    if tried and not _faster(copies):
        return 0
    for (one, _), held in zip(found, copies, strict=True):
        if isinstance(one, Merged):
            one.product = held.product  # type: ignore[method-assign]
        else:
            one.__class__ = PackedLinear
            one.held = held
    return size


@torch.inference_mode()
def _faster(copies: list[PackedWeight]) -> bool:
    """Whether products of a few rows by all of the weights take less time with their copies."""
    inputs = [torch.zeros(_TRIED_ROWS, held.weight.shape[1]) for held in copies]
    best = [float("inf"), float("inf")]
    for _ in range(_TRIALS):  # in turns: whatever disturbs one disturbs the other
        for way in (0, 1):
            began = time.perf_counter()
            for held, x in zip(copies, inputs, strict=True):
                if way:
                    held.product(x, None)
                else:
                    F.linear(x, held.weight)
            best[way] = min(best[way], time.perf_counter() - began)
    return best[0] >= GAIN * best[1]
