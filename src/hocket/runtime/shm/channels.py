"""Channels: send and receive between two ranks, through a ring of bytes for each direction.

    ring of (source, target):   | header 16 | payload, padded to 16 | header | payload ...
                                 ^ tail: read so far                  ^ head: written so far

A send copies what has room and returns; only what is larger than the ring's room is left to its
`wait` (or to any other wait of this process). A receive is noted and filled in `wait`. Messages of
one tag arrive in order; a message of another tag than the one waited for is set aside.
"""

from __future__ import annotations

import collections
import ctypes
import struct
import threading
from collections.abc import Callable

from torch import Tensor

from hocket.runtime.shm import futex, waiting
from hocket.runtime.shm.peers import Mismatch, PeerLost, PeerTimeout
from hocket.runtime.shm.segment import LINE, ShmSegment

_HEADER = struct.Struct("<Qq")  # bytes of payload, tag
_PIECE = 1 << 19  # bytes written before the reader is notified: it copies while more is written
_move = ctypes.memmove


class Send:
    """A message on its way: `sent` bytes of `tensor` are in the ring."""

    def __init__(self, target: int, tensor: Tensor, tag: int) -> None:
        self.target, self.tensor, self.tag = target, tensor, tag
        self.address = tensor.data_ptr()
        self.nbytes = tensor.numel() * tensor.element_size()
        self.sent = -1  # not even the header
        self.done = False
        self.name = "send"


class Receive:
    """A place for a message of `tag` from `source` (None: from any rank)."""

    def __init__(self, source: int | None, tensor: Tensor, tag: int) -> None:
        self.source, self.tensor, self.tag = source, tensor, tag
        self.address = tensor.data_ptr()
        self.nbytes = tensor.numel() * tensor.element_size()
        self.done = False
        self.error: Exception | None = None
        self.found = -1  # the rank it came from
        self.after: Callable[[], None] | None = None  # takes a stand-in's bytes to their place
        self.name = "receive"


class _Inbox:
    """What one source has sent: the message being read, and those set aside."""

    def __init__(self) -> None:
        self.left = 0  # bytes of payload still to read
        self.reading = False
        self.address = 0
        self.receive: Receive | None = None
        self.buffer: bytearray | None = None
        self.tag = 0
        self.aside: list[tuple[int, bytearray]] = []


