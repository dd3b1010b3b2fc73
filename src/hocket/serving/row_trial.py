"""How rows of several lengths run together through a model's own code: tried on its proxy model.

transformers' classes differ in what they make of padding and of a cache that they are handed. Some
ignore both (rwkv), some look at tokens to the right (encoders that are used as decoders), and some
are wrong with their own cache. Such answers are wrong without an error; so a proxy model of the
class continues a few prompts in each way, and the fastest that gives what each row gives by itself,
computed whole in every round, is taken.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Hashable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from hocket.models.experts import loop_in_fp64
from hocket.models.failure import raise_if_exhausted
from hocket.models.proxy import VOCABULARY, proxy_of, spread_weights
from hocket.runtime.mesh import Mesh
from hocket.runtime.pipeline.stage import Stage
from hocket.serving.padded import Engine, PromptBatch, Rows, model_cache_argument
from hocket.serving.request import SamplingParams
from hocket.spec.errors import HocketError

LENGTHS, ROUNDS = (11, 4, 1, 11), 5
FIRST_TOKEN = 3
"""Below it are tokens with a meaning: padding, beginning, end."""

EQUAL = 1e-3
"""Largest difference of logits, whose entries differ by whole units."""


class _Kept(Engine):
    """Keeps the logits of every round, which say more than the tokens that they lead to."""

    def row_logits(self, batches: Sequence[PromptBatch], place: Tensor) -> Tensor | None:
        found = super().row_logits(batches, place)
        assert found is not None
        self.kept = [*getattr(self, "kept", []), found]
        return found


def trial_rows(config: Any, dtype: torch.dtype) -> Rows:
    """How rows of a model of this configuration run together; `whole` where it cannot be tried."""
    return _tried(cast(Hashable, type(config)), json.dumps(config.to_dict(), default=str), dtype)


@functools.lru_cache(maxsize=16)
def _tried(kind: Any, text: str, dtype: torch.dtype) -> Rows:
    try:
        proxy = proxy_of(kind.from_dict(json.loads(text)))
    except HocketError:  # what cannot be made small cannot be tried
        return "whole"
    model = proxy.build(seed=0).to(torch.float64 if dtype == torch.float64 else torch.float32)
    loop_in_fp64(model, dtype)
    if model_cache_argument(model) is None:
        return "whole"
    spread_weights(model, seed=0)
    draws = torch.Generator().manual_seed(0)
    prompts = [
        torch.randint(FIRST_TOKEN, VOCABULARY, (length,), generator=draws).tolist()
        for length in LENGTHS
    ]

    def logits(rows: Rows) -> Tensor:
        engine = _Kept([Stage(model)], Mesh.single(), proxy.config, rows=rows)
        engine.generate(prompts, SamplingParams(max_new_tokens=ROUNDS))
        return torch.stack(engine.kept)

    with torch.random.fork_rng(devices=[]):
        expected = logits("whole")
        for rows in _FASTEST_FIRST:
            try:
                if bool((logits(rows) - expected).abs().max() < EQUAL):
                    return rows
            except Exception as error:  # of the model's own code, with a cache it does not take
                raise_if_exhausted(error)
                continue
    return "whole"


_FASTEST_FIRST: tuple[Rows, ...] = ("padded", "equal")
