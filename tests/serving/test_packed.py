"""Packed weights give the products of the weights as they were, for any number of rows."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hocket.serving.engine import packed  # noqa: E402
from hocket.serving.engine.packed import PackedLinear, PackedWeight, pack  # noqa: E402
from hocket.serving.engine.projections import lay_inputs_first, merge_projections  # noqa: E402
from tests.families import whole_model  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.timeout(60)]


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 17, 64, 65])
def test_products_are_those_of_the_weight(rows: int) -> None:
    torch.manual_seed(rows)
    weight, bias, x = torch.randn(40, 24), torch.randn(40), torch.randn(1, rows, 24)
    for laid in (weight, weight.t().contiguous().t()):
        held = PackedWeight(laid)
        for added in (None, bias):
            found = held.product(x, added)
            assert found.shape == (1, rows, 40)
            torch.testing.assert_close(found, torch.nn.functional.linear(x, weight, added))


@pytest.mark.parametrize("family", ["llama", "llama_tied", "gpt2", "mixtral"])
def test_models_compute_what_they_did(family: str) -> None:
    plain: Any = whole_model(family)
    ids = torch.randint(3, 60, (1, 20))
    before = {name: value.clone() for name, value in plain.named_parameters()}
    with torch.inference_mode():
        expected = plain(ids).logits
        merge_projections(plain)
        lay_inputs_first(plain)
        size = pack(plain, tried=False)
        torch.testing.assert_close(plain(ids).logits, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(plain(ids[:, :1]).logits, expected[:, :1], rtol=1e-5, atol=1e-5)
    assert size > 0
    assert any(type(one) is PackedLinear for one in plain.modules())
    after = dict(plain.named_parameters())
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_what_is_too_large_or_of_another_kind_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = whole_model("llama")
    linear = sum(m.weight.numel() for m in plain.modules() if type(m) is torch.nn.Linear)
    monkeypatch.setattr(packed, "MOST_BYTES", 4 * linear - 1)
    assert pack(plain, tried=False) == 0
    assert not any(isinstance(one, PackedLinear) for one in plain.modules())
    monkeypatch.setattr(packed, "MOST_BYTES", 4 * linear)
    assert pack(plain.bfloat16(), tried=False) == 0
    assert pack(whole_model("llama"), tried=False) == 4 * linear


@pytest.mark.parametrize("faster", [True, False])
def test_copies_are_kept_where_they_were_faster(
    monkeypatch: pytest.MonkeyPatch, faster: bool
) -> None:
    now = 0.0

    def product(held: PackedWeight, x: Any, bias: Any) -> Any:
        nonlocal now
        now += 0.0 if faster else 3.0
        return torch.nn.functional.linear(x, held.weight, bias)

    def clock() -> float:
        nonlocal now
        now += 1.0
        return now

    monkeypatch.setattr(PackedWeight, "product", product)
    monkeypatch.setattr(packed.time, "perf_counter", clock)
    monkeypatch.setattr(packed, "GAIN", 1.0)
    assert (pack(whole_model("llama")) > 0) == faster
