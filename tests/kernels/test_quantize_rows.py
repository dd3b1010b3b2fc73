"""Rows rounded to 8 bits in Triton: bit for bit as PyTorch rounds them, by the interpreter."""

from __future__ import annotations

import importlib.util
import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hocket.runtime.triton.quantize_rows import (  # noqa: E402
    TILE,
    quantize_rows,
    quantized_by_torch,
    quantized_by_triton,
)
from tests.kernels import interpreter  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None, reason="needs the package triton"
    ),
]

SHAPES = ((5, 64), (3, TILE.columns), (2, 2 * TILE.columns + 16), (0, 64), (1, 16))


def differences(dtype_name: str) -> list[float]:
    """For each shape the largest difference of the scales over them and of the rows; in the process
    that interprets."""
    found = []
    for seed, shape in enumerate(SHAPES):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(shape, generator=generator).to(getattr(torch, dtype_name))
        if len(x):
            x[0] *= 1e4
            x[-1] = 0.0 if len(x) > 1 else x[-1]
        wide = torch.zeros(shape[0], shape[1] + 16, dtype=x.dtype)
        wide[:, : shape[1]] = x
        for view in (x, wide[:, : shape[1]]):
            (few, scale), (own, expected) = quantized_by_triton(view), quantized_by_torch(view)
            assert (few.shape, few.dtype) == (own.shape, own.dtype)
            if len(x):
                found.append(float(((scale - expected) / expected).abs().max()))
                found.append(float((few.float() - own.float()).abs().max()))
    return found


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Callable[..., Any]]:
    """`interpreted(function, ...)`: the function's result in a process that interprets kernels."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=interpreter.begin) as pool:
        yield lambda function, *args: pool.submit(function, *args).result()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_kernel_gives_what_torch_gives(dtype: str, interpreted: Callable[..., Any]) -> None:
    found = interpreted(differences, dtype)
    assert len(found) == 4 * (len(SHAPES) - 1)
    assert not any(found)


def test_shapes_on_fake_tensors_are_those_of_the_operator() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    real = quantize_rows(torch.randn(3, 32))
    with FakeTensorMode():
        fake = quantize_rows(torch.empty(3, 32))
    for one, other in zip(real, fake, strict=True):
        assert (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())
