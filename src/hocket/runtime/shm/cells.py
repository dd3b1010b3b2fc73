"""Cells: the ring of shared buffers that a group's collectives pass through, chunk by chunk.

Every collective is a number of chunks; chunk number s of the group passes through cell
s mod NUM_CELLS, in which each rank has a slot and which has a counter of arrivals:

    rank 0   post 7 ... post 8 ... wait 7 . finish 7 ...      1 copy my part into my slot
    rank 1   ... post 7 ........... finish 7 post 8 ...       2 arrive
    cell 3   0      1 2 = full: the last wakes the others     3 full: read all slots

A cell is posted into again only when every rank has finished reading it. Posting never waits for
another rank as long as cells are free, so an asynchronous call leaves its contribution and
returns; the rest happens in `wait`. A collective in two phases (`middle`) uses a second counter.
The counters go up in one round and down in the next, so they never need a reset.
"""

from __future__ import annotations

import collections
import threading
from typing import TYPE_CHECKING

from hocket.runtime.shm import futex, waiting
from hocket.runtime.shm.peers import Mismatch, PeerLost, PeerTimeout
from hocket.runtime.shm.segment import LINE, NUM_CELLS, ShmSegment

if TYPE_CHECKING:
    from hocket.runtime.shm.operations import Operation

_SIZE_BITS = 40
_CODE_BITS = 6


