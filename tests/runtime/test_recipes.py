"""Recipes: what a layer's forward leaves behind, and what backward makes of it."""

from __future__ import annotations

import weakref
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402

from hocket.runtime import recipes  # noqa: E402

pytestmark = pytest.mark.torch


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((8,), 1.5))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = Norm()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(x)


def test_recipes_of_what_is_not_saved_are_dropped_with_the_forward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A sum does not save the norm's output: its recipe would keep what the norm is made again
    from, until the backward of the whole layer is over (Gemma's norms behind a matmul)."""
    made: list[weakref.ref[recipes.Recipe]] = []

    class Noted(recipes.Recipe):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(weakref.ref(self))

    x = torch.randn(4, 8)
    plain, layer = Layer(), Layer()
    plain(x).square().sum().backward()
    monkeypatch.setattr(recipes, "Recipe", Noted)
    layer.norm.forward = recipes.WrittenModule(layer.norm.forward)  # type: ignore[method-assign]
    layer.forward = recipes.LayerWithRecipes(layer.forward)  # type: ignore[method-assign]
    out = layer(x)
    assert [recipe() is None for recipe in made] == [False] * 5 + [True]
    out.square().sum().backward()
    assert plain.norm.weight.grad is not None
    assert layer.norm.weight.grad is not None
    assert torch.equal(layer.norm.weight.grad, plain.norm.weight.grad)
