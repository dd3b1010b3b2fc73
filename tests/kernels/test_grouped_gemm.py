"""Grouped matmuls in Triton: against a loop over groups, by Triton's interpreter on a CPU."""

from __future__ import annotations

import importlib.util
import itertools
import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from hocket.runtime.triton.grouped_gemm import (  # noqa: E402
    DTYPES,
    gemm_tile,
    grouped_mm,
    takes,
    tiles_of,
)
from tests.kernels import grouped_cases, interpreter  # noqa: E402
from tests.kernels.grouped_cases import CASES, TOLERANCE  # noqa: E402

pytestmark = pytest.mark.torch

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs the package triton"
)


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Callable[..., Any]]:
    """`interpreted(function, ...)`: the function's result in a process that interprets kernels."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=interpreter.begin) as pool:
        yield lambda function, *args: pool.submit(function, *args).result()


@needs_triton
def test_result_and_gradients_equal_a_loop_over_groups(interpreted: Callable[..., Any]) -> None:
    errors = interpreted(grouped_cases.all_errors)
    for case in CASES:
        assert max(errors[case.name].values()) < TOLERANCE[case.dtype], (case, errors[case.name])


@needs_triton
def test_a_row_in_the_wrong_group_is_seen(interpreted: Callable[..., Any]) -> None:
    errors = interpreted(grouped_cases.errors_of, "wide", "cpu", 1)
    assert min(errors.values()) > 0.05


@needs_triton
def test_scaled_rows_of_8_bits_equal_a_loop_over_groups(interpreted: Callable[..., Any]) -> None:
    errors = interpreted(grouped_cases.scaled_errors)
    assert errors.keys() == {case.name for case in CASES}
    assert max(errors.values()) < TOLERANCE[torch.bfloat16], errors


@needs_triton
def test_a_frozen_weight_gets_no_gradient(interpreted: Callable[..., Any]) -> None:
    assert interpreted(grouped_cases.frozen_weight) == (True, False)


@pytest.mark.parametrize("rows", [1, 16, 128])
def test_every_row_of_every_group_has_a_tile(rows: int) -> None:
    """The arithmetic of `_group_of`: S // rows + E + 1 tiles, and enough for every group."""
    generator = torch.Generator().manual_seed(rows)
    for _ in range(50):
        counts = torch.randint(0, 200, (9,), generator=generator).tolist()
        counts[int(counts[0]) % 9] = 0
        begins = [sum(counts[:g]) for g in range(len(counts) + 1)]
        first = [begin // rows + g for g, begin in enumerate(begins)]
        assert all(b > a for a, b in itertools.pairwise(first))
        for g, count in enumerate(counts):
            assert (first[g + 1] - first[g]) * rows >= count
        rest = int(counts[-1])
        grid = (begins[-1] + rest) // rows + len(counts) + 1
        assert (grid - first[-1]) * rows >= rest


def test_the_tile_follows_the_average_group() -> None:
    for dtype in DTYPES:
        tiles = tiles_of(dtype)
        assert gemm_tile(dtype, 8, 8) == gemm_tile(dtype, 0, 1) == tiles[0]
        assert gemm_tile(dtype, 1 << 20, 8) == tiles[-1]
        assert {gemm_tile(dtype, n, 8) for n in range(0, 4096, 64)} == set(tiles)


class _Seen(TorchDispatchMode):  # type: ignore[misc]
    """Names of operators."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def _fake(capability: tuple[int, int], dtype: Any) -> tuple[bool, list[str]]:
    """Whether a weight is taken on a GPU, and the operators of transformers' matmul there."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from transformers.integrations import moe

    from hocket.training.build import group_experts

    group_experts()
    seen = _Seen()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
        with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
            x = torch.empty(6, 32, dtype=dtype, device="cuda:0")
            weight = torch.empty(4, 48, 32, dtype=dtype, device="cuda:0").transpose(1, 2)
            ends = torch.empty(4, dtype=torch.int32, device="cuda:0")
            with seen:
                out = moe._grouped_mm(x, weight, ends)
            assert (tuple(out.shape), out.dtype, out.device.type) == ((6, 48), dtype, "cuda")
            return takes(weight), [name for name in seen.names if "grouped" in name]


@needs_triton
@pytest.mark.parametrize(
    ("capability", "dtype", "ours"),
    [
        ((9, 0), torch.float32, True),
        ((9, 0), torch.float16, True),
        ((8, 0), torch.bfloat16, True),
        ((12, 0), torch.bfloat16, True),
        ((9, 0), torch.bfloat16, False),
        ((10, 0), torch.bfloat16, False),
        ((7, 5), torch.float32, False),
    ],
)
def test_experts_without_a_kernel_of_torch_are_multiplied_here(
    capability: tuple[int, int], dtype: Any, ours: bool
) -> None:
    taken, names = _fake(capability, dtype)
    assert taken == ours
    torchs = "aten::_grouped_mm" if capability >= (8, 0) else "transformers::grouped_mm_fallback"
    assert names == ["hocket::grouped_mm" if ours else torchs]


@pytest.mark.parametrize(
    ("capability", "sizes", "fault"),
    [
        ((9, 0), (48, 32), None),
        ((8, 9), (48, 32), None),
        ((10, 0), (48, 32), None),  # admitted by torch's check, and its kernel is Hopper's
        ((12, 0), (48, 32), None),
        ((9, 0), (48, 36), "multiple of 16 bytes"),
    ],
)
def test_scaled_experts_are_multiplied_by_what_the_gpu_has(
    capability: tuple[int, int], sizes: tuple[int, int], fault: str | None
) -> None:
    """torch's own checks of layouts and scales see what it is given."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from hocket.runtime.fp8_experts import StackedWeight

    kind: Any = {"dtype": torch.float8_e4m3fn, "device": "cuda:0"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
        with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
            outer, inner = sizes
            weight = torch.empty(4, outer, inner, **kind).transpose(1, 2)
            stack = StackedWeight(weight, torch.empty(4, outer, device="cuda:0"))
            x = torch.empty(6, inner, dtype=torch.bfloat16, device="cuda:0")
            ends = torch.empty(4, dtype=torch.int32, device="cuda:0")
            with _Seen() as seen:
                if fault is not None:
                    with pytest.raises(RuntimeError, match=fault):
                        stack.grouped_product(x, ends)
                    return
                out = stack.grouped_product(x, ends)
    assert (tuple(out.shape), out.dtype) == ((6, outer), torch.bfloat16)
    name = "aten::_scaled" if capability == (9, 0) else "hocket::scaled"
    assert [n for n in seen.names if "grouped" in n] == [f"{name}_grouped_mm"]


@pytest.mark.parametrize(
    ("x", "weight", "offsets", "message"),
    [
        ((6, 16), (2, 8, 4), torch.int32, "does not fit"),
        ((6, 16), (16, 4), torch.int32, "does not fit"),
        ((6, 16), (3, 16, 4), torch.int32, "offsets"),
        ((6, 16), (2, 16, 4), torch.int64, "offsets"),
        ((6, 16), (2, 16, 4), None, "float64"),
    ],
)
def test_what_it_cannot_do_is_rejected(x: Any, weight: Any, offsets: Any, message: str) -> None:
    kind = torch.float64 if offsets is None else torch.float32
    ends = torch.tensor([2, 6], dtype=offsets or torch.int32)
    with pytest.raises(ValueError, match=message):
        grouped_mm(torch.zeros(x, dtype=kind), torch.zeros(weight, dtype=kind), ends)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [case.name for case in CASES])
def test_equals_a_loop_on_a_gpu(name: str) -> None:
    case = next(case for case in CASES if case.name == name)
    assert max(grouped_cases.errors_of(name, "cuda").values()) < TOLERANCE[case.dtype]
