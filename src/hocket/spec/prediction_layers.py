"""Layers for multi-token prediction: configurations count them, transformers' models have none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

COUNTS: Final = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")
"""Keys of the count: DeepSeek-V3's and GLM's; Mellum's and Inkling's; Qwen3.5's."""


def prediction_layers(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The keys under which a configuration counts such layers, where there are any."""
    return tuple(key for key in COUNTS if config.get(key))