class Channels:
    """All sends and receives of one rank in one group."""

    def __init__(self, segment: ShmSegment, ranks: list[int], timeout: float) -> None:
        self.segment, self.ranks, self.timeout = segment, ranks, timeout
        self.rank = segment.rank
        self.outgoing: dict[int, collections.deque[Send]] = {}
        self.receives: list[Receive] = []
        self.inboxes = [_Inbox() for _ in range(segment.num_ranks)]
        self.lock = threading.RLock()
        self._bell = segment.doorbell + self.rank * (LINE // 4)
        self._words, self._large = segment.words32, segment.words64

    # -- sending

    def send(self, target: int, tensor: Tensor, tag: int) -> Send:
        """Begin to send a contiguous tensor. Does not wait."""
        message = Send(target, tensor, tag)
        with self.lock:
            self.outgoing.setdefault(target, collections.deque()).append(message)
            self._push(target)
            if self.outgoing[target]:
                waiting.UNFINISHED.add(self)
        return message

    def _push(self, target: int) -> None:
        queue = self.outgoing[target]
        while queue:
            message = queue[0]
            if not self._write(message):
                return
            queue.popleft()
            message.done = True
            del message.tensor

    def _write(self, message: Send) -> bool:
        """Write what has room; whether that was the last of it."""
        segment = self.segment
        channel = segment.channel(self.rank, message.target)
        size = segment.ring_size
        ring = segment.base + segment.ring(self.rank, message.target)
        head_index, tail_index = channel // 8, (channel + LINE) // 8
        while message.sent < message.nbytes:
            head = self._large[head_index]
            room = size - (head - self._large[tail_index])
            if message.sent < 0:
                if room < _HEADER.size:
                    if self._full(channel, head, _HEADER.size):
                        return False
                    continue
                header = _HEADER.pack(message.nbytes, message.tag)
                _move(ring + head % size, header, _HEADER.size)
                head += _HEADER.size
                room -= _HEADER.size
                message.sent = 0
            nbytes = min(room, message.nbytes - message.sent, _PIECE)
            first = min(nbytes, size - head % size)
            _move(ring + head % size, message.address + message.sent, first)
            if first < nbytes:
                _move(ring, message.address + message.sent + first, nbytes - first)
            message.sent += nbytes
            head += nbytes
            if message.sent == message.nbytes:
                head = -(-head // 16) * 16  # the ring's size is a multiple of 16: it has room
            self._large[head_index] = head
            bell = segment.doorbell + message.target * (LINE // 4)
            futex.ring(segment.base + 4 * bell)
            if message.sent < message.nbytes and self._full(channel, head, 1):
                return False
        return True

    def _full(self, channel: int, head: int, needed: int) -> bool:
        """Whether there is no room; then the reader has been asked to ring when it makes some."""

        def full() -> bool:
            tail: int = self._large[(channel + LINE) // 8]
            return self.segment.ring_size - (head - tail) < needed

        if full():
            self._words[(channel + 2 * LINE) // 4] = 1
        return full()

    # -- receiving

    def receive(
        self,
        source: int | None,
        tensor: Tensor,
        tag: int,
        after: Callable[[], None] | None = None,
    ) -> Receive:
        """Note a place for a message. Does not wait."""
        place = Receive(source, tensor, tag)
        place.after = after
        with self.lock:
            for rank in range(self.segment.num_ranks) if source is None else (source,):
                aside = self.inboxes[rank].aside
                for index, (found, data) in enumerate(aside):
                    if found == tag:
                        del aside[index]
                        self._take_over(place, rank, data)
                        return place
            self.receives.append(place)
            if place.nbytes + _HEADER.size > self.segment.ring_size:
                waiting.UNFINISHED.add(self)
        return place

    def _take_over(self, place: Receive, rank: int, data: bytearray) -> None:
        if self._fits(place, rank, len(data)):
            _move(place.address, (ctypes.c_char * len(data)).from_buffer(data), len(data))
        self._close(place, rank)

    def _fits(self, place: Receive, rank: int, nbytes: int) -> bool:
        if nbytes == place.nbytes:
            return True
        place.error = Mismatch(
            f"rank {self.ranks[rank]} sent {nbytes} bytes where rank {self.ranks[self.rank]} "
            f"receives {place.nbytes} (tag {place.tag})"
        )
        return False

    def _close(self, place: Receive, rank: int) -> None:
        if place.after is not None and place.error is None:
            place.after()
        place.after = None
        place.found = rank
        place.done = True
        del place.tensor

    def _pull(self, source: int, wanted: Receive | None) -> None:
        """Read what has arrived from `source`; set others' messages aside only for `wanted`."""
        inbox = self.inboxes[source]
        segment = self.segment
        channel = segment.channel(source, self.rank)
        ring = segment.base + segment.ring(source, self.rank)
        size = segment.ring_size
        head_index, tail_index = channel // 8, (channel + LINE) // 8
        while True:
            tail = self._large[tail_index]
            arrived = self._large[head_index] - tail
            if not inbox.reading:
                if arrived < _HEADER.size or not self._open(
                    inbox, source, ring + tail % size, wanted
                ):
                    return
                tail += _HEADER.size
                arrived -= _HEADER.size
            nbytes = min(arrived, inbox.left)
            if inbox.address:
                first = min(nbytes, size - tail % size)
                _move(inbox.address, ring + tail % size, first)
                if first < nbytes:
                    _move(inbox.address + first, ring, nbytes - first)
                inbox.address += nbytes
            tail += nbytes
            inbox.left -= nbytes
            if not inbox.left:
                tail = -(-tail // 16) * 16
            self._large[tail_index] = tail
            flag = (channel + 2 * LINE) // 4
            if self._words[flag]:
                self._words[flag] = 0
                futex.ring(segment.base + 4 * (segment.doorbell + source * (LINE // 4)))
            if inbox.left:
                return
            self._shut(inbox, source)

    def _open(self, inbox: _Inbox, source: int, address: int, wanted: Receive | None) -> bool:
        """Decide where the next message goes; whether it is to be read now."""
        nbytes, tag = _HEADER.unpack(ctypes.string_at(address, _HEADER.size))
        place = next(
            (r for r in self.receives if r.tag == tag and r.source in (source, None)), None
        )
        if place is None and (wanted is None or wanted.done):
            return False
        inbox.left, inbox.tag, inbox.reading = nbytes, tag, True
        inbox.receive, inbox.buffer, inbox.address = place, None, 0
        if place is None:
            inbox.buffer = bytearray(nbytes)
            if nbytes:
                inbox.address = ctypes.addressof(ctypes.c_char.from_buffer(inbox.buffer))
        else:
            self.receives.remove(place)
            if self._fits(place, source, nbytes):
                inbox.address = place.address
        return True

    def _shut(self, inbox: _Inbox, source: int) -> None:
        inbox.reading = False
        if inbox.receive is not None:
            self._close(inbox.receive, source)
        elif inbox.buffer is not None:
            inbox.aside.append((inbox.tag, inbox.buffer))
        inbox.receive = inbox.buffer = None

    # -- waiting

    def complete(self, message: Send | Receive, timeout: float | None = None) -> None:
        """Return when the tensor may be used again.

        Raises:
            PeerLost: the other rank died, or did not come within the time-out.
            Mismatch: the message has another size.
        """
        if not message.done:
            limit = self.timeout if timeout is None else timeout
            waiting.until(
                lambda: self._ready(message),
                self._word,
                lambda waited: self._missed(message, waited, limit),
                self,
            )
        if isinstance(message, Receive) and message.error is not None:
            raise message.error

    def _ready(self, message: Send | Receive) -> bool:
        with self.lock:
            self.advance(message if isinstance(message, Receive) else None)
            return message.done

    def go_on(self) -> None:
        """Advance what is left, if no other thread does so; on behalf of a wait elsewhere."""
        if self.lock.acquire(blocking=False):
            try:
                self.advance(None)
            finally:
                self.lock.release()

    def advance(self, wanted: Receive | None) -> None:
        """Write what has room, read what has arrived."""
        for target, queue in self.outgoing.items():
            if queue:
                self._push(target)
        if wanted is not None and wanted.source is not None:
            self._pull(wanted.source, wanted)
        if wanted is None or not wanted.done:
            for source in range(self.segment.num_ranks):
                if wanted is None or wanted.source != source:
                    anyone = wanted is not None and wanted.source is None
                    self._pull(source, wanted if anyone else None)
        large = self.segment.ring_size - _HEADER.size
        behind = (
            any(self.outgoing.values())
            or any(place.nbytes > large for place in self.receives)
            or any(inbox.reading for inbox in self.inboxes)
        )
        (waiting.UNFINISHED.add if behind else waiting.UNFINISHED.discard)(self)

    def _word(self) -> tuple[int, int, futex.Nap]:
        nap = waiting.FLAG_NAP if any(self.outgoing.values()) else waiting.NAP
        return self.segment.base + 4 * self._bell, self._words[self._bell], nap

    def _missed(self, message: Send | Receive, waited: float, limit: float) -> None:
        if isinstance(message, Send):
            others = [message.target]
        elif message.source is not None:
            others = [message.source]
        else:
            others = [r for r in range(self.segment.num_ranks) if r != self.rank]
        peers = self.segment.peers
        if peers is None:
            return
        dead = peers.dead(others)
        me, what = self.ranks[self.rank], f"{message.name} with tag {message.tag}"
        if dead and len(dead) == len(others):
            # What it sent before its end may still lie in the ring: one more look.
            if self._ready(message):
                return
            who = ", ".join(f"rank {self.ranks[r]} (process {peers.pids[r]})" for r in dead)
            raise PeerLost(f"{who} died; rank {me} was waiting for it in a {what}")
        if waited > limit:
            who = ", ".join(f"rank {self.ranks[r]} ({peers.describe(r)})" for r in others)
            raise PeerTimeout(f"rank {me} waited {waited:.1f} s in a {what} for {who}")
