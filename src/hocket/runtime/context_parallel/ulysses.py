"""Ulysses: all-to-alls turn tokens of all heads into all tokens of some heads, and back.

    [B, A, s, D] on each rank  ->  [B, A / n, S, D]  attention of whole sequences  ->  back

Jacobs et al. 2023, "DeepSpeed Ulysses", arXiv:2309.14509, section 3. Fewer key/value heads than
ranks are sent several times. A rank sends 3 (queries and out, keys, values) of its tensors less its
own n-th, however many ranks there are, and cannot overlap that with the attention it waits for.

Legend: B rows, A query heads, K key/value heads, S tokens of a sequence, s = S / n of this rank, D
and E sizes of keys and values.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from hocket.runtime.collectives import all_gather, all_to_all
from hocket.runtime.context_parallel import blocks
from hocket.runtime.context_parallel.blocks import Scores, Visible
from hocket.runtime.context_parallel.zigzag import gathered_order
from hocket.runtime.mesh import Axis
from hocket.runtime.record import Recorder


def heads_divide(heads: int, kv_heads: int, ranks: int) -> bool:
    """Whether query heads divide over the ranks, and key/value heads do or are a divisor of
    them."""
    return heads % ranks == 0 and (kv_heads % ranks == 0 or ranks % kv_heads == 0)


class Ulysses:
    """Attention of one rank's tokens over all ranks of an axis; as `ring.Ring`."""

    name = "ulysses"

    def __init__(self, axis: Axis, recorder: Recorder) -> None:
        self.axis = axis
        self.recorder = recorder

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        lowest: Tensor | None = None,
    ) -> Tensor:
        """As `ring.Ring.attend`; `heads_divide` must hold."""
        axis, recorder = self.axis, self.recorder
        ranks, heads, kv_heads = axis.size, query.shape[1], key.shape[1]
        assert heads_divide(heads, kv_heads, ranks), (heads, kv_heads, ranks)
        scores = Scores(scale=query.shape[-1] ** -0.5 if scale is None else scale, softcap=softcap)
        times = max(1, ranks // kv_heads)
        if times > 1:
            key, value = (t.repeat_interleave(times, 1) for t in (key, value))
        kinds: tuple[Any, ...] = (_ToHeads, _ToTokens, _Attention)
        to_heads, to_tokens, attend = kinds
        whole = [to_heads.apply(t, axis, recorder) for t in (query, key, value)]
        visible: Visible = False
        if lowest is not None:
            length = query.shape[2] * ranks
            every = all_gather(lowest.contiguous(), axis, recorder, dim=1)
            below = every[:, gathered_order(length, ranks, query.device)].unsqueeze(-1)
            place = torch.arange(length, device=query.device)
            visible = ((place <= place.unsqueeze(1)) & (place >= below)).unsqueeze(1)
        mine = None
        if sinks is not None:
            own = heads // ranks
            mine = sinks[axis.index * own : (axis.index + 1) * own]
        out = attend.apply(*whole, mine, visible, scores)
        found: Tensor = to_tokens.apply(out, axis, recorder)
        return found


class _Attention(torch.autograd.Function):
    """Attention of whole sequences by one block."""

    @staticmethod
    def forward(  # type: ignore[override]  # noqa: PLR0917
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        visible: Visible,
        scores: Scores,
    ) -> Tensor:
        out, lse = blocks.forward(query, key, value, scores, visible)
        if sinks is not None:
            score = sinks.to(lse.dtype).view(1, -1, 1).expand_as(lse)
            out, lse = blocks.merge(out, lse, torch.zeros_like(out), score)
        found = out.to(query.dtype)
        mask = visible if isinstance(visible, Tensor) else None
        ctx.save_for_backward(query, key, value, sinks, mask, found, lse)
        ctx.visible, ctx.scores = visible if mask is None else None, scores
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        query, key, value, sinks, mask, out, lse = ctx.saved_tensors
        visible = ctx.visible if mask is None else mask
        grads = blocks.backward(grad, query, key, value, out, lse, ctx.scores, visible)
        dsinks = None
        if sinks is not None:
            wide = lse.dtype
            delta = (grad.to(wide) * out.to(wide)).sum(-1)
            weight = torch.exp(sinks.to(wide).view(1, -1, 1) - lse)
            dsinks = -(weight * delta).sum((0, 2)).to(sinks.dtype)
        wanted = zip(grads, (query, key, value), strict=True)
        return (*(found.to(given.dtype) for found, given in wanted), dsinks, None, None)


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: Axis, recorder: Recorder) -> Tensor:  # type: ignore[override]
        ctx.axis, ctx.recorder = axis, recorder
        return _to_heads(tensor, axis, recorder)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return _to_tokens(grad, ctx.axis, ctx.recorder), None, None


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: Axis, recorder: Recorder) -> Tensor:  # type: ignore[override]
        ctx.axis, ctx.recorder = axis, recorder
        return _to_tokens(tensor, axis, recorder)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return _to_heads(grad, ctx.axis, ctx.recorder), None, None


def _to_heads(tensor: Tensor, axis: Axis, recorder: Recorder) -> Tensor:
    """[B, A, s, D] to [B, A / n, S, D], tokens in the order of the sequence."""
    rows, heads, length, size = tensor.shape
    by_rank = tensor.view(rows, axis.size, heads // axis.size, length, size).movedim(1, 0)
    found = all_to_all(by_rank.contiguous(), axis, recorder)  # [n, B, A / n, s, D]
    whole = found.permute(1, 2, 0, 3, 4).reshape(rows, -1, axis.size * length, size)
    order = gathered_order(axis.size * length, axis.size, tensor.device)
    return whole.index_select(2, order)


def _to_tokens(tensor: Tensor, axis: Axis, recorder: Recorder) -> Tensor:
    """The inverse of `_to_heads`."""
    rows, heads, length, size = tensor.shape
    order = torch.argsort(gathered_order(length, axis.size, tensor.device))
    dealt = tensor.index_select(2, order).view(rows, heads, axis.size, -1, size)
    found = all_to_all(dealt.movedim(2, 0).contiguous(), axis, recorder)  # [n, B, A / n, s, D]
    own = math.prod((axis.size, heads))
    return found.movedim(0, 1).reshape(rows, own, -1, size)
