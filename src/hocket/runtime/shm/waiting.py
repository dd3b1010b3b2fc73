"""Waiting: asleep until a word changes, awake often enough to see a peer die or time run out.

What this process left unfinished in other groups (a message larger than its ring, an asynchronous
collective of many chunks) goes on while it waits here: otherwise two ranks could wait for each
other's leftovers.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from hocket.runtime.host_cores import usable_cores
from hocket.runtime.shm import futex

NAP = futex.Nap(0.2)
# Where the waking depends on a flag that the other side may miss by nanoseconds.
FLAG_NAP = futex.Nap(0.005)
_SHORT_NAP = futex.Nap(0.002)
# A look at a word costs 50 ns here: about what putting a thread to sleep and waking it costs.
_LOOKS = 400


class Unfinished(Protocol):
    """A group that has more to do than its last call could."""

    def go_on(self) -> None: ...


UNFINISHED: set[Unfinished] = set()
_num_cores = usable_cores()
_num_ranks = 1


def expect_ranks(num_ranks: int) -> None:
    """Learn how many ranks share this machine: with more than cores, looking is stealing."""
    global _num_ranks  # noqa: PLW0603  one number a process, grown by each group
    _num_ranks = max(_num_ranks, num_ranks)


def crowded() -> bool:
    """Whether more ranks than cores are known on this machine."""
    return _num_ranks > _num_cores


def until(
    ready: Callable[[], bool],
    word: Callable[[], tuple[int, int, futex.Nap]],
    missed: Callable[[float], None],
    me: Unfinished,
) -> None:
    """Return once `ready()`.

    Args:
        ready: does what can be done and tells whether that was all.
        word: address and present value of the word whose change may make more possible, taken
            before `ready` looks so that no change is slept through; and how long to sleep.
        missed: called at times with the seconds waited; raises where a peer is dead or late.
        me: the group that waits.
    """
    begin = time.monotonic()
    while True:
        before = word()
        if ready():
            return
        others = [group for group in UNFINISHED if group is not me]
        if word() == before:  # else another word is awaited by now, or this one has changed
            address, seen, nap = before
            futex.wait(address, seen, _SHORT_NAP if others else nap)
        for group in others:
            group.go_on()
        waited = time.monotonic() - begin
        if waited > 0.15:
            missed(waited)


def look(words: memoryview, index: int, value: int) -> bool:
    """Look at a word for some microseconds, where a core can be spared; whether it is `value`."""
    if crowded():
        return bool(words[index] == value)
    for _ in range(_LOOKS):  # noqa: SIM110  any() is three times slower
        if words[index] == value:
            return True
    return False
