"""Segment: the shared memory of one group, and the processes that hold it.

    page 0..    process ids, doorbells, progress, counters and signatures of cells, channel heads
    cells       NUM_CELLS x n slots of SLOT bytes     what collectives pass through
    rings       n x n of RING bytes                   what send and receive pass through
    parts       2 x n of PART bytes                   what compiled code of others sums, if any

It is a file without a name (memfd): nothing is left in /dev/shm after a kill, its size is not
bound to that of /dev/shm, and pages cost memory only once touched.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import TYPE_CHECKING

import numpy as np

from hocket.runtime.shm.peers import Peers

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

NUM_CELLS = 8
LINE = 64  # bytes of a cache line: words of different writers stay apart
CHANNEL = 4 * LINE
PART = 1 << 20  # bytes of a sum that compiled code takes: a step's hidden states while decoding


def _slot_and_ring(num_ranks: int) -> tuple[int, int]:
    """Bytes of a slot and of a ring; smaller where many ranks multiply them."""
    if num_ranks <= 8:
        return 1 << 19, 1 << 22
    return 1 << 18, 1 << 20


class ShmSegment:
    """Mapped shared memory of `num_ranks` processes.

    Attributes:
        base: address of the first byte.
        bytes: all of it as uint8; `words32`, `words64` the head as integers.
        doorbell: index (32-bit) of rank r's doorbell is `doorbell + r * 16`.
        done: index (64-bit) of how many chunks rank r has finished reading.
        signatures: index (64-bit) of what rank r posted in a cell: `signatures + cell * n + r`.
        counters: byte offset of a cell's two arrival counters, a line each.
        room: index (32-bit) of the word that is rung when cells become free; the flag that asks
            for it lies a line behind, the word nobody waits on another line behind.
        channels, slots, rings, parts: byte offsets.
        announced: byte offset of n lines that belong to the parts; the group itself uses neither.
    """

    def __init__(self, store: Store, rank: int, num_ranks: int) -> None:
        self.rank, self.num_ranks = rank, num_ranks
        self.slot_size, self.ring_size = _slot_and_ring(num_ranks)
        n = num_ranks
        offset = 8 * n  # process ids
        offset = _up(offset)
        self.doorbell = offset // 4
        offset += LINE * n
        self.done = offset // 8
        offset = _up(offset + 8 * n)
        self.room = offset // 4
        offset += 3 * LINE
        self.counters = offset
        offset += 2 * LINE * NUM_CELLS
        self.signatures = offset // 8
        offset = _up(offset + 8 * n * NUM_CELLS)
        self.channels = offset
        offset += CHANNEL * n * n
        self.announced = offset
        offset += LINE * n
        self.head_size = _up(offset, mmap.PAGESIZE)
        self.slots = self.head_size
        self.rings = self.slots + NUM_CELLS * n * self.slot_size
        self.parts = self.rings + n * n * self.ring_size
        self.size = self.parts + 2 * n * PART
        self._fd = -1
        fd = self._create(store) if rank == 0 else self._open(store)
        try:
            self._map = mmap.mmap(fd, self.size)
        finally:
            if rank != 0:
                os.close(fd)
        head = memoryview(self._map)[: self.head_size]
        self.words32 = head.cast("I")
        self.words64 = head.cast("Q")
        self.bytes = np.frombuffer(self._map, np.uint8)
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.words64[rank] = os.getpid()
        self.peers: Peers | None = None

    def _create(self, store: Store) -> int:
        self._fd = os.memfd_create("hocket-shm")
        os.ftruncate(self._fd, self.size)
        store.set("shm", f"{os.getpid()} {self._fd}")
        return self._fd

    def _open(self, store: Store) -> int:
        pid, fd = map(int, store.get("shm").decode().split())
        try:
            return os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR)
        except OSError as error:
            raise RuntimeError(
                f"the shared memory of process {pid} cannot be opened ({error}); "
                "ranks of different containers or users need --backend gloo"
            ) from None

    def everyone_has_it(self) -> None:
        """All have mapped it: the file's last open descriptor goes, and watching begins."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self.peers = Peers(self.words64[: self.num_ranks].tolist())

    def slot(self, cell: int, rank: int) -> int:
        """Byte offset of what `rank` puts into `cell`."""
        return self.slots + (cell * self.num_ranks + rank) * self.slot_size

    def ring(self, source: int, target: int) -> int:
        """Byte offset of the ring from one rank to another."""
        return self.rings + (source * self.num_ranks + target) * self.ring_size

    def channel(self, source: int, target: int) -> int:
        """Byte offset of that ring's head, tail and flag, a line each."""
        return self.channels + (source * self.num_ranks + target) * CHANNEL


def _up(offset: int, to: int = LINE) -> int:
    return -(-offset // to) * to


def needed(num_ranks: int) -> int:
    """Bytes that one group over all ranks is likely to touch: its cells and a ring each way."""
    slot, ring = _slot_and_ring(num_ranks)
    return NUM_CELLS * num_ranks * slot + 2 * num_ranks * ring
