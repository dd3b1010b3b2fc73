"""The names under which a model's parameters stand in an ordinary Hugging Face file.

Mostly they are the module's own. Some families differ: Mixtral's experts are one stacked tensor
in the module and one tensor per expert and projection in the file. The library that loads such a
file knows the way there; this module walks it backwards, one tensor at a time.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hocket.models.skeleton import build_skeleton


class SavedNames:
    """From a module's parameters to a file's tensors, for one configuration.

    Args:
        config: the Hugging Face configuration.
        code: directory whose own model code is run, if it is trusted.
    """

    def __init__(self, config: dict[str, Any], *, code: Path | None = None) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import PrefixChange

        skeleton: Any = build_skeleton(config, code=code)
        self.skeleton = skeleton
        steps = get_model_conversion_mapping(skeleton, add_legacy=False)
        self.is_identity = all(isinstance(step, PrefixChange) for step in steps)

    def convert(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """The tensors of the file that one parameter becomes.

        On the meta device it costs nothing and tells names and shapes. A parameter that the file
        can only hold merged with others keeps its own name, which loads as well.
        """
        if self.is_identity:
            return {name: tensor}
        from transformers.core_model_loading import revert_weight_conversion

        try:
            found = revert_weight_conversion(self.skeleton, {name: tensor})
        except Exception:  # the library has no common error for a part that is missing
            return {name: tensor}
        held = sum(t.numel() for t in found.values())
        return found if held == tensor.numel() else {name: tensor}

    def entries(self, name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the tensors that one parameter becomes."""
        found = self.convert(name, torch.empty(shape, device="meta"))
        return {key: tuple(tensor.shape) for key, tensor in found.items()}
