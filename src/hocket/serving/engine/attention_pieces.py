"""Attention to one piece of the keys, and pieces joined.

    a piece    attended values, and the logarithm of its sum of exponentials
    joined     weighted by a softmax over those logarithms (Milakov and Gimelshein 2018)

Legend: R rows that decode, C columns of a table of blocks, c queries of a head, n keys, K key/value
heads, G query heads of each, D and E sizes of keys and values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from hocket.serving.engine.attention import Options

Piece = tuple[Tensor, Tensor]
"""Attended values [..., E] in fp32, and the logarithm of the sum of exponentials [...]; of a query
that sees none of the keys, 0 and -inf."""


def attend_piece(
    query: Tensor, key: Tensor, value: Tensor, hidden: Tensor | None, options: Options
) -> Piece:
    """Query [..., K, G, c, D], key [..., K, n, D], value [..., K, n, E] to [..., K, G, c, E].

    Args:
        hidden: broadcast to [..., K, G, c, n], true for keys that a query does not see.
        options: its sinks take no part: they are one for all pieces (`sunk`).
    """
    *lead, group, count, size = query.shape
    asked = (query * options.scaling).reshape(*lead, group * count, size)
    scores = (asked @ key.transpose(-1, -2)).float().view(*lead, group, count, key.shape[-2])
    if options.softcap is not None:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    if hidden is not None:
        scores = scores.masked_fill(hidden, -torch.inf)
    weight = scores.logsumexp(-1)
    # Where nothing is seen, exp(-inf - 0) is 0.
    shares = torch.exp(scores - weight.clamp_min(torch.finfo(weight.dtype).min).unsqueeze(-1))
    flat = shares.to(value.dtype).view(*lead, group * count, -1)
    mixed = (flat @ value).float().view(*lead, group, count, value.shape[-1])
    return mixed, weight


def join_pieces(pieces: Iterable[Piece]) -> Piece:
    """Pieces of the same queries as one."""
    found: Piece | None = None
    for mixed, weight in pieces:
        if found is None:
            found = mixed, weight
            continue
        total = torch.logaddexp(found[1], weight)
        base = total.clamp_min(torch.finfo(total.dtype).min)
        old, new = torch.exp(found[1] - base), torch.exp(weight - base)
        found = found[0] * old.unsqueeze(-1) + mixed * new.unsqueeze(-1), total
    assert found is not None
    return found


def attend_rows(
    asked: Tensor,
    rows_of: Callable[[Tensor, tuple[int, ...]], tuple[Tensor, Tensor]],
    tables: Tensor,
    lengths: Tensor,
    options: Options,
    *,
    places: Callable[[int, int], Tensor],
    begin: int = 0,
    columns: int,
) -> Piece:
    """Queries [R, K, G, 1, D] of rows that decode, each to all of its sequence.

    Args:
        rows_of: keys and values [R, K, n, .] of the tokens of blocks [R * c], reshaped to (R, -1).
        tables: [R, C], blocks of each row; from `begin` on, `columns` of them at a time.
        lengths: [R, 1], tokens of each row, its own among them.
        places: positions [n] in the sequence of the tokens of some columns, by their first and
            number.
    """

    def pieces() -> Iterator[Piece]:
        for first in range(begin, tables.shape[1], columns):
            some = tables[:, first : first + columns]
            at = places(first, some.shape[1])
            hidden = at >= lengths
            if options.window is not None:
                hidden = hidden | (at < lengths - options.window)
            key, value = rows_of(some.reshape(-1), (tables.shape[0], -1))
            yield attend_piece(asked, key, value, hidden[:, None, None, None], options)

    return join_pieces(pieces())
