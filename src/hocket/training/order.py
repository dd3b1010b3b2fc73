"""Order: a keyed permutation of 0 .. n - 1 that is computed entry by entry.

A Feistel network (Luby and Rackoff 1988) over the smallest even number of bits that holds n, its
result fed back in until it falls below n (cycle walking, Black and Rogaway 2002). No table is kept,
so any entry costs the same at any size, and the state of a shuffled stream is one integer.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_ROUNDS = 6
_MASK = (1 << 64) - 1


def permuted(positions: npt.ArrayLike, size: int, key: Sequence[int]) -> npt.NDArray[np.int64]:
    """The entries at some positions of the permutation of `size` numbers that `key` names."""
    value = np.asarray(positions).astype(np.uint64)
    assert size > 0, size
    assert value.size == 0 or int(value.max()) < size, (size, value.max())
    half = np.uint64(max(1, (max(1, size - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    keys = _round_keys(key)
    out = _feistel(value, half, mask, keys)
    outside = np.flatnonzero(out >= size)
    while outside.size:
        out[outside] = _feistel(out[outside], half, mask, keys)
        outside = outside[out[outside] >= size]
    return out.astype(np.int64)


def _feistel(
    value: npt.NDArray[np.uint64],
    half: np.uint64,
    mask: np.uint64,
    keys: npt.NDArray[np.uint64],
) -> npt.NDArray[np.uint64]:
    left, right = value >> half, value & mask
    for key in keys:
        left, right = right, left ^ (_mixed(right ^ key) & mask)
    return (left << half) | right


def _mixed(value: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of SplitMix64 (Steele, Lea and Flood 2014)."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def _round_keys(key: Sequence[int]) -> npt.NDArray[np.uint64]:
    state = np.zeros(1, np.uint64)
    for part in key:
        state = _mixed(state + np.uint64(part & _MASK) + np.uint64(0x9E3779B97F4A7C15))
    steps = np.arange(1, _ROUNDS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return _mixed(state + steps)
