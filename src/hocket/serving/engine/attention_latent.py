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
from hocket.serving.engine.attention_pieces import Piece, attend_piece, join_pieces
from hocket.serving.engine.device_step import DeviceStep

_PIECE = 1024
"""Cached tokens of a row that are gathered at once."""


def attend_heads(
    heads: LatentHeads, query: Tensor, pool: Tensor, step: DeviceStep, options: Options
) -> Tensor:
    """Query [A, T, D] to [T, A, E], over a pool [blocks, block, 1, W]."""
    count = step.lengths.shape[0] - len(step.chunks)
    parts = []
    if count:
        asked = heads.absorb(query[:, :count])
        mixed = _decoded(asked, pool, step, options, heads.latent_size)
        parts.append(heads.read(mixed).transpose(0, 1))
    for row, (first, tokens, length) in enumerate(step.chunks, count):
        own = query[:, first : first + tokens].unsqueeze(1)
        pieces = (
            attend_piece(own, *heads.expand(cached), hidden, options)
            for cached, hidden in _pieces(pool, step.tables[row], tokens, length, options)
        )
        parts.append(_ended(join_pieces(pieces), options).to(query.dtype).transpose(0, 1))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def attend_absorbed(
    query: Tensor, pool: Tensor, step: DeviceStep, options: Options, latent: int
) -> Tensor:
    """Absorbed queries [A, T, W] of all rows to [A, T, L]."""
    count = step.lengths.shape[0] - len(step.chunks)
    parts = [_decoded(query[:, :count], pool, step, options, latent)] if count else []
    for row, (first, tokens, length) in enumerate(step.chunks, count):
        own = query[:, first : first + tokens].unsqueeze(0)
        pieces = (
            attend_piece(own, cached[None], cached[None, :, :latent], hidden, options)
            for cached, hidden in _pieces(pool, step.tables[row], tokens, length, options)
        )
        mixed, weight = join_pieces(pieces)
        parts.append(
            _ended((mixed[0].unsqueeze(1), weight[0].unsqueeze(1)), options).to(query.dtype)
        )
    return torch.cat(parts, 1)


def _ended(piece: Piece, options: Options) -> Tensor:
    """[A, 1, c, E] with sinks regarded, to [A, c, E]."""
    mixed, weight = piece[0][:, 0], piece[1][:, 0]
    return sunk(mixed.transpose(0, 1), weight.t(), options.sinks).transpose(0, 1)


def _decoded(
    query: Tensor, pool: Tensor, step: DeviceStep, options: Options, latent: int
) -> Tensor:
    """Absorbed queries [A, R, W] of rows that decode to [A, R, L]."""
    rows = query.shape[1]
    block = pool.shape[1]
    tables, lengths = step.tables[:rows], step.lengths[:rows].unsqueeze(1)
    asked = query.transpose(0, 1)[:, None, :, None]  # [R, 1, A, 1, W]: all heads read one
    columns = max(1, _PIECE // block)

    def pieces() -> Iterator[Piece]:
        for begin in range(0, tables.shape[1], columns):
            some = tables[:, begin : begin + columns]
            cached = pool.index_select(0, some.reshape(-1)).view(rows, 1, -1, pool.shape[-1])
            at = begin * block + torch.arange(cached.shape[2], device=pool.device)
            hidden = at >= lengths
            if options.window is not None:
                hidden |= at < lengths - options.window
            hidden = hidden[:, None, None, None]
            yield attend_piece(asked, cached, cached[..., :latent], hidden, options)

    mixed, weight = join_pieces(pieces())
    found = sunk(mixed[:, 0, :, 0], weight[:, 0, :, 0], options.sinks)
    return found.to(query.dtype).transpose(0, 1)


def _pieces(
    pool: Tensor, table: Tensor, count: int, length: int, options: Options
) -> Iterator[tuple[Tensor, Tensor]]:
    """Cached tokens [n, W] that a chunk attends to, and which of them each query does not see
    [c, n]."""
    block = pool.shape[1]
    own = torch.arange(length - count, length, device=pool.device).unsqueeze(1)
    oldest = 0
    if options.window is not None:
        oldest = max(0, length - count + 1 - options.window) // block * block
    for begin in range(oldest, length, max(block, _PIECE // block * block)):
        end = min(length, begin + max(block, _PIECE // block * block))
        blocks = table[begin // block : -(-end // block)]
        cached = pool.index_select(0, blocks).view(-1, pool.shape[-1])[: end - begin]
        at = torch.arange(begin, end, device=pool.device)
        hidden = at > own
        if options.window is not None:
            hidden |= at <= own - options.window
        yield cached, hidden
