"""Memory: which sequences hold slots and blocks of the cache, and who gives way when it is full.

The oldest sequence that runs can take the blocks of all others, and any single one fits (what
does not is refused when it comes): so the oldest always goes on, ends, and makes room.
"""

from __future__ import annotations

from typing import Final

from hocket.serving.scheduling.blocks import BlockPool, SnapshotPool
from hocket.serving.scheduling.limits import SchedulerLimits
from hocket.serving.scheduling.prefix import Digests
from hocket.serving.scheduling.sequence import PREFILL, WAITING, Sequence
from hocket.serving.scheduling.step import Snapshot

SPARE: Final = 10
"""One block in this many stays free when a request is started, for those that run to grow."""


class CacheAllocator:
    """Slots and blocks of one scheduler.

    Attributes:
        running: by serial number, all that hold a slot.
        prefilling: those with prompt tokens to compute; `ready`: those whose next token can be
            computed now, the one that waits longest first.
        again: preempted ones.
        released: slots freed that workers do not know of yet.
        coming: sequences that give back their blocks when plans in flight are done.
        preempted: how often blocks were taken from a sequence.
    """

    def __init__(self, limits: SchedulerLimits, digests: Digests) -> None:
        self.limits = limits
        self.digests = digests
        self.pool = BlockPool(limits.num_blocks)
        self.snapshots = SnapshotPool(limits.num_snapshots or 0)
        self.running: dict[int, Sequence] = {}
        self.prefilling: dict[int, Sequence] = {}
        self.ready: dict[int, Sequence] = {}
        self.again: dict[int, Sequence] = {}
        self.slots = list(range(limits.max_num_seqs - 1, -1, -1))
        self.released: list[int] = []
        self.coming = 0
        self.preempted = 0

    def find(self, sequence: Sequence) -> tuple[list[int], bytes | None]:
        """The blocks that hold its first tokens already, and the digest of the block after them.

        The digest is None where that block is not one that can be shared: the last token's must
        be computed, since its logits are needed, as must all positions whose log-probabilities
        are still to be reported.
        """
        if not self.limits.prefix_cache:
            return [], None
        size = self.limits.block_size
        most = (len(sequence.tokens) - 1) // size
        if sequence.scored < sequence.to_score:
            most = min(most, sequence.scored // size)
        chain = sequence.chain
        found: list[int] = []
        if not chain:
            chain.append(self.digests.root(sequence.request.salt))
        for k in range(most):
            if len(chain) == k + 1:
                self.digests.extend(chain, sequence.tokens, k + 1)
            block = self.pool.find(chain[k + 1])
            if block is None:
                if self.limits.num_snapshots is None:
                    return found, chain[k + 1]
                break
            found.append(block)
        if self.limits.num_snapshots is not None:
            # Blocks are of use up to where the recurrent state is known, too.
            sequence.branch = len(found) * size
            while found and chain[len(found)] not in self.snapshots:
                found.pop()
        return found, None

    def fits(self, sequence: Sequence, found: list[int]) -> bool:
        """Whether there are blocks for all its tokens, with some to spare for those that run."""
        pool = self.pool
        needed = self.limits.blocks_for(len(sequence.tokens)) - len(found)
        free = pool.free - sum(not pool.is_held(block) for block in found)
        spare = min(len(self.running), max(1, pool.num_blocks // SPARE))
        return needed + spare <= free

    def start(self, sequence: Sequence, found: list[int]) -> None:
        """Give it a slot and blocks for all its tokens, the first of them those found."""
        pool = self.pool
        for block in found:
            pool.share(block)
        count = self.limits.blocks_for(len(sequence.tokens)) - len(found)
        sequence.blocks = found + [pool.take() for _ in range(count)]
        sequence.named = len(found)
        sequence.computed = len(found) * self.limits.block_size
        if found and self.limits.num_snapshots is not None:
            sequence.snapshot = self.snapshots.hold(sequence.chain[len(found)])
        sequence.slot = self.slots.pop()
        sequence.state = PREFILL
        self.running[sequence.serial] = sequence
        self.prefilling[sequence.serial] = sequence

    def grow(self, sequence: Sequence) -> bool:
        """Give a sequence one more block, taking those of the latest if need be.

        False: not now; it can after results of plans in flight, or after older ones ended.
        """
        pool = self.pool
        while not pool.free:
            if self.coming:
                return False
            latest = max(self.running)
            # Ended and leaving ones are among `coming`: a sequence in `running` can be preempted.
            if latest <= sequence.serial:
                return False
            self._preempt(self.running[latest])
        sequence.blocks.append(pool.take())
        return True

    def name(self, sequence: Sequence) -> None:
        """Let its computed full blocks be found by what they hold, by plans after this one."""
        full = min(sequence.computed, len(sequence.tokens)) // self.limits.block_size
        self.digests.extend(sequence.chain, sequence.tokens, full)
        for k in range(sequence.named, full):
            self.pool.name(sequence.blocks[k], sequence.chain[k + 1])
        sequence.named = full

    def snapshots_of(self, sequence: Sequence, row: int, start: int, count: int) -> list[Snapshot]:
        """Copies of recurrent states around a row of a prompt that is planned now: the one that it
        begins with, and those that later prompts may begin with, taken at ends of blocks.

        They are the last end of a block before the last token, and where the prompt leaves one
        whose blocks the cache has: a third with the same beginning begins there.
        """
        copies: list[Snapshot] = []
        if self.limits.num_snapshots is None:
            return copies
        if sequence.snapshot >= 0:
            copies.append(Snapshot(row, load=sequence.snapshot))
            self.snapshots.release(sequence.snapshot)
            sequence.snapshot = -1
        if not self.limits.prefix_cache:
            return copies
        size = self.limits.block_size
        last = min(start + count, len(sequence.tokens) - 1) // size
        for full in sorted({sequence.branch // size, last}):
            if not start < full * size <= start + count:
                continue
            self.digests.extend(sequence.chain, sequence.tokens, full)
            save = self.snapshots.take(sequence.chain[full])
            if save is not None:
                copies.append(Snapshot(row, save=save, cut=full * size - start))
        return copies

    def pending(self) -> set[bytes]:
        """Digests of the blocks that running prompts compute next."""
        size = self.limits.block_size
        found = set()
        for one in self.prefilling.values():
            if one.chain and (one.named + 1) * size <= len(one.tokens):
                self.digests.extend(one.chain, one.tokens, one.named + 1)
                found.add(one.chain[one.named + 1])
        return found

    def end(self, sequence: Sequence) -> None:
        """It computes nothing any more; what it holds is free when no plan in flight uses it."""
        self.prefilling.pop(sequence.serial, None)
        self.ready.pop(sequence.serial, None)
        if sequence.in_flight == 0:
            self.coming -= sequence.leaves
            self._give_back(sequence)
        elif not sequence.leaves:
            self.coming += 1

    def settle(self, sequence: Sequence) -> None:
        """No plan in flight uses it any more: take back what it holds if it has ended or leaves."""
        if sequence.finish_reason is not None or sequence.leaves:
            self.coming -= 1
            self._give_back(sequence)
            if sequence.finish_reason is None:
                self._put_off(sequence)

    def _preempt(self, sequence: Sequence) -> None:
        self.preempted += 1
        self.prefilling.pop(sequence.serial, None)
        self.ready.pop(sequence.serial, None)
        if sequence.in_flight == 0:
            self._give_back(sequence)
            self._put_off(sequence)
        else:
            sequence.leaves = True
            self.coming += 1

    def _put_off(self, sequence: Sequence) -> None:
        sequence.had = max(sequence.had, sequence.computed)
        sequence.leaves = False
        sequence.state = WAITING
        sequence.computed = sequence.named = 0
        self.again[sequence.serial] = sequence

    def _give_back(self, sequence: Sequence) -> None:
        """The last blocks are evicted first: without them those before are still of use."""
        self.pool.give_back(reversed(sequence.blocks))
        sequence.blocks = []
        if sequence.snapshot >= 0:
            self.snapshots.release(sequence.snapshot)
            sequence.snapshot = -1
        del self.running[sequence.serial]
        self.slots.append(sequence.slot)
        if sequence.sent >= 0:
            self.released.append(sequence.slot)
        sequence.slot = sequence.sent = -1
