"""Grouped matmuls by the kernels, and by a plain loop over groups in fp64."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-9}
"""Largest difference as a part of the largest entry; the interpreter truncates to 16 bits."""


@dataclasses.dataclass(frozen=True)
class Case:
    """Groups of `sizes` rows and `rest` more; `transposed`: weights stored [E, N, K]."""

    name: str
    sizes: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    rest: int = 0
    inner: int = 40
    outer: int = 72
    transposed: bool = False


CASES = (
    Case("plain", (5, 0, 70, 1)),
    Case("no rows in front", (0, 0, 3), rest=4),
    Case("none at all", (0, 0), rest=5),
    Case("no rows", ()),
    Case("one group", (37,), inner=16, outer=16),
    Case("tiles", (130, 64, 128, 66), transposed=True),
    Case("wide", (3, 4, 2), inner=8, outer=300),
    Case("bf16", (20, 0, 150), torch.bfloat16, rest=2, transposed=True),
    Case("bf16 decode", (1, 1, 0, 2), torch.bfloat16),
    Case("fp16", (300, 1, 9), torch.float16, outer=136),
)


def by_loop(x: Tensor, weight: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """The definition: [S, K] by [E, K, N], rows behind the last group zero."""
    parts = x.split([*sizes, x.shape[0] - sum(sizes)])
    found = [part @ matrix for part, matrix in zip(parts, weight, strict=False)]
    return torch.cat([*found, parts[-1].new_zeros(len(parts[-1]), weight.shape[2])])


def errors_of(name: str, device: str = "cpu", moved: int = 0) -> dict[str, float]:
    """Errors of the result and both gradients, as parts of the largest entry.

    Args:
        name: of the case.
        moved: rows that the first offset is wrong by: a proof that errors are seen.
    """
    from hocket.runtime.triton.grouped_gemm import grouped_mm

    case = next(case for case in CASES if case.name == name)
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, case.dtype)

    rows = sum(case.sizes) + case.rest
    x = draw(rows, case.inner)
    stored = (case.outer, case.inner) if case.transposed else (case.inner, case.outer)
    weight = draw(max(len(case.sizes), 1), *stored)
    sizes = case.sizes or (0,)
    gradient = draw(rows, 1).expand(rows, case.outer)  # a view without memory of its own
    results: list[Any] = []
    for ours in (True, False):
        kind = case.dtype if ours else torch.float64
        given = [t.to(kind).requires_grad_() for t in (x.clone(), weight.clone())]
        matrices = given[1].transpose(1, 2) if case.transposed else given[1]
        if ours:
            offsets = torch.tensor(sizes, device=device).cumsum(0).int()
            offsets[0] += moved
            out = grouped_mm(given[0], matrices, offsets)
        else:
            out = by_loop(given[0], matrices, sizes)
        out.backward(gradient.to(kind))
        results.append([out, *(t.grad for t in given)])
        assert not ours or given[1].grad.stride() == weight.stride()  # type: ignore[union-attr]
    found, wanted = results
    return {
        name: float((a.double() - b).abs().max() / max(float(b.abs().max()), 1e-9))
        if b.numel()
        else 0.0
        for name, a, b in zip(("out", "x", "weight"), found, wanted, strict=True)
    }


def all_errors() -> dict[str, dict[str, float]]:
    """Of every case."""
    return {case.name: errors_of(case.name) for case in CASES}


def frozen_weight() -> tuple[bool, bool]:
    """Whether x and a frozen weight get a gradient."""
    from hocket.runtime.triton.grouped_gemm import grouped_mm

    x, weight = torch.randn(6, 16, requires_grad=True), torch.randn(2, 16, 16)
    grouped_mm(x, weight, torch.tensor([2, 6], dtype=torch.int32)).sum().backward()
    return x.grad is not None, weight.grad is not None
