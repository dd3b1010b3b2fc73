"""Pauses: when a run saves by the clock, and when it stops because it was asked to.

Rank 0 decides, and all ranks save at the same step. At a boundary, every few steps, rank 0
announces in the store what is done at the next boundary; there every rank looks it up:

    step      b                    b + every
    rank 0    announces "save"     saves
    rank n    (runs behind)        looks up b's announcement: there, and saves

It is there, because a step ends nowhere before rank 0 has begun it: its loss and its norm are
all-reduced over all ranks. On CUDA the host runs ahead of its device, so a boundary waits for the
device to end the step before the last, and boundaries are at least three steps apart.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hocket.launch import RankContext

NOTHING, SAVE, STOP = 0, 1, 2

APART = 0.25
"""Seconds between two boundaries: looking up an announcement takes a hundred microseconds."""
FARTHEST = 1000
"""Steps between two boundaries at most."""
SETTLED = 3
"""Steps of this start after which a step's time is taken for those to come."""


class Pauses:
    """Agreement of all ranks on saves by time and on stopping.

    Args:
        context: of this rank.
        first: steps done before this start.
        seconds: time between saves; None: none by time.
        cuda: the host runs ahead of its device.
    """

    def __init__(
        self, context: RankContext, first: int, seconds: float | None, *, cuda: bool
    ) -> None:
        self.context = context
        self.first = first
        self.seconds = seconds
        self.least = 3 if cuda else 1
        self.every: int | None = None
        self._saved = time.monotonic()
        self._announced = NOTHING
        self._ends: dict[int, Any] = {}
        self._cuda = cuda

    def saved(self) -> None:
        """A checkpoint was written: the next one by time is due that much later."""
        self._saved = time.monotonic()

    def after(self, step: int, seconds: float, end: Any) -> int:
        """What every rank does after `step`: NOTHING, SAVE, or STOP, which saves too.

        Args:
            seconds: that this step took; rank 0's counts.
            end: the mark of its end (`reading.mark`).
        """
        alone = self.context.world_size == 1
        if self._cuda:
            self._ends[step] = end
            self._ends.pop(step - 3, None)
        if self.every is None:
            if step < self.first + SETTLED:
                return NOTHING
            self.every = self._agree_on_pace(step, seconds, alone)
        if step % self.every:
            return NOTHING
        if self._cuda and step - 2 in self._ends:
            self._ends[step - 2].synchronize()
        if alone:
            return self._wish()
        return self._exchange(step)

    def _wish(self) -> int:
        if self.context.stop_asked.is_set():
            return STOP
        due = self.seconds is not None and time.monotonic() - self._saved >= self.seconds
        return SAVE if due else NOTHING

    def _agree_on_pace(self, step: int, seconds: float, alone: bool) -> int:
        pace = max(self.least, min(FARTHEST, round(APART / max(seconds, 1e-6))))
        if alone:
            return pace
        store, key = self.context.store(), f"pace/{step}"
        if self.context.rank == 0:
            store.set(key, str(pace))
            return pace
        return int(store.get(key))

    def _exchange(self, step: int) -> int:
        assert self.every is not None
        store, asked = self.context.store(), "stop asked"
        if self.context.rank > 0:
            if self.context.stop_asked.is_set():  # another launcher's signal may reach any rank
                store.set(asked, "1")
            key = f"pause/{step - self.every}"
            return int(store.get(key)) if store.check([key]) else NOTHING
        announced, self._announced = self._announced, NOTHING
        if announced:
            return announced
        wish = self._wish()
        if wish != STOP and store.check([asked]):
            wish = STOP
        if wish:
            key = f"pause/{step}"
            store.set(key, str(wish))
            store.check([key])  # answered once it is set
            self._announced = wish
        return NOTHING
