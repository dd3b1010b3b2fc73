"""Ring: keys and values go round the context ranks while each attends to those that it has.

    step 0     rank r attends to its own keys, causally, and sends them to r + 1
    step i     it has those of rank r - i, and
                   r - i >= 0   all queries see the first half of them    (both chunks are later)
                   r - i < 0    the second half of its queries sees all of them
    backward   keys and values go round once more; their gradients follow one step behind, in fp32,
               each rank adding its part, and come home from the last one

So every step but the first is half a block, on every rank (`split` says which chunks a rank has).
c - 1 messages of keys and values each way, and c - 1 of gradients (Liu et al. 2023, Ring Attention
with Blockwise Transformers, section 3).

Each message is one batch with the one that comes (`collectives.exchange`), so no order of sends and
receives among ranks can deadlock.

Legend: as in `attend`; c context ranks.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from hocket.runtime.collectives import CollectiveWork, exchange
from hocket.runtime.context_parallel.attend import (
    Places,
    Scores,
    WholeAttention,
    attend_backward,
    attend_part,
    merge_parts,
)
from hocket.runtime.context_parallel.split import token_indices
from hocket.runtime.mesh import Axis
from hocket.runtime.record import Recorder


@dataclasses.dataclass
class _Message:
    """A tensor on its way to the next rank, and the one that comes from the one before."""

    sent: Tensor
    received: Tensor
    work: CollectiveWork

    def wait(self) -> Tensor:
        """What has come."""
        self.work.wait()
        return self.received


def _pass_on(tensor: Tensor, axis: Axis, recorder: Recorder) -> _Message:
    """Begin to hand a tensor to the next rank and to take the previous one's."""
    tensor = tensor.contiguous()
    coming = torch.empty_like(tensor)
    after, before = (axis.index + 1) % axis.size, (axis.index - 1) % axis.size
    work = exchange(tensor, coming, axis, recorder, target=after, source=before)
    return _Message(tensor, coming, work)


@dataclasses.dataclass(frozen=True)
class _Step:
    """What is computed of a rank's block of keys.

    Attributes:
        queries: how many of this rank's, the last ones. keys: how many of the block's, the first.
        causal: query i sees the keys to i: it is this rank's own block.
    """

    queries: int
    keys: int
    causal: bool


def _step(mine: int, theirs: int, length: int) -> _Step:
    if mine == theirs:
        return _Step(length, length, True)
    half = length // 2
    return _Step(length, half, False) if theirs < mine else _Step(half, length, False)


def _places(mine: int, theirs: int, axis: Axis, part: _Step, query: Tensor) -> Places:
    whole = query.shape[2] * axis.size
    queries, keys = (token_indices(whole, rank, axis.size, query.device) for rank in (mine, theirs))
    return Places(queries[-part.queries :], keys[: part.keys])


class Ring(torch.autograd.Function):
    """Attention of this rank's queries to the keys of all context ranks."""

    @staticmethod
    def forward(  # type: ignore[override]  # noqa: PLR0917
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, scores: Scores,
        axis: Axis, recorder: Recorder,
    ) -> Tensor:  # fmt: skip
        me, length = axis.index, query.shape[2]
        held = torch.cat([key, value], -1)
        for distance in range(axis.size):
            message = _pass_on(held, axis, recorder) if distance + 1 < axis.size else None
            theirs = (me - distance) % axis.size
            part = _step(me, theirs, length)
            k, v = _parts(held, key.shape[-1], part.keys)
            mask = None
            if scores.visible is not None:
                mask = _places(me, theirs, axis, part, query)
            seeing = query[:, :, -part.queries :]
            found, found_lse = attend_part(seeing, k, v, scores, mask, part.causal)
            if distance == 0:
                out, lse = found, found_lse
            else:
                merge_parts(
                    out[:, :, -part.queries :], lse[:, :, -part.queries :], found, found_lse
                )
            if message is not None:
                held = message.wait()
        if sinks is not None:
            sink = sinks.to(lse.dtype).view(1, -1, 1)
            total = torch.logaddexp(lse, sink)
            out = out * (lse - total).exp().unsqueeze(-1)
            lse = total
        out = out.to(query.dtype)
        ctx.scores, ctx.axis, ctx.recorder = scores, axis, recorder
        ctx.save_for_backward(query, key, value, sinks, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        query, key, value, sinks, out, lse = ctx.saved_tensors
        scores, axis, recorder = ctx.scores, ctx.axis, ctx.recorder
        me, length, size = axis.index, query.shape[2], key.shape[-1]
        delta = (grad.to(lse.dtype) * out).sum(-1)
        whole = WholeAttention(grad.to(query.dtype), out, lse, delta)
        dsinks = None
        if sinks is not None:
            weight = (sinks.to(lse.dtype).view(1, -1, 1) - lse).exp()
            dsinks = -(weight * delta).sum((0, 2)).to(sinks.dtype).view_as(sinks)
        held = torch.cat([key, value], -1)
        own = sums = torch.zeros_like(held, dtype=lse.dtype)
        arriving: _Message | None = None
        dq = torch.zeros_like(query, dtype=lse.dtype)
        for distance in range(axis.size):
            message = _pass_on(held, axis, recorder) if distance + 1 < axis.size else None
            theirs = (me - distance) % axis.size
            part = _step(me, theirs, length)
            k, v = _parts(held, size, part.keys)
            mask = None
            if scores.visible is not None:
                mask = _places(me, theirs, axis, part, query)
            seeing = query[:, :, -part.queries :]
            a, b, c = attend_backward(
                seeing, k, v, whole.last(part.queries), scores, mask, part.causal
            )
            dq[:, :, -part.queries :] += a
            # Waited for before the next is begun: one order of messages on every rank.
            if message is not None:
                held = message.wait()
            both = torch.cat([b, c], -1)
            if distance == 0:
                own = both
                continue
            if arriving is not None:
                sums = arriving.wait()
            sums[:, :, : part.keys] += both
            arriving = _pass_on(sums, axis, recorder)
        if arriving is not None:
            own = own + arriving.wait()
        dk, dv = torch.split(own.to(key.dtype), [size, value.shape[-1]], -1)
        return dq.to(query.dtype), dk, dv, dsinks, None, None, None


def _parts(held: Tensor, size: int, count: int) -> tuple[Tensor, Tensor]:
    """The first `count` keys and values of those that travel side by side."""
    k, v = torch.split(held[:, :, :count], [size, held.shape[-1] - size], -1)
    return k.contiguous(), v.contiguous()
