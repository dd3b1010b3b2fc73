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


def scaled_errors() -> dict[str, float]:
    """Of matmuls of 8-bit floats by the kernel, as parts of the largest entry; rows behind the last
    group are zero."""
    from hocket.runtime.triton.grouped_gemm import _scaled_by_triton
    from hocket.runtime.triton.quantize_rows import quantized_by_torch

    found = {}
    for case in CASES:
        outer, inner = 16 * -(-case.outer // 16), 16 * -(-case.inner // 16)
        generator = torch.Generator().manual_seed(3)
        groups = max(len(case.sizes), 1)
        rows = sum(case.sizes) + case.rest
        x = torch.randn(rows, inner, generator=generator) * torch.logspace(-3, 3, rows)[:, None]
        weight = torch.randn(groups * outer, inner, generator=generator)
        (few, x_scale), (own, scale) = quantized_by_torch(x), quantized_by_torch(weight)
        own, scale = own.view(groups, outer, inner), scale.view(groups, outer)
        ends = torch.tensor(case.sizes or (0,)).cumsum(0).int()
        out = _scaled_by_triton(few, own.transpose(1, 2), x_scale.view(-1), scale, ends)
        exact = (own.double() * scale[..., None]).transpose(1, 2)
        wanted = by_loop(few.double() * x_scale, exact, case.sizes or (0,))
        of_row = wanted.abs().amax(-1, keepdim=True).clamp(min=1e-9) if rows else wanted
        found[case.name] = float(((out.double() - wanted) / of_row).abs().max()) if rows else 0.0
    return found
