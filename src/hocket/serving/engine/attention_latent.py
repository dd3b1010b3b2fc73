"""Attention to latent vectors in pages (multi-head latent attention) by torch's operations.

    rows that decode      absorbed: queries attend to the latent vectors themselves, and what they
                          attend to becomes values at the end
    chunks of prompts     a piece of the cached vectors is expanded to keys and values at a time

Nothing of a decode step reads the device or branches on values: it can be captured in a graph, with
tables of the longest sequence, of which pieces are gathered one after the other.

Legend: R rows, A heads, c tokens of a chunk, n tokens of a piece, W latent and rotary entries, L
latent ones.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from hocket.models.latent import LatentHeads
from hocket.serving.engine.attention import Options
from hocket.serving.engine.attention_chunks import sunk
from hocket.serving.engine.attention_pieces import (
    Piece,
    attend_piece,
    attend_rows,
    join_pieces,
)
from hocket.serving.engine.context_exchange import BlockPart
from hocket.serving.engine.device_step import DeviceStep

_PIECE = 1024
"""Cached tokens of a row that are gathered at once."""


def attend_heads(
    heads: LatentHeads, query: Tensor, pool: Tensor, step: DeviceStep, options: Options
) -> Tensor:
    """Query [A, T, D] to [T, A, E], over a pool [blocks, block, 1, W]."""
    return _ended(heads_piece(heads, query, pool, step, options, _whole(pool)), options, query)


def attend_absorbed(
    query: Tensor, pool: Tensor, step: DeviceStep, options: Options, latent: int
) -> Tensor:
    """Absorbed queries [A, T, W] of all rows to [T, A, L]."""
    return _ended(absorbed_piece(query, pool, step, options, latent, _whole(pool)), options, query)


def heads_piece(  # noqa: PLR0917
    heads: LatentHeads, query: Tensor, pool: Tensor, step: DeviceStep, options: Options,
    part: BlockPart,
) -> Piece:  # fmt: skip
    """Query [A, T, D] to [T, A, E] and [T, A] in fp32, over what the pool holds of each block,
    [blocks, part, 1, W]; sinks take no part."""
    count = step.lengths.shape[0] - len(step.chunks)
    parts: list[Piece] = []
    if count:
        asked = heads.absorb(query[:, :count])
        mixed, weight = _decoded(asked, pool, step, options, heads.latent_size, part)
        read = heads.read(mixed.to(query.dtype).transpose(0, 1)).float()
        parts.append((read.transpose(0, 1), weight))
    for row, (first, tokens, length) in enumerate(step.chunks, count):
        own = query[:, first : first + tokens].unsqueeze(1)
        pieces = (
            attend_piece(own, *heads.expand(cached), hidden, options)
            for cached, hidden in _pieces(pool, step.tables[row], tokens, length, options, part)
        )
        mixed, weight = join_pieces(pieces)
        parts.append((mixed[:, 0].transpose(0, 1), weight[:, 0].t()))
    return _all(parts)


def absorbed_piece(  # noqa: PLR0917
    query: Tensor, pool: Tensor, step: DeviceStep, options: Options, latent: int, part: BlockPart
) -> Piece:
    """Absorbed queries [A, T, W] of all rows to [T, A, L] and [T, A], as `heads_piece`."""
    count = step.lengths.shape[0] - len(step.chunks)
    parts: list[Piece] = []
    if count:
        parts.append(_decoded(query[:, :count], pool, step, options, latent, part))
    for row, (first, tokens, length) in enumerate(step.chunks, count):
        own = query[:, first : first + tokens].unsqueeze(0)
        pieces = (
            attend_piece(own, cached[None], cached[None, :, :latent], hidden, options)
            for cached, hidden in _pieces(pool, step.tables[row], tokens, length, options, part)
        )
        mixed, weight = join_pieces(pieces)
        parts.append((mixed[0].transpose(0, 1), weight[0].t()))
    return _all(parts)


def _whole(pool: Tensor) -> BlockPart:
    return BlockPart(pool.shape[1], pool.shape[1], 0)


def _all(parts: list[Piece]) -> Piece:
    if len(parts) == 1:
        return parts[0]
    return torch.cat([mixed for mixed, _ in parts]), torch.cat([weight for _, weight in parts])


def _ended(piece: Piece, options: Options, query: Tensor) -> Tensor:
    return sunk(*piece, options.sinks).to(query.dtype)


def _decoded(  # noqa: PLR0917
    query: Tensor, pool: Tensor, step: DeviceStep, options: Options, latent: int, part: BlockPart
) -> Piece:
    """Absorbed queries [A, R, W] of rows that decode to [R, A, L] and [R, A]."""
    rows = query.shape[1]
    asked = query.transpose(0, 1)[:, None, :, None]  # [R, 1, A, 1, W]: all heads read one

    def rows_of(blocks: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        cached = pool.index_select(0, blocks).view(shape[0], 1, -1, pool.shape[-1])
        return cached, cached[..., :latent]

    mixed, weight = attend_rows(
        asked, rows_of, step.tables[:rows], step.lengths[:rows].unsqueeze(1), options,
        places=lambda first, columns: part.positions(first, columns, pool.device),
        columns=max(1, _PIECE // part.size),
    )  # fmt: skip
    return mixed[:, 0, :, 0], weight[:, 0, :, 0]


def _pieces(  # noqa: PLR0917
    pool: Tensor, table: Tensor, count: int, length: int, options: Options, part: BlockPart
) -> Iterator[tuple[Tensor, Tensor]]:
    """Cached tokens [n, W] that a chunk attends to, and which of them each query does not see
    [c, n]."""
    own = torch.arange(length - count, length, device=pool.device).unsqueeze(1)
    oldest = 0
    if options.window is not None:
        oldest = max(0, length - count + 1 - options.window) // part.span
    end, columns = -(-length // part.span), max(1, _PIECE // part.size)
    for begin in range(oldest, end, columns):
        blocks = table[begin : min(end, begin + columns)]
        cached = pool.index_select(0, blocks).view(-1, pool.shape[-1])
        at = part.positions(begin, blocks.shape[0], pool.device)
        hidden = at > own
        if options.window is not None:
            hidden |= at <= own - options.window
        yield cached, hidden
