"""Serving: what a CPU rank that serves calls: products of few rows, and attention to a paged cache,
by the runtime's own kernels.

A serving step reads each weight once, and then not before the next step. Of how many bytes the
weights are together decides from where they come: cases go over so few that the core's own cache
holds them, so many as a shared cache holds, and more than that. Keys and values of a model's layers
are measured in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hocket.probing.sizes import ProbeSizes
from hocket.runtime.hugepages import in_large_pages
from hocket.runtime.native.kernels import CpuKernels

BLOCK = 16
"""Tokens of a block of the cache."""

APART = 16
"""Entries from the end of a stored row of weights to the next, as the engine stores them."""

LITTLE = 16
"""Entries of a norm that takes no longer than calling it."""

Case = Callable[[], object]
Known = dict[tuple[str, tuple[int, ...]], tuple[Case, int]]
"""By name and shape (`spec.measured.MeasuredKernel`): what to call, how many kernels it runs."""


def serving_probe_cases(sizes: ProbeSizes, kernels: CpuKernels) -> Known:
    """Everything that is measured, in fp32; `half` by weights in bf16."""
    weights = [count * inputs * (outputs + APART) for outputs, inputs, count in sizes.matrices]
    weights += [-(-count * inputs * outputs // 2) for outputs, inputs, count in sizes.halves]
    cached = [2 * layers * _entries(shape) for *shape, layers in sizes.decoding]
    pool = torch.full((max(weights + cached),), 0.01)
    in_large_pages([pool])
    found: Known = {}
    for outputs, inputs, count in sizes.matrices:
        held = _weights(pool, outputs, inputs, count)
        for rows in sizes.rows:
            x = torch.randn(rows, inputs)
            found["rows", (rows, outputs, inputs, count)] = (_products(kernels, x, held), count)
    halves = pool.view(torch.bfloat16)
    for outputs, inputs, count in sizes.halves:
        each = inputs * outputs
        weights16 = [
            halves[at : at + each].view(outputs, inputs) for at in range(0, count * each, each)
        ]
        for rows in sizes.half_rows:
            x = torch.randn(rows, inputs)
            found["half", (rows, outputs, inputs, count)] = (_halves(kernels, x, weights16), count)
    for *shape, layers in sizes.decoding:
        found["decode", (*shape, layers)] = (_decode(kernels, pool, shape, layers), layers)
    for chunk in sizes.chunks:
        found["chunk", chunk] = (_chunk(kernels, pool, chunk), 1)
    x, weight = torch.randn(1, 1, LITTLE), torch.randn(LITTLE)
    found["call", (LITTLE,)] = (lambda: kernels.rms_norm(x, weight, 0.0, 1e-6), 1)
    return found


def _weights(pool: Tensor, outputs: int, inputs: int, count: int) -> list[Tensor]:
    """Weights [inputs, outputs], one after the other in memory."""
    width = outputs + APART
    each = inputs * width
    return [
        pool[at : at + each].view(inputs, width)[:, :outputs] for at in range(0, count * each, each)
    ]


def _products(kernels: CpuKernels, x: Tensor, weights: list[Tensor]) -> Case:
    def call() -> None:
        for weight in weights:
            kernels.product(x, weight)

    return call


def _halves(kernels: CpuKernels, x: Tensor, weights: list[Tensor]) -> Case:
    def call() -> None:
        for weight in weights:
            kernels.half_product(x, weight)

    return call


def _entries(shape: Sequence[int]) -> int:
    """Of one layer's keys."""
    rows, _, kv_heads, tokens, size = shape
    return rows * -(-tokens // BLOCK) * BLOCK * kv_heads * size


def _decode(kernels: CpuKernels, pool: Tensor, shape: Sequence[int], layers: int) -> Case:
    rows, heads, kv_heads, tokens, size = shape
    each = _entries(shape)
    pools = [
        pool[at : at + each].view(-1, kv_heads, BLOCK, size)
        for at in range(0, 2 * layers * each, each)
    ]
    merged = torch.randn(rows, (heads + 2 * kv_heads) * size)
    cosine, sine = torch.rand(2, 1, rows, size)
    tables = torch.arange(rows * -(-tokens // BLOCK)).view(rows, -1)
    places = tables[:, -1] * BLOCK + (tokens - 1) % BLOCK
    lengths = torch.full((rows,), tokens)

    def call() -> None:
        for keys, values in zip(pools[::2], pools[1::2], strict=True):
            kernels.decode(
                merged, cosine, sine, keys, values, places=places, tables=tables,
                lengths=lengths, longest=tokens, group=heads // kv_heads, scaling=size**-0.5,
            )  # fmt: skip

    return call


def _chunk(kernels: CpuKernels, pool: Tensor, shape: tuple[int, int, int, int]) -> Case:
    heads, kv_heads, tokens, size = shape
    each = _entries((1, *shape))
    keys, values = (pool[at : at + each].view(-1, kv_heads, BLOCK, size) for at in (0, each))
    q = torch.randn(1, tokens, heads, size).transpose(1, 2)
    out = torch.empty(tokens, heads, size)
    table = torch.arange(len(keys))
    return lambda: kernels.attend_chunk(
        q, keys, values, table, start=0, scaling=size**-0.5, out=out
    )
