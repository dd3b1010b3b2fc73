"""Truncation: what top-k, top-p and min-p leave of rows of logits.

    x = (logits - largest) / temperature
    top-k    keep the k largest, and equals of the last of them              (Fan et al. 2018)
    top-p    keep the largest until they hold the share p of what is left    (Holtzman et al. 2020)
    min-p    keep those with at least min_p times the largest probability    (Nguyen et al. 2024)

This is the order and these are the definitions of transformers' logits processors; where it leaves
open which of equals at the edge of top-p are kept, those of the lowest ids are.

First the 64 blocks of 32 entries with the largest maxima are looked into: their 128 largest entries
mostly decide. Whether they do is seen from the largest entry left out. Rows that need more are done
whole, and give the same.

Legend: N rows, V vocabulary, C candidates.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from hocket.serving.engine.top_logits import block_maxima, look_into

SMALL = 32
"""Entries of the blocks that are looked into."""
_BLOCKS, _MOST_BLOCKS = 64, 256
_LARGEST = 128
_BUCKETS = 2048
COLD, HOT = 1e-30, 1e30
"""Bounds of what fp32 logits are divided by: beyond them 0 / 0 and inf / inf would be met."""


class Scratch:
    """Memory for rows, kept from step to step: fresh memory costs more than what is done in it."""

    def __init__(self) -> None:
        self._held: dict[str, Tensor] = {}

    def like(self, use: str, rows: Tensor) -> Tensor:
        """Room of the shape of `rows`, with whatever was in it, until it is asked for again."""
        held = self._held.get(use)
        if held is None or held.numel() < rows.numel() or held.device != rows.device:
            held = self._held[use] = torch.empty(rows.numel(), device=rows.device)
        return held[: rows.numel()].view(rows.shape)


class Heated:
    """x of some rows, made only of what is looked at.

    Args:
        logits: [N, V], fp32.
        temperature: of each row, above 0.
        block: entries of the blocks whose maxima are taken.

    Attributes:
        maxima: [N, B] of x's blocks.
        good: [N, 1], whether the row's largest logit is a finite number. Where not, x is 0.
    """

    def __init__(
        self, logits: Tensor, temperature: Sequence[float], block: int, scratch: Scratch
    ) -> None:
        self.logits = logits
        self.scratch = scratch
        maxima = block_maxima(logits, block)
        self._peak = maxima.amax(-1, keepdim=True)
        self.good = self._peak.isfinite()
        self._all_good = bool(self.good.all())
        self._heat = None
        if any(one != 1 for one in temperature):
            heat = [min(max(one, COLD), HOT) for one in temperature]
            self._heat = _column(heat, logits)
        self.maxima = self.of(maxima)

    def of(self, values: Tensor, out: Tensor | None = None) -> Tensor:
        """x of some `values` [N, any] of each row."""
        x = torch.sub(values, self._peak, out=out)
        if self._heat is not None:
            x.div_(self._heat)
        if not self._all_good:
            x.masked_fill_(~self.good, 0)
        return x

    def whole(self) -> Tensor:
        """x of everything: [N, V], in memory that is taken again with the next rows."""
        return self.of(self.logits, self.scratch.like("x", self.logits))

    def softmax(self) -> Tensor:
        """Its probabilities, likewise."""
        return torch.softmax(self.whole(), -1, out=self.scratch.like("softmax", self.logits))


@dataclasses.dataclass(kw_only=True)
class Cut:
    """How rows are cut; None where none of them is.

    Attributes:
        count: [N, 1], top-k; V where a row has none.
        most: the largest top-k.
        share: [N, 1], top-p; 2, which is never reached, where a row has none.
        floor: [N, 1], min-p.
    """

    count: Tensor | None
    most: int
    share: Tensor | None
    floor: Tensor | None

    @classmethod
    def of(
        cls,
        top_k: Sequence[int | None],
        top_p: Sequence[float | None],
        min_p: Sequence[float | None],
        like: Tensor,
    ) -> Cut:
        """Of rows of `like` [N, V]."""
        size = like.shape[1]
        count = share = None
        most = max((one for one in top_k if one is not None and one < size), default=0)
        if most:
            whole = [min(one or size, size) for one in top_k]
            count = torch.tensor(whole, device=like.device).unsqueeze(1)
        if any(one is not None and one < 1 for one in top_p):
            share = _column([2.0 if one is None or one >= 1 else one for one in top_p], like)
        floor = _column([one or 0.0 for one in min_p], like) if any(min_p) else None
        return cls(count=count, most=most, share=share, floor=floor)

    @property
    def nothing(self) -> bool:
        """Whether all rows keep everything."""
        return self.count is None and self.share is None and self.floor is None

    def rows(self, wanted: Tensor) -> Cut:
        parts = (self.count, self.share, self.floor)
        count, share, floor = (None if part is None else part[wanted] for part in parts)
        return Cut(count=count, most=self.most, share=share, floor=floor)


def kept_entries(
    heated: Heated, cut: Cut, probability: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """What is kept of the entries of a few blocks.

    Args:
        heated: with maxima of blocks of 32.
        probability: softmax of x; needed for top-p without top-k.

    Returns:
        token ids [N, C], ascending, and their weights, 0 for what is dropped; whether nothing of
        the row is missing [N].
    """
    num_blocks = heated.maxima.shape[1]
    looked = min(max(_BLOCKS, min(cut.most, _MOST_BLOCKS)), num_blocks)
    top = heated.maxima.topk(min(looked + 1, num_blocks))
    ids, entries = look_into(heated.logits, top.indices[:, :looked].sort(-1).values, SMALL)
    entries = heated.of(entries)
    # some more than the largest k, because the last of them must be seen to be followed by less
    ordered = entries.topk(min(max(_LARGEST, looked + 8), entries.shape[1])).values
    # Of what is larger than `edge`, nothing is missing from `ordered`.
    edge = torch.full_like(heated.good, -torch.inf, dtype=entries.dtype)
    if num_blocks > looked:
        edge = torch.maximum(edge, top.values[:, looked:])
    if ordered.shape[1] < entries.shape[1]:
        edge = torch.maximum(edge, ordered[:, -1:])
    weights = ordered.exp()
    ranked = torch.zeros_like(heated.good)  # whether top-k is decided
    if cut.count is not None:
        least = ordered.gather(1, (cut.count - 1).clamp_max(ordered.shape[1] - 1))
        weights.masked_fill_(ordered < least, 0)
        ranked = (least > edge) & (cut.count <= ordered.shape[1])
    kept = (weights > 0).sum(-1, keepdim=True)
    if cut.share is not None:
        running = weights.cumsum(-1, dtype=torch.float64)
        if cut.count is not None:
            total = running[:, -1:]
        else:
            assert probability is not None
            # x is 0 at the largest: its probability is 1 / sum exp(x)
            total = probability.amax(-1, keepdim=True).double().reciprocal()
            ranked = torch.ones_like(ranked)
        before = running.roll(1, -1)
        before[:, 0] = 0
        kept = torch.minimum(kept, (before < cut.share * total).sum(-1, keepdim=True))
    kept.clamp_min_(1)
    last = ordered.gather(1, kept - 1)
    decided = (ranked & (last > edge)) | edge.isneginf() | ~heated.good
    if cut.floor is not None:
        # What is left out is too improbable, whatever else it is. But where top-p is cut out of an
        # undecided top-k, it is not known how far it goes.
        known = ranked | (True if cut.share is None else cut.share > 1)
        decided |= known & (edge.exp() < cut.floor)
    weights = entries.exp().masked_fill_(entries < last, 0)
    same = entries == last
    equals = kept - (ordered > last).sum(-1, keepdim=True)
    if bool((same.sum(-1, keepdim=True) > equals).any()):
        weights.masked_fill_(same & (same.cumsum(-1) > equals), 0)
    return ids, above(weights, cut.floor), decided.squeeze(1)


def kept_rows(heated: Heated, wanted: Tensor, cut: Cut) -> Tensor:
    """What is kept of some whole rows: weights [len(wanted), V], 0 for what is dropped.

    In memory that is taken again with the next rows.
    """
    x = heated.whole()
    if len(wanted) < len(x):
        x, cut = x[wanted], cut.rows(wanted)
    if cut.count is not None:
        for row, kept in zip(x, cut.count.squeeze(1).tolist(), strict=True):
            if kept < x.shape[1]:
                row.masked_fill_(row < row.topk(kept).values[-1], -torch.inf)
    probability = torch.softmax(x, -1, out=heated.scratch.like("softmax", x))
    if cut.share is not None:
        nucleus = nucleus_by_sort if x.is_cuda else nucleus_by_buckets
        nucleus(x, probability, cut.share)
    return above(probability, cut.floor)


def nucleus_by_sort(x: Tensor, probability: Tensor, share: Tensor) -> None:
    """Set `probability` [N, V] of what top-p drops to 0, from sorted rows."""
    order = x.sort(dim=-1, descending=True, stable=True).indices
    running = probability.gather(1, order).cumsum(-1, dtype=torch.float64)
    before = running.roll(1, -1)
    before[:, 0] = 0
    dropped = torch.zeros_like(x, dtype=torch.bool)
    dropped.scatter_(1, order, before >= share * running[:, -1:])
    dropped.scatter_(1, order[:, :1], False)
    probability.masked_fill_(dropped, 0)


def nucleus_by_buckets(x: Tensor, probability: Tensor, share: Tensor) -> None:
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


def above(weights: Tensor, floor: Tensor | None) -> Tensor:
    """`weights` [N, C] without those below `floor` [N, 1] times the row's largest, in place."""
    if floor is None:
        return weights
    return weights.masked_fill_(weights < floor * weights.amax(-1, keepdim=True), 0)


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    """[N, 1] of N numbers."""
    return torch.tensor(values, dtype=like.dtype, device=like.device).unsqueeze(1)
