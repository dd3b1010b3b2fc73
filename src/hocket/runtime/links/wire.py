"""Wire: what is on every link at this moment, in memory that the ranks of one machine share.

A flow is one collective or message. It begins when its last rank has come, and its bytes run at

    min( its own rate, over its ports: rate of the port / flows on it )

so that traffic on one link shares it. The first rank to look brings the account up to the present;
when a flow has run, its latency follows. Waiting ranks sleep and look again: nothing spins.

Layout of the memory, in words of 8 bytes:

    header      last moment, groups handed out, number of active flows, their slots ...
    slots       RING for each group, MESSAGES for each ordered pair of ranks; of WORDS words:
                sequence, arrived, state, remaining, rate, latency, end, ports (4 words of bits)
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hocket.runtime.shm import waiting
from hocket.spec.errors import OptionError
from hocket.spec.links import Links, Traffic

GROUPS, RING, MESSAGES, WORDS = 256, 64, 32, 12
MOST_FLOWS = 500
HEADER = 8 + MOST_FLOWS
MOST_PORTS = 256
SEQUENCE, ARRIVED, STATE, REMAINING, RATE, LATENCY, END, PORTS = range(8)
GATHERING, RUNNING, THROUGH = 0.0, 1.0, 2.0
_LAST, _GROUPS, _ACTIVE = 0, 1, 2

SHORT = 0.002
"""Seconds of sleep while a flow's end may still move, or work of this rank is left in a group."""

_BIT = [1 << bit for bit in range(64)]


