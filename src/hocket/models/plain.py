"""PlainModel: a model as plain transformers computes it, the reference of served answers.

Legend: S tokens of a sequence, V vocabulary.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn


class PlainModel:
    """`AutoModelForCausalLM` of a Hugging Face directory in fp32 on the CPU, with eager attention.

    Args:
        folder: the directory.
        trust_remote_code: run code that it brings along.

    Raises:
        Exception: whatever transformers raises for a directory that it cannot load.
    """

    def __init__(self, folder: str | os.PathLike[str], *, trust_remote_code: bool = False) -> None:
        _quiet()
        auto: Any = transformers.AutoModelForCausalLM
        self._model: Any = auto.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager",
            trust_remote_code=trust_remote_code,
        ).eval()  # fmt: skip
        self.new_cache: Callable[[Any], Any] | None = None
        """Of the configuration: what keeps the keys and values of one sequence. None: nothing
        does, and `generate` has its own."""

    @torch.no_grad()
    def logits(self, tokens: tuple[int, ...]) -> Tensor:
        """[S, V] of one sequence, by one forward without a cache."""
        cache = self._cache()
        found: Tensor = self._model(
            input_ids=torch.tensor([tokens]), use_cache=bool(cache), **cache
        ).logits[0]
        return found

    def _cache(self) -> dict[str, Any]:
        return (
            {}
            if self.new_cache is None
            else {"past_key_values": self.new_cache(self._model.config)}
        )

    @torch.no_grad()
    def generate(self, prompt: list[int], count: int) -> list[int]:
        """The greedy continuation by `generate`, with its own cache; no token ends it."""
        config = self._model.generation_config
        config.eos_token_id, config.pad_token_id = None, 0
        made = self._model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)).long(),
            max_new_tokens=count, do_sample=False, use_cache=True,
            **self._cache(),
        )  # fmt: skip
        found: list[int] = made[0, len(prompt) :].tolist()
        return found

    def to_fp64(self) -> nn.Module:
        """The model, with values in fp64 from now on; its class may cast some to fp32."""
        return self.multiplied_one_by_one().double()  # the grouped matmul has no fp64

    def multiplied_one_by_one(self) -> nn.Module:
        """The model, whose own code multiplies each expert by itself from now on."""
        self._model.set_experts_implementation("eager")
        found: nn.Module = self._model
        return found


def save_plain(model: nn.Module, folder: str | os.PathLike[str]) -> None:
    _quiet()
    model.save_pretrained(folder)  # type: ignore[operator]


def _quiet() -> None:
    logging: Any = transformers.utils.logging
    logging.disable_progress_bar()
