"""Digests of prompts, block by block: equal digests mean equal tokens from the beginning on.

    digest 0 = SHA-256(root, tokens of block 0)       root = SHA-256(secret, the request's salt)
    digest k = SHA-256(digest k-1, tokens of block k)

The secret is drawn when the process starts, so that nobody outside can compute a digest, let alone
two prompts with an equal one; the salt keeps the prompts of those who must not learn of each
other (by the time that an answer takes) apart.
"""

from __future__ import annotations

import hashlib
import os
from array import array


class Digests:
    """Makes digests for one cache.

    Args:
        block_size: tokens of a block.
        secret: None: drawn.
    """

    def __init__(self, block_size: int, secret: bytes | None = None) -> None:
        self.block_size = block_size
        self._secret = os.urandom(32) if secret is None else secret

    def root(self, salt: str) -> bytes:
        """What the digest of the first block follows."""
        return hashlib.sha256(self._secret + salt.encode("utf-8", "surrogatepass")).digest()

    def extend(self, chain: list[bytes], tokens: array[int], count: int) -> None:
        """Make `chain`, which begins with the root, hold the digests of the first `count` blocks.

        Args:
            chain: the root and the digests so far; added to.
            tokens: int32 token ids from the beginning.
            count: full blocks.
        """
        size = self.block_size
        for start in range((len(chain) - 1) * size, count * size, size):
            content = tokens[start : start + size].tobytes()
            chain.append(hashlib.sha256(chain[-1] + content).digest())
