"""LoRA's targets: those that an adapter has are those that peft adapts when it loads it."""

from __future__ import annotations

import pytest

pytest.importorskip("peft")
torch = pytest.importorskip("torch")

from hocket.models.lora import peft_config, targets_of  # noqa: E402
from hocket.models.skeleton import build_skeleton  # noqa: E402
from hocket.spec.errors import ModelError  # noqa: E402
from hocket.spec.run import TrainOptions  # noqa: E402
from tests.families import EXPERTS  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("kind", EXPERTS)
def test_an_adapter_of_a_mixture_is_what_peft_adapts_or_rejected(kind: str) -> None:
    from peft import get_peft_model

    model = build_skeleton(EXPERTS[kind])
    options = TrainOptions(lora_rank=2)
    dense = any(name.endswith(".down_proj") for name, _ in model.named_modules())
    if dense:  # shared experts, or layers without a router
        with pytest.raises(ModelError, match="gate_proj, up_proj, down_proj of") as error:
            targets_of(model, None)
        options = TrainOptions(lora_rank=2, lora_targets=str(error.value.hint).split()[1])
    names = targets_of(model, options.lora_targets)
    adapted = get_peft_model(model, peft_config(model, options))
    thin = [name for name, _ in adapted.named_parameters() if ".lora_A" in name]
    found = {name.partition(".lora_A")[0] for name in thin}
    assert found == {f"base_model.model.{name}" for name in names}
    assert dense == (kind in ("qwen3_moe", "deepseek_v3"))
