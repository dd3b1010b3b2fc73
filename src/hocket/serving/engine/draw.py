"""Draws: tokens chosen at random from rows of logits, each by one number of its own.

    x = (logits - largest) / temperature
    top-k    keep the k largest, and equals of the last of them              (Fan et al. 2018)
    top-p    keep the largest until they hold the share p of what is left    (Holtzman et al. 2020)
    min-p    keep those with at least min_p times the largest probability    (Nguyen et al. 2024)
    token    the first, in the order of ids, at which the cumulative probability of what was kept
             exceeds the row's number in [0, 1)

This is the order and these are the definitions of transformers' logits processors; where it leaves
open which of equals at the edge of top-p are kept, those of the lowest ids are. The cumulative
probability goes by id and not by rank, because two tokens of nearly equal logits may change ranks
when a row is computed in another batch, and ids do not.

Top-k and top-p first look at the 64 blocks of 32 entries with the largest maxima: their 128
largest entries mostly decide. Whether they do is seen from the largest entry left out; rows that
need more are done whole. Both ways give the same tokens.

Legend: N rows, V vocabulary, C candidates.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from hocket.serving.engine.likeliest import BLOCK, block_maxima, look_into

_SMALL = 32
"""Entries of the blocks that top-k and top-p look into."""
_BLOCKS, _MOST_BLOCKS = 64, 256
_LARGEST = 128
_BUCKETS = 2048
_COLD, _HOT = 1e-30, 1e30
"""Bounds of what fp32 logits are divided by: beyond them 0 / 0 and inf / inf would be met."""


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


def draw(logits: Tensor, choices: Choices) -> tuple[Tensor, Tensor]:
    """One token per row of `logits` [N, V], fp32, -inf for tokens that must not come.

    Returns:
        tokens [N]; whether each row could be drawn from [N]: not if its largest logit is NaN or
        infinite. Where not, the token means nothing.
    """
    ranked = any(one is not None for one in choices.top_k)
    cut = ranked or any(one is not None and one < 1 for one in choices.top_p)
    maxima = block_maxima(logits, _SMALL if cut else BLOCK)
    peak = maxima.amax(-1, keepdim=True)
    good = peak.isfinite()
    x = logits - peak
    maxima.sub_(peak)
    if not bool(good.all()):
        x.masked_fill_(~good, 0)  # whatever comes of it, no other row is harmed
        maxima.masked_fill_(~good, 0)
    if any(one != 1 for one in choices.temperature):
        heat = _column([min(max(one, _COLD), _HOT) for one in choices.temperature], x)
        x.div_(heat)
        maxima.div_(heat)
    at = torch.tensor(choices.at, dtype=torch.float64, device=x.device)
    floor = _column([one or 0.0 for one in choices.min_p], x) if any(choices.min_p) else None
    if cut:
        rows = _Rows(x=x, maxima=maxima, share=_shares(choices.top_p, x))
        if ranked:
            count = [min(one or x.shape[1], x.shape[1]) for one in choices.top_k]
            rows.count = torch.tensor(count, device=x.device).unsqueeze(1)
        tokens = _truncated(rows, at, floor)
    else:
        tokens = inverse_cdf(_above(torch.softmax(x, -1), floor), at)
    return tokens, good.squeeze(1)


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


@dataclasses.dataclass(kw_only=True)
class _Rows:
    """Rows that top-k or top-p cuts.

    Attributes:
        x: [N, V], 0 at the largest.
        maxima: of its blocks of 32 entries.
        share: [N, 1], top-p; 2, which is never reached, where all are kept.
        count: [N, 1], top-k; None: top-p alone.
        probability: [N, V], softmax of `x`, made where there is no top-k.
    """

    x: Tensor
    maxima: Tensor
    share: Tensor
    count: Tensor | None = None
    probability: Tensor | None = None


def _shares(top_p: Sequence[float | None], like: Tensor) -> Tensor:
    return _column([2.0 if one is None or one >= 1 else one for one in top_p], like)


def _truncated(rows: _Rows, at: Tensor, floor: Tensor | None) -> Tensor:
    """Tokens [N] of rows that top-k or top-p cuts."""
    if rows.count is None:
        rows.probability = torch.softmax(rows.x, -1)
    tokens, decided = _from_candidates(rows, at, floor)
    if bool(decided.all()):
        return tokens
    left = (~decided).nonzero().squeeze(1)
    x = rows.x[left]
    if rows.count is not None:
        _keep_largest(x, rows.count[left])
        probability = torch.softmax(x, -1)
    else:
        assert rows.probability is not None
        probability = rows.probability[left]
    nucleus = _nucleus_by_sort if x.is_cuda else _nucleus_by_buckets
    nucleus(x, probability, rows.share[left])
    tokens[left] = inverse_cdf(
        _above(probability, None if floor is None else floor[left]), at[left]
    )
    return tokens


def _from_candidates(rows: _Rows, at: Tensor, floor: Tensor | None) -> tuple[Tensor, Tensor]:
    """Tokens [N] from the entries of a few blocks, and whether these decided [N]."""
    x, maxima, share, count = rows.x, rows.maxima, rows.share, rows.count
    num_blocks = maxima.shape[1]
    most = _BLOCKS if count is None else int(count.amax())
    looked = min(max(_BLOCKS, min(most, _MOST_BLOCKS)), num_blocks)
    top = maxima.topk(min(looked + 1, num_blocks))
    ids, candidates = look_into(x, top.indices[:, :looked].sort(-1).values, _SMALL)
    # some more than the largest k, because the last of them must be seen to be followed by less
    ordered = candidates.topk(min(max(_LARGEST, looked + 8), candidates.shape[1])).values
    # Of what is larger than `edge`, nothing is missing from `ordered`.
    edge = x.new_full((x.shape[0], 1), -torch.inf)
    if num_blocks > looked:
        edge = torch.maximum(edge, top.values[:, looked:])
    if ordered.shape[1] < candidates.shape[1]:
        edge = torch.maximum(edge, ordered[:, -1:])
    if count is not None:
        least = ordered.gather(1, (count - 1).clamp_max(ordered.shape[1] - 1))
        weights = ordered.exp().masked_fill_(ordered < least, 0)
        decided = (least > edge) & (count <= ordered.shape[1])
    else:
        assert rows.probability is not None
        # x is 0 at the largest, so that its probability turns exp(x) into probabilities
        weights = ordered.exp().mul_(rows.probability.amax(-1, keepdim=True))
        decided = torch.ones_like(at, dtype=torch.bool).unsqueeze(1)
    running = weights.cumsum(-1, dtype=torch.float64)
    total = running[:, -1:] if count is not None else 1.0
    before = running.roll(1, -1)
    before[:, 0] = 0
    kept = ((before < share * total) & (weights > 0)).sum(-1, keepdim=True).clamp_min_(1)
    last = ordered.gather(1, kept - 1)
    decided = (decided & (last > edge)) | edge.isneginf()
    # of equals of the last one, this many are kept
    equals = kept - (ordered > last).sum(-1, keepdim=True)
    weights = candidates.exp().masked_fill_(candidates < last, 0)
    same = candidates == last
    if bool((same.sum(-1, keepdim=True) > equals).any()):
        weights.masked_fill_(same & (same.cumsum(-1) > equals), 0)
    weights = _above(weights, floor)
    found = inverse_cdf(weights, at).unsqueeze(1)
    return ids.gather(1, found).squeeze(1), decided.squeeze(1)


def _keep_largest(x: Tensor, count: Tensor) -> None:
    """Set all but each row's `count` [N, 1] largest entries, and equals of the last, to -inf."""
    for row, kept in zip(x, count.squeeze(1).tolist(), strict=True):
        if kept < x.shape[1]:
            row.masked_fill_(row < row.topk(kept).values[-1], -torch.inf)


