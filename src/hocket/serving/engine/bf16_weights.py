"""Half: weights in bfloat16 under a computation in fp32, on a CPU.

    weights of linear layers, embeddings    bfloat16, as the files have them: half the bytes to read
    norms, biases, what lies between        fp32
    keys and values, sums over ranks        fp32

A CPU computes in fp32 what lies between products, whatever it is given; in bfloat16 it would round
each result, and none of the kernels is for that. Products read weights once more than they compute,
so it is their bytes that count. A model with matrices of another kind (experts, convolutions) stays
whole in bfloat16, and is PyTorch's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hocket.runtime.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from hocket.serving.engine.fused import swap
from hocket.serving.engine.gemm_select import ChosenLinear, SelectedGemm, Turned
from hocket.serving.engine.projections import MergedLinear

_SPLIT = (ColumnParallelLinear, RowParallelLinear)


class WidenedEmbedding(nn.Module):
    """An embedding (by class swap) whose rows are looked up in bfloat16 and handed on in fp32."""

    def forward(self, *args: Any, **others: Any) -> Tensor:
        return super().forward(*args, **others).float()  # type: ignore[no-any-return]


def can_be_half(module: nn.Module) -> bool:
    """Whether a module's values are in bfloat16, all matrices of them in linear layers and
    embeddings."""
    held = {id(child.weight) for child in module.modules() if _matrix(child)}
    floats = [p for p in module.parameters() if p.is_floating_point()]
    if not any(p.dtype == torch.bfloat16 for p in floats):
        return False
    return all(p.dim() < 2 or (id(p) in held and p.dtype == torch.bfloat16) for p in floats)


def compute_in_fp32(module: nn.Module) -> None:
    """Let a module of which `can_be_half` is true compute in fp32, in place.

    Call after its projections have been merged, and `multiply_by_halves` with it; its input is in
    fp32 from then on.
    """
    held = {id(child.weight) for child in module.modules() if _matrix(child)}
    merged: dict[int, Any] = {}
    child: Any
    for child in list(module.modules()):
        for parameter in child._parameters.values():
            if (
                parameter is not None
                and parameter.is_floating_point()
                and id(parameter) not in held
            ):
                parameter.data = parameter.data.float()
        for name, buffer in child._buffers.items():
            if buffer is not None and buffer.dtype == torch.bfloat16:
                child._buffers[name] = buffer.float()
        if isinstance(child, nn.Embedding) and not isinstance(child, WidenedEmbedding):
            swap(child, WidenedEmbedding)
        if isinstance(child, MergedLinear):
            merged[id(child.merged)] = child.merged
    for one in merged.values():
        if one.bias is not None:
            one.bias = one.bias.float()
    multiply_by_halves(module)


def multiply_by_halves(module: nn.Module) -> None:
    """Let linear layers that do not yet take an input in fp32 take one, in place."""
    for child in module.modules():
        one: Any = child
        if isinstance(child, MergedLinear):
            if not isinstance(one.merged.product, SelectedGemm):
                one.merged.product = SelectedGemm(one.merged.weight)
        elif isinstance(child, _SPLIT):
            if child.product is None:
                child.product = Turned(SelectedGemm(child.weight.data))
        elif type(child) is nn.Linear:
            child.__class__ = ChosenLinear
            one.held = SelectedGemm(child.weight.data)


def _matrix(child: Any) -> bool:
    if isinstance(child, _SPLIT):
        return not child.transposed
    return type(child) is nn.Linear or isinstance(child, nn.Embedding | MergedLinear)
