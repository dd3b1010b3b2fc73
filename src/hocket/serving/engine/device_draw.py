"""Draws on a device: what `draw` chooses, without a value that the host would have to wait for.

`draw` looks at a few candidates first and asks whether they decide; an answer costs a device more
than the whole row does. Here every row is cut whole: top-k by its k-th largest entry, top-p by a
sort. Definitions, order and ties are those of `truncation`.

Legend: N rows, V vocabulary.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from hocket.serving.engine.draw import inverse_cdf
from hocket.serving.engine.top_logits import BLOCK, block_maxima
from hocket.serving.engine.truncation import above, nucleus_by_sort


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceChoices:
    """How each row's token is drawn, on the device.

    Attributes:
        at: [N] fp64, its number in [0, 1).
        temperature: [N] fp32, above 0 and finite. None: 1 for every row.
        top_k: [N] int64, V where a row has none. None: no row has one.
        most: the largest top_k of a row that has one.
        top_p: [N] fp32, 2 where a row has none. None: no row has one.
        min_p: [N] fp32. None: no row has one.
    """

    at: Tensor
    temperature: Tensor | None = None
    top_k: Tensor | None = None
    most: int = 0
    top_p: Tensor | None = None
    min_p: Tensor | None = None


def draw_on_device(logits: Tensor, choices: DeviceChoices) -> tuple[Tensor, Tensor]:
    """One token per row of `logits` [N, V], fp32, -inf for tokens that must not come.

    Returns:
        as `draw`: tokens [N] and whether each row could be drawn from [N].
    """
    peak = block_maxima(logits, BLOCK).amax(-1, keepdim=True)
    good = peak.isfinite()
    x = logits - peak
    if choices.temperature is not None:
        x.div_(choices.temperature.unsqueeze(1))
    x.masked_fill_(~good, 0)
    if choices.top_k is not None:
        count = choices.top_k.unsqueeze(1)
        largest = x.topk(choices.most).values
        least = largest.gather(1, (count - 1).clamp_max(choices.most - 1))
        least = least.masked_fill(count >= x.shape[1], -torch.inf)
        x.masked_fill_(x < least, -torch.inf)
    probability = torch.softmax(x, -1)
    if choices.top_p is not None:
        nucleus_by_sort(x, probability, choices.top_p.unsqueeze(1))
    floor = None if choices.min_p is None else choices.min_p.unsqueeze(1)
    return inverse_cdf(above(probability, floor), choices.at), good.squeeze(1)
