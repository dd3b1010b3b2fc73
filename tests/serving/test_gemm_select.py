"""Products of few rows are those of torch, whichever way computes them."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hocket.runtime.native.kernels import CpuKernels  # noqa: E402
from hocket.serving.engine.gemm_select import (  # noqa: E402
    MOST_ROWS,
    ChosenLinear,
    SelectedGemm,
    choose_products,
)
from hocket.serving.engine.projections import lay_inputs_first, merge_projections  # noqa: E402
from tests.families import whole_model  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.timeout(60)]
F = torch.nn.functional
ALWAYS, NEVER = (True,) * 7, (False,) * 7


def exact(x: Any, weight: Any, added: Any) -> Any:
    y = x.double() @ weight.double()
    return y if added is None else y + added.double()


@pytest.mark.parametrize("rows", [1, 2, 5, 6, 7, 12, 13, 33, 64, 150])
@pytest.mark.parametrize("width", [16, 17, 63, 64, 65, 127, 200, 1300])
def test_the_kernel_gives_the_products_of_any_size(
    kernels: CpuKernels, rows: int, width: int
) -> None:
    torch.manual_seed(rows * width)
    for depth in (1, 31, 32, 33, 100):
        weight, bias, more = torch.randn(depth, width), torch.randn(width), torch.randn(rows, width)
        x = torch.randn(rows, depth + 3)[:, 1 : depth + 1]
        for added in (None, bias, more):
            made = kernels.product(x, weight, added)
            torch.testing.assert_close(made.double(), exact(x, weight, added), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 7, 64])
def test_the_rows_of_a_weight_may_lie_apart(kernels: CpuKernels, rows: int) -> None:
    torch.manual_seed(rows)
    stored = torch.full((100, 80), float("nan"))
    weight = stored[:, :65]
    weight.copy_(torch.randn(100, 65))
    x, added = torch.randn(rows, 100), torch.randn(rows, 65)
    made = kernels.product(x, weight, added)
    torch.testing.assert_close(made.double(), exact(x, weight, added), rtol=1e-5, atol=1e-5)
    held = SelectedGemm(weight.t(), kernels, ALWAYS)
    torch.testing.assert_close(
        held(x, added).double(), exact(x, weight, added), rtol=1e-5, atol=1e-5
    )


def test_weights_whose_rows_lie_apart_are_chosen_for(kernels: CpuKernels) -> None:
    linear = torch.nn.Linear(24, 512)
    lay_inputs_first(linear)
    assert not linear.weight.t().is_contiguous()
    assert choose_products(torch.nn.Sequential(linear), kernels, tried=False) == 1


def test_the_kernel_sums_in_pieces(kernels: CpuKernels) -> None:
    torch.manual_seed(0)
    for depth in (256, 2048):
        weight, x = torch.randn(depth, 512), torch.randn(16, depth)
        expected = exact(x, weight, None)
        off = (kernels.product(x, weight).double() - expected).pow(2).mean()
        assert float(off / expected.pow(2).mean()) ** 0.5 < 3e-7


def test_what_is_no_number_stays_in_its_row_or_column(kernels: CpuKernels) -> None:
    x, weight = torch.ones(9, 40), torch.ones(40, 83)
    x[3, 7], x[5, 2] = float("nan"), float("inf")
    made = kernels.product(x, weight)
    assert made[3].isnan().all()
    assert made[5].isinf().all()
    assert made[[0, 1, 2, 4, 6, 7, 8]].eq(40).all()
    weight[39, 82], x = float("nan"), torch.ones(9, 40)
    made = kernels.product(x, weight)
    assert made[:, 82].isnan().all()
    assert made[:, :82].eq(40).all()


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 17, MOST_ROWS, MOST_ROWS + 1])
@pytest.mark.parametrize("choice", [ALWAYS, NEVER])
def test_products_are_those_of_the_weight(
    kernels: CpuKernels, rows: int, choice: tuple[bool, ...]
) -> None:
    torch.manual_seed(rows)
    weight, bias = torch.randn(40, 24), torch.randn(40)
    held = SelectedGemm(weight.t().contiguous().t(), kernels, choice)
    inputs = [
        torch.randn(rows, 24),
        torch.randn(1, rows, 24),
        torch.randn(rows, 1, 24),
        torch.randn(1, 24, rows).transpose(1, 2),
        torch.randn(rows, 2, 24)[:, 1],
    ]
    for x in inputs:
        for added in (None, bias, torch.randn(rows, 40) if x.dim() == 2 else None):
            found = held(x, added)
            expected = F.linear(x, weight)
            torch.testing.assert_close(found, expected if added is None else expected + added)


def test_the_choice_is_by_the_number_of_rows(
    kernels: CpuKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[int] = []
    original = CpuKernels.product

    def product(self: CpuKernels, x: Any, *rest: Any) -> Any:
        called.append(x.shape[-2])
        return original(self, x, *rest)

    monkeypatch.setattr(CpuKernels, "product", product)
    weight = torch.randn(24, 40).t()
    held = SelectedGemm(weight, kernels, (False, True, False, True, False, False, True))
    for rows in range(1, MOST_ROWS + 2):
        held(torch.randn(1, rows, 24))
    assert called == [2, *range(5, 9), *range(33, 65)]


@pytest.mark.parametrize("family", ["llama", "llama_tied", "opt", "mixtral"])
def test_models_compute_what_they_did(form: str, kernels: CpuKernels, family: str) -> None:
    # mixtral's logits are off by as much in fp32 as it is; products that are rounded before they
    # are added are off by more.
    off = 1e-4 if (form, family) == ("portable", "mixtral") else 1e-5
    plain: Any = whole_model(family)
    ids = torch.randint(3, 60, (1, 20))
    before = {name: value.clone() for name, value in plain.named_parameters()}
    with torch.inference_mode():
        expected = plain(ids).logits
        merge_projections(plain)
        lay_inputs_first(plain)
        count = choose_products(plain, kernels, tried=False)
        torch.testing.assert_close(plain(ids).logits, expected, rtol=off, atol=off)
        torch.testing.assert_close(plain(ids[:, :1]).logits, expected[:, :1], rtol=off, atol=off)
    assert count > 0
    swapped = sum(type(one) is ChosenLinear for one in plain.modules())
    assert swapped > 0
    head = plain.get_output_embeddings()
    assert (type(head) is ChosenLinear) == (family in {"llama", "mixtral"})
    after = dict(plain.named_parameters())
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_weights_of_another_kind_are_left(kernels: CpuKernels) -> None:
    plain = whole_model("llama")
    assert choose_products(plain, kernels, tried=False) == 0  # not laid out for it
    lay_inputs_first(plain)
    assert choose_products(plain.bfloat16(), kernels, tried=False) == 0


@pytest.mark.parametrize("faster", [True, False])
def test_the_kernel_is_taken_where_it_was_faster(
    kernels: CpuKernels, monkeypatch: pytest.MonkeyPatch, faster: bool
) -> None:
    now, original = 0.0, CpuKernels.product

    def product(self: CpuKernels, *given: Any) -> Any:
        nonlocal now
        now += 0.0 if faster else 3.0
        return original(self, *given)

    def clock() -> float:
        nonlocal now
        now += 1.0
        return now

    monkeypatch.setattr(CpuKernels, "product", product)
    monkeypatch.setattr("hocket.serving.engine.gemm_select.time.thread_time", clock)
    asked: list[int] = []
    alone = torch.get_num_threads()
    plain = whole_model("llama")
    lay_inputs_first(plain)
    count = choose_products(plain, kernels, threads=lambda rows: asked.append(rows) or 1)  # type: ignore[func-returns-value]
    assert (count > 0) == faster
    assert asked == [1, 2, 4, 8, 16, 32, 64]
    assert torch.get_num_threads() == alone
