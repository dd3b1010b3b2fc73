"""Zigzag: which tokens of a sequence each context-parallel rank has.

A sequence of S tokens is 2 n chunks; rank r of n has the chunks r and 2 n - 1 - r, in this order:

    n = 2      chunk  0 1 2 3          rank 0: 0 3      rank 1: 1 2

Under a causal mask later tokens see more keys. Each rank has as much of the early chunks as of the
late ones, so in each step of a ring all ranks multiply equally many pairs (Llama 3, Dubey et al.
2024, arXiv:2407.21783, section 3.3.2).

Legend: S tokens of a whole sequence, s = S / n of one rank.
"""

from __future__ import annotations

import dataclasses
import functools

import torch
from torch import Tensor


def positions(length: int, index: int, ranks: int, device: torch.device | str = "cpu") -> Tensor:
    """[s] int64: places in the whole sequence of the tokens of rank `index`, ascending.

    `length` is S, which 2 `ranks` must divide.
    """
    assert length % (2 * ranks) == 0, (length, ranks)
    half = length // (2 * ranks)
    first, second = index * half, (2 * ranks - 1 - index) * half
    both = (torch.arange(start, start + half, device=device) for start in (first, second))
    return torch.cat(list(both))


@functools.lru_cache(maxsize=64)
def gathered_order(length: int, ranks: int, device: torch.device) -> Tensor:
    """[S]: where each token of the sequence is among those of all ranks, one rank after the
    other."""
    every = torch.cat([positions(length, index, ranks, device) for index in range(ranks)])
    return torch.argsort(every)


@dataclasses.dataclass(frozen=True)
class Piece:
    """Queries and keys of two ranks that attend to each other.

    Attributes:
        queries, keys: slices of the [s] of each rank.
        causal: each query sees the keys up to its own place in the slice; else all.
    """

    queries: slice
    keys: slice
    causal: bool


def piece(index: int, source: int, length: int) -> Piece:
    """What the queries of rank `index` see of the keys of rank `source`; `length` is s."""
    half = length // 2
    if index == source:
        return Piece(slice(0, length), slice(0, length), True)
    if source < index:  # its late chunk comes after all of ours
        return Piece(slice(0, length), slice(0, half), False)
    return Piece(slice(half, length), slice(0, length), False)  # our early chunk comes first
