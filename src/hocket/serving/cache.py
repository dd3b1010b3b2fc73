"""The key/value cache of one pipeline stage.

A stage runs the whole model's own code, which asks the cache for the length of layer 0 (or of the
first layer of a kind) to place new tokens and to build masks. On a later stage that layer is
another's and its cache stays empty, so it answers for a layer that is here.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import nn
from transformers import DynamicCache

from hocket.runtime.pipeline.cut import Missing
from hocket.spec.plan import StagePlan


class StageCache(DynamicCache):
    """A cache for the layers `held`; the other layers' lengths are those of a held one.

    Args:
        config: the model's configuration, which tells the kind of each layer.
        held: indices of the layers of this stage, among all of the model's.
    """

    def __init__(self, config: Any, held: Collection[int]) -> None:
        super().__init__(config=config)
        self.held = sorted(held)
        # Of every kind (full, sliding window), the first held layer stands in for foreign ones.
        first: dict[type, Any] = {}
        for index in self.held:
            first.setdefault(type(self.layers[index]), self.layers[index])
        for index, layer in enumerate(self.layers):
            if index not in self.held:
                self.layers[index] = first.get(type(layer), layer)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens seen so far."""
        if self.held and layer_idx not in self.held:
            layer_idx = self.held[0]
        return int(super().get_seq_length(layer_idx))


def held_layers(module: nn.Module, plan: StagePlan | None) -> list[int]:
    """Indices of the layers that a cut module still holds."""
    if plan is None:
        return []
    layers = module.get_submodule(plan.layers)
    return [i for i, layer in enumerate(layers.children()) if not isinstance(layer, Missing)]
