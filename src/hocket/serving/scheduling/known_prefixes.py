"""KnownPrefixes: which blocks of prompts a cache may hold, as the sender of prompts remembers.

The keys are of tokens alone: they choose between caches, and never let one prompt read another's.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence


def prefix_keys(tokens: Sequence[int], block_size: int, salt: str = "") -> list[bytes]:
    """A key for each full block of a prompt, which also names all blocks before it."""
    key = hashlib.blake2b(salt.encode(), digest_size=16).digest()
    found = []
    for start in range(0, len(tokens) - block_size + 1, block_size):
        words = array("q", tokens[start : start + block_size]).tobytes()
        key = hashlib.blake2b(key + words, digest_size=16).digest()
        found.append(key)
    return found


class KnownPrefixes:
    """The blocks that a replica's cache may hold, the least recently used first.

    Args:
        most: blocks of that cache.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._kept: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def hit(self, keys: Sequence[bytes]) -> int:
        """Leading blocks of a prompt that are remembered."""
        for count, key in enumerate(keys):
            if key not in self._kept:
                return count
        return len(keys)

    def add(self, keys: Sequence[bytes]) -> None:
        """A prompt was sent there. Its later blocks are forgotten before its earlier ones."""
        for key in reversed(keys):
            self._kept[key] = None
            self._kept.move_to_end(key)
        while len(self._kept) > self.most:
            self._kept.popitem(last=False)
