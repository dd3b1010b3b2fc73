"""A router's auxiliary loss: which models have the usual one, and its value over all data ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hocket.models.plans import router
from hocket.runtime.loss import balancing_loss
from hocket.runtime.mesh import Axis
from hocket.runtime.record import Recorder
from hocket.spec.plan import RouterLoss

pytestmark = pytest.mark.torch


def usual(gates: Any, experts: int, top_k: int, mask: torch.Tensor | None) -> torch.Tensor:
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    found = load_balancing_loss_func(gates, experts, top_k, mask)
    assert isinstance(found, torch.Tensor)
    return found


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_the_loss_and_its_gradient_are_those_of_transformers(masked: bool, top_k: int) -> None:
    torch.manual_seed(0)
    gates = [torch.randn(24, 8, requires_grad=True) for _ in range(3)]
    mask = None
    if masked:
        mask = torch.ones(4, 6, dtype=torch.long)
        mask[1, 3:] = 0
    expected = usual(tuple(gates), 8, top_k, mask)
    wanted = torch.autograd.grad(expected, gates)
    loss = RouterLoss(coefficient=1.0, experts=8, top_k=top_k)
    found = balancing_loss(gates, loss, mask, Axis("dp"), Recorder(0))
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found, gates), wanted)


@pytest.mark.parametrize(
    ("kind", "known"),
    [("mixtral", True), ("qwen3_moe", True), ("qwen2_moe", True), ("gpt_oss", True),
     ("granitemoe", True), ("jamba", True), ("olmoe", True), ("doge", False), ("llama", False)],
)  # fmt: skip
def test_models_with_the_usual_loss_are_known(kind: str, known: bool) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(kind)
    config.output_router_logits = True
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert (router._switch_sizes(model) != (0, 0)) is known
    found = router.router_loss(model)
    if known:
        assert found is not None
        assert found.of_all_ranks
        assert found.experts == model.num_experts
        assert found.top_k == model.num_experts_per_tok


def test_another_function_is_not_taken_for_it() -> None:
    assert not router._is_switch(lambda gates, experts, top_k, mask: torch.tensor(1.0))
    assert not router._is_switch(lambda gates: 0)
    assert not router._is_switch(lambda gates, experts, top_k, mask: usual(gates, experts, 1, mask))
    assert not router._is_switch(lambda gates, experts, top_k, mask: usual(gates, experts, 2, None))
    assert router._is_switch(usual)
