"""Ring attention: keys and values travel from rank to rank, queries stay.

    step t of rank r       keys of rank r - t   ->  block of its queries with them, merged
                           meanwhile they are on their way to rank r + 1
    backward               keys and values travel again, and their gradients with them; after n
                           steps these are back where they belong

Liu et al. 2023, "Ring Attention with Blockwise Transformers", arXiv:2310.01889, section 3, in the
zigzag order of `zigzag`. Each rank sends, for one layer and microbatch, its keys and values n - 1
times in forward, n - 1 times in backward, and their gradients (in fp32) n times.

A shift is one all-to-all in which each rank has rows for one other alone: one collective of all
ranks, so no order of sends and receives can wait for itself, under any rule of NCCL.

Legend: B rows, A query heads, K key/value heads, s tokens of this rank, D and E sizes of keys and
values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hocket.runtime.collectives import Work, begin_shift
from hocket.runtime.context_parallel import blocks
from hocket.runtime.context_parallel.blocks import Scores, Visible
from hocket.runtime.context_parallel.zigzag import Piece, piece, positions
from hocket.runtime.mesh import Axis
from hocket.runtime.record import Recorder


class Ring:
    """Attention of one rank's tokens over all ranks of an axis.

    Args:
        axis: the ranks, in the order in which chunks are dealt.
        recorder: of their collectives.
    """

    name = "ring"

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
        """Causal attention of query [B, A, s, D] to key [B, K, s, D] and value [B, K, s, E].

        Args:
            scale: of the scores. None: 1 / sqrt(D).
            softcap: bound of the scores, by a hyperbolic tangent. None: none.
            sinks: [A], of each head a score that has no value. None: none.
            lowest: [B or 1, s] integers, the first place of the sequence that each query sees
                (windows, documents). None: 0.

        Returns:
            [B, A, s, E] in the query's dtype.
        """
        scores = Scores(scale=query.shape[-1] ** -0.5 if scale is None else scale, softcap=softcap)
        attend: Any = _RingAttention.apply
        found: Tensor = attend(query, key, value, sinks, lowest, scores, self)
        return found

    def place(self, index: int, length: int, device: torch.device) -> Tensor:
        """[s]: places in the sequence of the tokens of one rank."""
        return positions(length * self.axis.size, index, self.axis.size, device)

    def visible(self, found: Piece, source: int, length: int, lowest: Tensor | None) -> Visible:
        """What the queries of a piece see of its keys."""
        if lowest is None:
            return not found.causal
        queries = self.place(self.axis.index, length, lowest.device)[found.queries].unsqueeze(1)
        keys = self.place(source, length, lowest.device)[found.keys]
        below = lowest[:, found.queries].unsqueeze(-1)
        return ((keys <= queries) & (keys >= below)).unsqueeze(1)

    def shift(self, tensor: Tensor) -> tuple[Tensor, Work | None]:
        """Begin to send a flat tensor to the next rank; that of the one before."""
        return begin_shift(tensor, self.axis, self.recorder)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]  # noqa: PLR0917
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        lowest: Tensor | None,
        scores: Scores,
        ring: Ring,
    ) -> Tensor:
        length, ranks, index = query.shape[2], ring.axis.size, ring.axis.index
        out = lse = None
        travelling = _flat(key, value)
        for step in range(ranks):
            source = (index - step) % ranks
            arriving, work = (None, None) if step == ranks - 1 else ring.shift(travelling)
            k, v = _parts(travelling, key, value)
            part = piece(index, source, length)
            some, some_lse = blocks.forward(
                query[:, :, part.queries], k[:, :, part.keys], v[:, :, part.keys], scores,
                ring.visible(part, source, length, lowest),
            )  # fmt: skip
            if out is None or lse is None:
                out, lse = some, some_lse
            else:
                rows = part.queries
                merged = blocks.merge(out[:, :, rows], lse[:, :, rows], some, some_lse)
                if rows.start == 0:
                    out, lse = merged
                else:
                    out = torch.cat([out[:, :, : rows.start], merged[0]], 2)
                    lse = torch.cat([lse[:, :, : rows.start], merged[1]], 2)
            if work is not None:
                work.wait()
            if arriving is not None:
                travelling = arriving
        assert out is not None
        assert lse is not None
        if sinks is not None:  # a key of that score, and of value 0
            score = sinks.to(lse.dtype).view(1, -1, 1).expand_as(lse)
            out, lse = blocks.merge(out, lse, torch.zeros_like(out), score)
        found = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, sinks, lowest, found, lse)
        ctx.scores, ctx.ring = scores, ring
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        query, key, value, sinks, lowest, out, lse = ctx.saved_tensors
        ring, scores = ctx.ring, ctx.scores
        length, ranks, index = query.shape[2], ring.axis.size, ring.axis.index
        wide = torch.promote_types(query.dtype, torch.float32)
        dquery = torch.zeros_like(query, dtype=wide)
        travelling = _flat(key, value)
        # Gradients of the keys and values that are here now; they travel one step behind these.
        grads = torch.zeros_like(travelling, dtype=wide)
        grads_work: Work | None = None
        for step in range(ranks):
            source = (index - step) % ranks
            arriving, work = (None, None) if step == ranks - 1 else ring.shift(travelling)
            k, v = _parts(travelling, key, value)
            part = piece(index, source, length)
            rows, keys = part.queries, part.keys
            dq, dk, dv = blocks.backward(
                grad[:, :, rows], query[:, :, rows], k[:, :, keys], v[:, :, keys],
                out[:, :, rows], lse[:, :, rows], scores,
                ring.visible(part, source, length, lowest),
            )  # fmt: skip
            dquery[:, :, rows] += dq
            if grads_work is not None:
                grads_work.wait()
            dkey, dvalue = _parts(grads, key, value)
            dkey[:, :, keys] += dk
            dvalue[:, :, keys] += dv
            grads, grads_work = ring.shift(grads)
            if work is not None:
                work.wait()
            if arriving is not None:
                travelling = arriving
        if grads_work is not None:
            grads_work.wait()
        dkey, dvalue = _parts(grads, key, value)
        dsinks = None
        if sinks is not None:
            delta = (grad.to(wide) * out.to(wide)).sum(-1)
            weight = torch.exp(sinks.to(wide).view(1, -1, 1) - lse)
            dsinks = -(weight * delta).sum((0, 2)).to(sinks.dtype)
        return (
            dquery.to(query.dtype), dkey.to(key.dtype), dvalue.to(value.dtype), dsinks, None, None,
            None,
        )  # fmt: skip


def _flat(key: Tensor, value: Tensor) -> Tensor:
    """Keys and values as one message."""
    return torch.cat([key.reshape(-1), value.reshape(-1)])


def _parts(flat: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse of `_flat`: views of the message, of these shapes."""
    count = key.numel()
    return flat[:count].view(key.shape), flat[count:].view(value.shape)
