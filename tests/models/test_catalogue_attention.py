"""Attention kernels of every catalogue model and test family on an H100 in bf16."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from hocket.catalogue import models as catalogue  # noqa: E402
from hocket.models.attention_layers import FLEX, layers_of  # noqa: E402
from hocket.models.skeleton import build_skeleton  # noqa: E402
from hocket.spec.attention_kernel import attention_kernel  # noqa: E402
from tests.families import SERVED  # noqa: E402
from tests.models.flex_cases import FAMILIES  # noqa: E402

pytestmark = pytest.mark.torch

ALIBI = "the family has no fused attention"
SLOW = {"bloom": ALIBI, "bloom-176b": ALIBI, "gpt-j-6b": ALIBI}
"""Models of S x S scores, and why: their own code adds what no kernel is given (position biases of
BLOOM), or multiplies in place (GPT-J)."""

MODELS: dict[str, Any] = {**dict.fromkeys(catalogue.model_names()), **SERVED, **FAMILIES}


@pytest.mark.parametrize("name", sorted(MODELS))
def test_no_layer_multiplies_out_its_scores(name: str) -> None:
    from hocket.models import attention

    config = dict(MODELS[name] or catalogue.config(name))
    for text in (config, config.get("text_config") or {}):
        for key in ("num_hidden_layers", "n_layer"):
            if text.get(key):
                text[key] = min(text[key], 6)
        if text.get("layer_types"):
            text["layer_types"] = text["layer_types"][:6]
    model: Any = build_skeleton(config, dtype=torch.bfloat16)
    if attention.flexible(model):
        model.config._attn_implementation = FLEX
    for packed in (False, True):
        for layer, _ in layers_of(model, seq_len=8192, packed=packed):
            kernel = attention_kernel(layer, dtype="bfloat16", capability=(9, 0))
            if name in SLOW:
                assert (kernel.name, kernel.reason) == ("eager", SLOW[name])
            else:
                assert kernel.name not in ("eager", "math"), (layer.kind, kernel)