class Wire:
    """One rank's view of all links of its job.

    Args:
        links: what joins the ranks, with a scale.
        rank, world_size: of this rank.
        store: that all ranks share; rank 0 makes the memory.

    Raises:
        OptionError: more ends of links than the memory has room for.
    """

    def __init__(self, links: Links, rank: int, world_size: int, store: Any) -> None:
        links.check(world_size)
        self.links, self.rank, self.world_size = links, rank, world_size
        self._rates = links.ports(world_size)
        if len(self._rates) > MOST_PORTS:
            raise OptionError(
                f"{links} between {world_size} ranks have {len(self._rates)} ends, the limit is "
                f"{MOST_PORTS}",
                hint="fewer ranks, or larger domains",
            )
        pairs = world_size * world_size
        size = 8 * (HEADER + WORDS * (GROUPS * RING + pairs * MESSAGES))
        if rank == 0:
            self._file = os.memfd_create("hocket-links")
            os.truncate(self._file, size)
            store.set("links/memory", f"/proc/{os.getpid()}/fd/{self._file}")
        else:
            self._file = os.open(store.get("links/memory").decode(), os.O_RDWR)
        self._memory = mmap.mmap(self._file, size)
        self._words = memoryview(self._memory).cast("d")
        self._bits = memoryview(self._memory).cast("Q")
        self._mine = threading.Lock()  # the kernel's lock is the process's, not the thread's

    # --- places ------------------------------------------------------------------------------

    def new_group(self) -> int:
        """A number for a group, given out once; the group's first rank asks."""
        with self._locked():
            number = int(self._words[_GROUPS])
            assert number < GROUPS, "too many groups"
            self._words[_GROUPS] = number + 1
        return number

    def collective(self, group: int, sequence: int) -> int:
        """The slot of a group's collective number `sequence`."""
        return HEADER + WORDS * (group * RING + sequence % RING)

    def message(self, source: int, target: int, sequence: int) -> int:
        """The slot of message number `sequence` from rank to rank."""
        pair = source * self.world_size + target
        return HEADER + WORDS * (GROUPS * RING + pair * MESSAGES + sequence % MESSAGES)

    # --- flows -------------------------------------------------------------------------------

    def arrive(self, slot: int, sequence: int, traffic: Traffic, ranks: int = 1) -> None:
        """One of `ranks` ranks has come to a flow; with the last one it begins."""
        words = self._words
        with self._locked():
            if words[slot + SEQUENCE] != sequence + 1:
                words[slot + SEQUENCE] = sequence + 1
                words[slot + ARRIVED] = 0
                words[slot + STATE] = GATHERING
            words[slot + ARRIVED] += 1
            if words[slot + ARRIVED] < ranks:
                return
            now = time.monotonic()
            self._advance(now)
            words[slot + LATENCY] = traffic.latency
            words[slot + END] = now + traffic.latency
            words[slot + STATE] = THROUGH
            active = int(words[_ACTIVE])
            if traffic.volume > 0 and active < MOST_FLOWS:
                words[slot + STATE] = RUNNING
                words[slot + REMAINING] = traffic.volume
                words[slot + RATE] = traffic.rate
                for word in range(4):
                    mask = 0
                    for port in traffic.ports:
                        if port >> 6 == word:
                            mask |= _BIT[port & 63]
                    self._bits[slot + PORTS + word] = mask
                words[HEADER - MOST_FLOWS + active] = slot
                words[_ACTIVE] = active + 1
                self._advance(now)

    def end(self, slot: int, sequence: int) -> tuple[float, bool]:
        """When a flow ends as far as is known now, and whether that may still change.

        0 for a flow that is long past or whose ranks have not all come.
        """
        words = self._words
        with self._locked():
            if words[slot + SEQUENCE] != sequence + 1 or words[slot + STATE] == GATHERING:
                return 0.0, False
            if words[slot + STATE] == RUNNING:
                self._advance(time.monotonic())
            running = words[slot + STATE] == RUNNING
            return words[slot + END], running and words[_ACTIVE] > 1

    def through(self, slot: int, sequence: int) -> bool:
        """Whether a flow has ended."""
        end, _ = self.end(slot, sequence)
        return end <= time.monotonic()

    def wait(self, slot: int, sequence: int) -> None:
        """Sleep until a flow has ended."""
        while True:
            end, moving = self.end(slot, sequence)
            left = end - time.monotonic()
            if left <= 0:
                return
            others = list(waiting.UNFINISHED)
            time.sleep(min(left, SHORT) if moving or others else left)
            for group in others:
                group.go_on()

    # --- the account -------------------------------------------------------------------------

    def _advance(self, now: float) -> None:
        """Let the active flows run to `now`, and compute when each will end."""
        words = self._words
        first = HEADER - MOST_FLOWS
        moment = words[_LAST]
        flows = [int(words[first + i]) for i in range(int(words[_ACTIVE]))]
        words[_LAST] = max(now, moment)
        while flows:
            rates = self._shares(flows)
            nearest = min(words[f + REMAINING] / rate for f, rate in zip(flows, rates, strict=True))
            span = min(nearest, max(0.0, now - moment))
            moment += span
            left = []
            for flow, rate in zip(flows, rates, strict=True):
                rest = words[flow + REMAINING] - rate * span
                words[flow + REMAINING] = rest
                if rest <= rate * 1e-9:  # a nanosecond's worth is rounding
                    words[flow + STATE] = THROUGH
                    words[flow + END] = moment + words[flow + LATENCY]
                else:
                    words[flow + END] = moment + rest / rate + words[flow + LATENCY]
                    left.append(flow)
            if len(left) == len(flows):
                break
            flows = left
        for index, flow in enumerate(flows):
            words[first + index] = flow
        words[_ACTIVE] = len(flows)

    def _shares(self, flows: list[int]) -> list[float]:
        """Bytes/s of every flow while all of them run."""
        ports = [list(self._ports_of(flow)) for flow in flows]
        load: dict[int, int] = {}
        for port in (port for each in ports for port in each):
            load[port] = load.get(port, 0) + 1
        return [
            min(self._words[flow + RATE], *(self._rates[p] / load[p] for p in each))
            for flow, each in zip(flows, ports, strict=True)
        ]

    def _ports_of(self, flow: int) -> Iterator[int]:
        for word in range(4):
            mask = self._bits[flow + PORTS + word]
            while mask:
                low = mask & -mask
                yield 64 * word + low.bit_length() - 1
                mask ^= low

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with self._mine:
            fcntl.lockf(self._file, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.lockf(self._file, fcntl.LOCK_UN)
