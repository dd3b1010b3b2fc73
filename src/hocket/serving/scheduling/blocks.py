"""BlockPool: the blocks of the paged cache, who holds them, and which are worth keeping; and
SnapshotPool: copies of recurrent states, by the prefix that they follow.

A block is in one of three states:

    held     references > 0: block tables of sequences name it
    kept     free, but its content may be asked for again: found by its digest, evicted in the
             order in which it was given back
    clean    free, and nothing in it

Every operation takes constant time. Kwon et al. 2023 (PagedAttention), section 4.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable


class BlockPool:
    """Blocks 0 .. num_blocks-1.

    Args:
        num_blocks: of the cache.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        self._digests: list[bytes | None] = [None] * num_blocks
        self._found: dict[bytes, int] = {}
        self._kept: OrderedDict[int, None] = OrderedDict()
        self._clean = list(range(num_blocks - 1, -1, -1))

    @property
    def free(self) -> int:
        """Blocks that `take` can give: clean and kept ones."""
        return len(self._clean) + len(self._kept)

    @property
    def kept(self) -> int:
        """Free blocks whose content can still be shared."""
        return len(self._kept)

    @property
    def used(self) -> int:
        """Blocks that sequences hold."""
        return self.num_blocks - self.free

    def take(self) -> int:
        """A block for one holder; clean ones first, then the one that was kept longest."""
        if self._clean:
            block = self._clean.pop()
        else:
            block, _ = self._kept.popitem(last=False)
            digest = self._digests[block]
            assert digest is not None
            del self._found[digest]
            self._digests[block] = None
        self._references[block] = 1
        return block

    def find(self, digest: bytes) -> int | None:
        """The block with that content."""
        return self._found.get(digest)

    def is_held(self, block: int) -> bool:
        """Whether some sequence holds it."""
        return self._references[block] > 0

    def share(self, block: int) -> None:
        """One more holder of a block that was found."""
        if self._references[block] == 0:
            del self._kept[block]
        self._references[block] += 1

    def name(self, block: int, digest: bytes) -> None:
        """From now on the held block can be found by its content's digest.

        Where another block has the same content already, that one stays the one to be found.
        """
        assert self._references[block] > 0
        if self._digests[block] is None and digest not in self._found:
            self._digests[block] = digest
            self._found[digest] = block

    def give_back(self, blocks: Iterable[int]) -> None:
        """One holder fewer of each, in the order in which they should be evicted."""
        references, digests = self._references, self._digests
        for block in blocks:
            references[block] -= 1
            if references[block] == 0:
                if digests[block] is None:
                    self._clean.append(block)
                else:
                    self._kept[block] = None
            else:
                assert references[block] > 0, f"block {block} is given back too often"


class SnapshotPool:
    """Snapshots 0 .. num_snapshots-1 of recurrent states, the least recently used first.

    Args:
        num_snapshots: that there is room for.
    """

    def __init__(self, num_snapshots: int) -> None:
        self._found: OrderedDict[bytes, int] = OrderedDict()
        self._clean = list(range(num_snapshots - 1, -1, -1))
        self._holders = [0] * num_snapshots

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._found

    def hold(self, digest: bytes) -> int:
        """The snapshot after a prefix, which is not overwritten until it is released."""
        self._found.move_to_end(digest)
        snapshot = self._found[digest]
        self._holders[snapshot] += 1
        return snapshot

    def release(self, snapshot: int) -> None:
        """One holder fewer."""
        self._holders[snapshot] -= 1

    def take(self, digest: bytes) -> int | None:
        """A snapshot to write the state after a prefix to, found by it from now on; None: it is
        known already, or all are held."""
        if digest in self._found:
            self._found.move_to_end(digest)
            return None
        if self._clean:
            snapshot = self._clean.pop()
        else:
            old = next((d for d, s in self._found.items() if not self._holders[s]), None)
            if old is None:
                return None
            snapshot = self._found.pop(old)
        self._found[digest] = snapshot
        return snapshot
