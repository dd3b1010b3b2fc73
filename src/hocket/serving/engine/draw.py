"""Draws: tokens chosen at random from rows of logits, each by one number of its own.

The token is the first, in the order of ids, at which the cumulative probability of what
temperature, top-k, top-p and min-p left (`truncation`) exceeds the row's number in [0, 1). It goes
by id and not by rank: two tokens of nearly equal logits may change ranks when a row is computed in
another batch, and ids do not.

Legend: N rows, V vocabulary, C candidates.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from hocket.serving.engine.top_logits import BLOCK
from hocket.serving.engine.truncation import SMALL, Cut, Heated, Scratch, kept_entries, kept_rows


def uniform(seed: int, index: int, position: int) -> float:
    """A number in [0, 1) that depends on its arguments alone, on every machine."""
    digest = hashlib.blake2b(f"{seed}/{index}/{position}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / float(1 << 53)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choices:
    """How each row's token is drawn; None where a row does without.

    Attributes:
        at: its number in [0, 1).
        temperature: above 0.
        top_k: from 1.
        top_p: above 0.
        min_p: from 0 to 1.
    """

    at: Sequence[float]
    temperature: Sequence[float]
    top_k: Sequence[int | None]
    top_p: Sequence[float | None]
    min_p: Sequence[float | None]


def draw_tokens(
    logits: Tensor, choices: Choices, scratch: Scratch | None = None
) -> tuple[Tensor, Tensor]:
    """One token per row of `logits` [N, V], fp32, -inf for tokens that must not come.

    Returns:
        tokens [N]; whether each row could be drawn from [N]: not if its largest logit is NaN or
        infinite. Where not, the token means nothing.
    """
    cut = Cut.of(choices.top_k, choices.top_p, choices.min_p, logits)
    block = BLOCK if cut.nothing else SMALL
    heated = Heated(logits, choices.temperature, block, scratch or Scratch())
    good = heated.good.squeeze(1)
    at = torch.tensor(choices.at, dtype=torch.float64, device=logits.device)
    if cut.nothing:
        return inverse_cdf(heated.softmax(), at), good
    alone = cut.share is not None and cut.count is None
    ids, weights, decided = kept_entries(heated, cut, heated.softmax() if alone else None)
    tokens = ids.gather(1, inverse_cdf(weights, at).unsqueeze(1)).squeeze(1)
    if not bool(decided.all()):
        left = (~decided).nonzero().squeeze(1)
        tokens[left] = inverse_cdf(kept_rows(heated, left, cut), at[left])
    return tokens, good


def inverse_cdf(weights: Tensor, at: Tensor) -> Tensor:
    """The first entry of each row at which the running sum exceeds `at` times the sum: [N].

    Never one of weight 0.

    Args:
        weights: [N, C], not negative, not all 0.
        at: [N] in [0, 1), fp64.
    """
    whole = weights.shape[1] // BLOCK
    sums = [torch.unflatten(weights[:, : whole * BLOCK], 1, (whole, BLOCK)).sum(-1)]
    if whole * BLOCK < weights.shape[1]:
        sums.append(weights[:, whole * BLOCK :].sum(-1, keepdim=True))
    running = torch.cat(sums, 1).cumsum(-1, dtype=torch.float64)
    block, share = _cross(running, at)
    ids = block.unsqueeze(1) * BLOCK + torch.arange(BLOCK, device=weights.device)
    beyond = ids >= weights.shape[1]
    inside = weights.gather(1, ids.clamp_max(weights.shape[1] - 1)).masked_fill_(beyond, 0)
    found, _ = _cross(inside.cumsum(-1, dtype=torch.float64), share)
    return block * BLOCK + found


def _cross(running: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
    """Where each row's running sum [N, C] crosses `at` times its last, and how far between."""
    total = running[:, -1]
    target = torch.minimum(at * total, total.nextafter(torch.zeros_like(total))).unsqueeze(1)
    found = torch.searchsorted(running, target, right=True)
    after = running.gather(1, found)
    before = running.gather(1, (found - 1).clamp_min(0)).masked_fill_(found == 0, 0)
    share = ((target - before) / (after - before)).clamp_(0, 1)
    return found.squeeze(1), share.squeeze(1)