def _nucleus_by_sort(x: Tensor, probability: Tensor, share: Tensor) -> None:
    """Set `probability` [N, V] of what top-p drops to 0, from sorted rows."""
    order = x.sort(dim=-1, descending=True, stable=True).indices
    running = probability.gather(1, order).cumsum(-1, dtype=torch.float64)
    before = running.roll(1, -1)
    before[:, 0] = 0
    dropped = torch.zeros_like(x, dtype=torch.bool)
    dropped.scatter_(1, order, before >= share * running[:, -1:])
    dropped.scatter_(1, order[:, :1], False)
    probability.masked_fill_(dropped, 0)


def _nucleus_by_buckets(x: Tensor, probability: Tensor, share: Tensor) -> None:
    """The same without sorting more than one of 2048 buckets of each row.

    The buckets cut the range of a row's entries evenly; the running sum over buckets tells in
    which the nucleus ends. Where it lies among entries below e^-40 of the largest, that is the
    last bucket, whole.
    """
    for row, chances, wanted in zip(x, probability, share.squeeze(1).tolist(), strict=True):
        depth = row.clamp(min=-40.0).neg_()
        span = float(depth.amax()) or 1.0
        bucket = depth.mul_((_BUCKETS - 1) / span).int()
        mass = torch.bincount(bucket, weights=chances.double(), minlength=_BUCKETS).cumsum(0)
        target = wanted * float(mass[-1])
        edge = int(torch.searchsorted(mass, target))  # the first that reaches it
        if edge >= _BUCKETS:
            continue
        before = float(mass[edge - 1]) if edge else 0.0
        inside = (bucket == edge).nonzero().squeeze(1)
        order = row[inside].sort(dim=-1, descending=True, stable=True).indices
        running = chances[inside[order]].cumsum(0, dtype=torch.float64) + before
        kept = 1 + int((running[:-1] < target).sum())
        dropped = bucket > edge
        dropped[inside[order[kept:]]] = True
        chances.masked_fill_(dropped, 0)


def _above(weights: Tensor, floor: Tensor | None) -> Tensor:
    """`weights` [N, C] without those below `floor` [N, 1] times the row's largest, in place."""
    if floor is None:
        return weights
    return weights.masked_fill_(weights < floor * weights.amax(-1, keepdim=True), 0)


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device).unsqueeze(1)
