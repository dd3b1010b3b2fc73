"""Experts, below transformers' implementation of them: their matmuls, and choices to skip.

transformers computes experts by `torch.nn.functional.grouped_mm` (its implementation `grouped_mm`,
the default), for every family in one place. This puts another grouped matmul there for the weights
that it takes; all others go transformers' own way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

GroupedMatmul = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Rows [S, K] sorted by expert, weights [E, K, N] and the end of each expert's rows [E] int32, to
[S, N]."""


def replace_grouped_mm(ours: GroupedMatmul, takes: Callable[[Tensor], bool]) -> None:
    """Multiply experts by `ours`, once in a process.

    Args:
        ours: the matmul. takes: whether it multiplies by a weight.
    """
    from transformers.integrations import moe

    module: Any = moe
    given: GroupedMatmul = module._grouped_mm
    if hasattr(given, "hocket"):
        return

    def _grouped_mm(input: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
        product = getattr(weight, "grouped_product", None)  # of weights in few bits
        if product is not None:
            return product(input, offs)  # type: ignore[no-any-return]
        if takes(weight):
            return ours(input.to(weight.dtype), weight, offs)
        return given(input, weight, offs)

    _grouped_mm.hocket = True  # type: ignore[attr-defined]
    module._grouped_mm = _grouped_mm


def loop_in_fp64(model: nn.Module, dtype: torch.dtype) -> None:
    """Compute a model's experts one by one in fp64: torch's grouped GEMM has none."""
    own: Any = model
    if dtype == torch.float64 and own._can_set_experts_implementation():
        own.set_experts_implementation("eager")


def skip_absent(experts: nn.Module) -> str:
    """Have the forward of stacked experts skip choices of `num_experts`, as those of other ranks.

    Returns:
        Why it cannot; empty: it does.
    """
    own: Any = experts
    if not hasattr(own, "_is_expert_parallel"):
        return "the model's own code computes its experts"
    name = own.config._experts_implementation
    if name not in ("grouped_mm", "batched_mm"):
        return f"experts are computed by {name!r}"
    own._is_expert_parallel = True
    return ""
