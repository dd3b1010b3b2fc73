"""Positions of padded rows: whether a model counts them from its attention mask.

Where the rows of a batch are padded on the left, most models number tokens from the first column.
Some (OPT) number them from the first token that the mask shows. They do so inside of a forward that
sees whole rows; where ranks have parts of rows, the positions are given to them.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from hocket.models.proxy import ProxyModel

_ROWS, _LENGTH, _PADDING = 2, 8, 3
_TOLERANCE = 1e-5
"""Of the largest logit."""


def counts_from_mask(proxy: ProxyModel) -> bool:
    """Whether the proxy model's logits of left-padded rows are those of positions counted from the
    mask, and not those of positions counted from the first column."""
    model: Any = proxy.build().eval()
    accepted = inspect.signature(model.forward).parameters
    if not {"attention_mask", "position_ids"} <= set(accepted):
        return False
    mask = torch.ones(_ROWS, _LENGTH, dtype=torch.long)
    mask[0, :_PADDING] = 0
    given = {"input_ids": torch.arange(3, 3 + mask.numel()).view_as(mask), "attention_mask": mask}

    @torch.no_grad()
    def logits(**more: Tensor) -> Tensor:
        found: Tensor = model(**given, **more, use_cache=False).logits
        return found[0, _PADDING:]

    own = logits()
    columns = logits(position_ids=torch.arange(_LENGTH).expand_as(mask))
    bound = _TOLERANCE * float(own.abs().max())
    if float((own - columns).abs().max()) <= bound:
        return False
    shown = logits(position_ids=mask.cumsum(1) * mask - 1)
    return float((own - shown).abs().max()) <= bound
