"""Ulysses: an all-to-all turns parts of the sequence into parts of the heads, and back.

    [B, A, S/c, D]  ->  all-to-all of queries, keys and values in one  ->  [B, A/c, S, D]
    attention of whole sequences
    [B, A/c, S, E]  ->  all-to-all  ->  [B, A, S/c, E]

Backward is the same the other way (Jacobs et al. 2023, DeepSpeed Ulysses, section 3). The heads of
queries and of keys must divide over c.

Legend: as in `attend`; c context ranks, S tokens of the whole sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hocket.runtime.collectives import all_to_all
from hocket.runtime.context_parallel.attend import Scores
from hocket.runtime.context_parallel.ring import Ring
from hocket.runtime.mesh import Axis
from hocket.runtime.record import Recorder


def ulysses(  # noqa: PLR0917
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, scores: Scores, axis: Axis,
    recorder: Recorder,
) -> Tensor:  # fmt: skip
    """As `Ring`, with heads in the place of blocks: [B, A, S/c, E]."""
    q, k, v = _ToHeads.apply(axis, recorder, query, key, value)  # type: ignore[no-untyped-call]
    if sinks is not None:
        sinks = sinks.chunk(axis.size)[axis.index]
    out = Ring.apply(q, k, v, sinks, scores, Axis("cp"), recorder)  # type: ignore[no-untyped-call]
    (found,) = _ToTokens.apply(axis, recorder, out)  # type: ignore[no-untyped-call]
    assert isinstance(found, Tensor)
    return found


def _to_heads(parts: Sequence[Tensor], axis: Axis, recorder: Recorder) -> list[Tensor]:
    """[B, A, S/c, D] of each to [B, A/c, S, D], tokens in their order."""
    rows = []
    for part in parts:
        batch, heads, count, size = part.shape
        each = part.reshape(batch, axis.size, heads // axis.size, count, size).movedim(1, 0)
        rows.append(each.reshape(axis.size, -1))
    moved = all_to_all(torch.cat(rows, 1), axis, recorder)
    found = []
    for part, piece in zip(parts, torch.split(moved, [r.shape[1] for r in rows], 1), strict=True):
        batch, heads, count, size = part.shape
        each = piece.view(axis.size, batch, heads // axis.size, 2, count // 2, size)
        each = each.permute(1, 2, 3, 0, 4, 5)  # [B, A/c, front and back, c, S/2c, D]
        whole = torch.cat([each[:, :, 0], each[:, :, 1].flip(2)], 2)
        found.append(whole.reshape(batch, heads // axis.size, -1, size))
    return found


def _to_tokens(parts: Sequence[Tensor], axis: Axis, recorder: Recorder) -> list[Tensor]:
    """The inverse of `_to_heads`."""
    rows = []
    for part in parts:
        batch, heads, length, size = part.shape
        front, back = part.reshape(batch, heads, 2, axis.size, -1, size).unbind(2)
        each = torch.cat([front, back.flip(2)], 3)  # [B, A/c, c, S/c, D]
        rows.append(each.movedim(2, 0).reshape(axis.size, -1))
    moved = all_to_all(torch.cat(rows, 1), axis, recorder)
    found = []
    for part, piece in zip(parts, torch.split(moved, [r.shape[1] for r in rows], 1), strict=True):
        batch, heads, length, size = part.shape
        each = piece.view(axis.size, batch, heads, length // axis.size, size)
        found.append(each.movedim(0, 1).reshape(batch, heads * axis.size, -1, size))
    return found


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, axis: Axis, recorder: Recorder, *parts: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        ctx.among = axis, recorder
        return tuple(_to_heads(parts, axis, recorder))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return None, None, *_to_tokens(grads, *ctx.among)


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, axis: Axis, recorder: Recorder, *parts: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        ctx.among = axis, recorder
        return tuple(_to_tokens(parts, axis, recorder))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return None, None, *_to_heads(grads, *ctx.among)
