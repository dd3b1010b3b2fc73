"""The balanced pipeline split: the planner cuts where the runtime cuts."""

from __future__ import annotations

import pytest

from hocket.models import registry
from tests.rotation import part

FIXED = ("bart", "deepseek_v3", "gpt_oss", "llama", "llama4_text", "mamba2", "mixtral")
OTHERS = sorted(set(registry.causal_classes()) - set(FIXED))


@pytest.mark.torch
@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", [*FIXED, *part(OTHERS, len(OTHERS) // 3 + 1)])
def test_a_module_and_its_shape_cost_the_same(kind: str) -> None:
    """Within what one of them does not see: matmuls of a router in fp32, of a recurrence."""
    from hocket.models.plans import plan_for
    from hocket.models.samples import sample_config
    from hocket.models.skeleton import build_skeleton
    from hocket.models.trace import trace
    from hocket.runtime.pipeline import cut_costs
    from hocket.spec.errors import ModelError

    config = sample_config(kind)
    try:
        module = build_skeleton(config)
        shape = trace(config, name=kind)
    except ModelError as error:
        pytest.skip(error.message.splitlines()[0])
    plan = plan_for(module).stages
    if plan is None:
        pytest.skip("it has no stages")
    found, wanted = cut_costs(module, plan, cuda=True), shape.cut_costs(cuda=True)
    ratios = [a / b for a, b in zip(found["layer_costs"], wanted["layer_costs"], strict=True)]
    assert 0.9 < min(ratios) <= max(ratios) < 1.15
    assert 0.95 < found["after_cost"] / wanted["after_cost"] < 1.05


@pytest.mark.torch
def test_experts_cost_what_tokens_reach() -> None:
    from hocket.models.plans import plan_for
    from hocket.models.samples import sample_config
    from hocket.models.skeleton import build_skeleton
    from hocket.runtime.pipeline import cut_costs

    module = build_skeleton(sample_config("deepseek_v3"))
    plan = plan_for(module).stages
    assert plan is not None
    assert plan.share_of("model.layers.7.mlp.experts.gate_up_proj") == 8 / 256
    assert plan.share_of("model.layers.7.mlp.shared_experts.up_proj.weight") is None
    costs = cut_costs(module, plan, cuda=False)["layer_costs"]
    assert costs[3] == pytest.approx(costs[0], rel=0.02)  # nine experts are as wide