class Cells:
    """The collectives of one group, finished in the order in which they were called."""

    def __init__(self, segment: ShmSegment, ranks: list[int], timeout: float) -> None:
        self.segment = segment
        self.ranks = ranks  # global ranks, for messages
        self.timeout = timeout
        self.rank, self.n = segment.rank, segment.num_ranks
        self.next = 0
        self.finished = 0  # chunks of this rank, in all
        self.known_finished = 0  # of every rank, as last read
        self.queue: collections.deque[Operation] = collections.deque()
        self.second_rounds = [0] * NUM_CELLS
        self.lock = threading.RLock()
        self._idle_word = segment.base + (segment.room + LINE // 2) * 4
        self._words = segment.words32
        self._large = segment.words64

    # -- one collective

    def submit(self, operation: Operation) -> None:
        """Give it its chunks' numbers and post what has room. Does not wait."""
        with self.lock:
            operation.first = self.next
            self.next += operation.num_chunks
            self.queue.append(operation)
            self._advance()

    def complete(self, operation: Operation, timeout: float | None = None) -> None:
        """Return when it, and so every earlier one, is finished.

        Raises:
            PeerLost: a rank died, or did not come within the time-out.
            Mismatch: another rank called something else.
        """
        if operation.done:
            return
        limit = self.timeout if timeout is None else timeout
        index, target = self._wanted()
        if index >= 0 and waiting.look(self._words, index, target) and self._ready(operation):
            return
        waiting.until(
            lambda: self._ready(operation),
            self._word,
            lambda waited: self._missed(waited, limit),
            self,
        )

    def go_on(self) -> None:
        """Advance what is left, if no other thread does so; on behalf of a wait elsewhere."""
        if self.lock.acquire(blocking=False):
            try:
                self._advance()
            finally:
                self.lock.release()

    def _ready(self, operation: Operation) -> bool:
        with self.lock:
            self._advance()
            return operation.done

    def _wanted(self) -> tuple[int, int]:
        """Index and target of the counter that the oldest unfinished chunk waits for."""
        if not self.queue:
            return -1, 0
        head = self.queue[0]
        if head.num_finished == head.num_posted:
            return -1, 0
        return self._counter(head, head.num_finished)

    def _counter(self, operation: Operation, chunk: int) -> tuple[int, int]:
        number = operation.first + chunk
        cell = number % NUM_CELLS
        index = (self.segment.counters + 2 * LINE * cell) // 4
        if operation.two_phases and chunk < operation.num_reduced:
            # The second counter was counted up when this chunk arrived there.
            return index + LINE // 4, self.n if self.second_rounds[cell] % 2 == 1 else 0
        return index, self.n if number // NUM_CELLS % 2 == 0 else 0

    def _word(self) -> tuple[int, int, futex.Nap]:
        with self.lock:
            index, _ = self._wanted()
        nap = waiting.NAP
        if index < 0:  # no cell is free: ask to be notified when one is
            index = self.segment.room
            self._words[index + LINE // 4] = 1
            nap = waiting.FLAG_NAP
        return self.segment.base + 4 * index, self._words[index], nap

    # -- advancing

    def _advance(self) -> None:
        while self._post() | self._finish():
            pass
        # What is posted and reduced needs nothing more from this rank for others to go on.
        behind = any(
            operation.num_posted < operation.num_chunks
            or (operation.two_phases and operation.num_reduced < operation.num_chunks)
            for operation in self.queue
        )
        (waiting.UNFINISHED.add if behind else waiting.UNFINISHED.discard)(self)

    def _post(self) -> bool:
        moved = False
        for operation in self.queue:
            while operation.num_posted < operation.num_chunks:
                number = operation.first + operation.num_posted
                if not self._free(number):
                    return moved
                cell = number % NUM_CELLS
                operation.post(self.segment, cell, operation.num_posted)
                self._large[self.segment.signatures + cell * self.n + self.rank] = self._sign(
                    operation, number
                )
                self._arrive(self.segment.counters + 2 * LINE * cell, number // NUM_CELLS)
                operation.num_posted += 1
                moved = True
        return moved

    def _free(self, number: int) -> bool:
        if number - self.known_finished < NUM_CELLS:
            return True
        done = self.segment.done
        self.known_finished = min(self._large[done : done + self.n])
        return number - self.known_finished < NUM_CELLS

    def _arrive(self, offset: int, turn: int) -> None:
        step, last = (1, self.n - 1) if turn % 2 == 0 else (-1, 1)
        futex.arrive(self.segment.base + offset, self._idle_word, step, last)

    def _finish(self) -> bool:
        moved = False
        words = self._words
        while self.queue:
            head = self.queue[0]
            if head.two_phases:
                moved |= self._reduce(head)
            while head.num_finished < head.num_posted:
                if head.two_phases and head.num_finished == head.num_reduced:
                    return moved
                cell = (head.first + head.num_finished) % NUM_CELLS
                if head.waits:
                    index, target = self._counter(head, head.num_finished)
                    if words[index] != target:
                        return moved
                    self._check(head, head.num_finished)
                head.finish(self.segment, cell, head.num_finished)
                head.num_finished += 1
                self._finished_one()
                moved = True
            if head.num_finished < head.num_chunks:
                return moved
            self.queue.popleft()
            head.close()
        return moved

    def _reduce(self, head: Operation) -> bool:
        moved = False
        while head.num_reduced < head.num_posted:
            number = head.first + head.num_reduced
            cell = number % NUM_CELLS
            index = (self.segment.counters + 2 * LINE * cell) // 4
            if self._words[index] != (self.n if number // NUM_CELLS % 2 == 0 else 0):
                break
            self._check(head, head.num_reduced)
            head.middle(self.segment, cell, head.num_reduced)
            self._arrive(4 * index + LINE, self.second_rounds[cell])
            self.second_rounds[cell] += 1
            head.num_reduced += 1
            moved = True
        return moved

    def _finished_one(self) -> None:
        segment, words = self.segment, self._words
        self.finished += 1
        self._large[segment.done + self.rank] = self.finished
        flag = segment.room + LINE // 4
        if words[flag]:
            words[flag] = 0
            futex.ring(segment.base + 4 * segment.room)

    # -- what can go wrong

    def _sign(self, operation: Operation, number: int) -> int:
        code = operation.code << _SIZE_BITS | operation.size
        return (number + 1 & 0xFFFF) << (_SIZE_BITS + _CODE_BITS) | code

    def _check(self, operation: Operation, chunk: int) -> None:
        """What all ranks posted must be the same call."""
        number = operation.first + chunk
        start = self.segment.signatures + number % NUM_CELLS * self.n
        found = self._large[start : start + self.n].tolist()
        if found.count(found[self.rank]) == self.n:
            return
        names = operation.names()
        mask = (1 << _SIZE_BITS) - 1
        calls = []
        for rank, sign in enumerate(found):
            code = sign >> _SIZE_BITS & ((1 << _CODE_BITS) - 1)
            calls.append(f"rank {self.ranks[rank]} {names[code]} of {sign & mask} bytes")
        raise Mismatch(f"ranks called different collectives: {'; '.join(calls)}")

    def _missing(self, operation: Operation) -> tuple[list[int], int]:
        """Ranks that have not posted the chunk that `operation` waits for, and its number."""
        number = operation.first + min(operation.num_finished, operation.num_chunks - 1)
        start = self.segment.signatures + number % NUM_CELLS * self.n
        shift = _SIZE_BITS + _CODE_BITS
        if operation.num_finished == operation.num_posted:  # waits for a free cell
            number -= NUM_CELLS
            done = self._large[self.segment.done : self.segment.done + self.n].tolist()
            return [rank for rank, count in enumerate(done) if count <= number], number
        signs = self._large[start : start + self.n].tolist()
        absent = [r for r, sign in enumerate(signs) if sign >> shift != number + 1 & 0xFFFF]
        if absent or not operation.two_phases:
            return absent, number
        return [r for r in range(self.n) if r != self.rank], number

    def _missed(self, waited: float, limit: float) -> None:
        with self.lock:
            if not self.queue:
                return
            head = self.queue[0]
            missing, number = self._missing(head)
        peers = self.segment.peers
        what = f"{head.names()[head.code]} number {number} of the group {self.ranks}"
        me = self.ranks[self.rank]
        if peers is None:  # the group is being made
            if waited > limit:
                raise PeerTimeout(f"rank {me} waited {waited:.1f} s for the group {self.ranks}")
            return
        dead = peers.dead(missing)
        if dead:
            who = ", ".join(f"rank {self.ranks[r]} (process {peers.pids[r]})" for r in dead)
            raise PeerLost(f"{who} died; rank {me} was waiting for it in {what}")
        if waited > limit:
            who = ", ".join(f"rank {self.ranks[r]} ({peers.describe(r)})" for r in missing)
            raise PeerTimeout(
                f"rank {me} waited {waited:.1f} s in {what}; did not come: {who or 'unknown ranks'}"
            )
