"""Recorder: counts every collective, and while asked to, notes what ran when.

Counting is always on and costs a dictionary update a collective. Noting spans is off except in the
step whose timeline is wanted; then each span becomes a `spec.timeline.Event`. On CUDA the ends of
a span are events on the current stream, so that recording does not wait for the device.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch

from hocket.spec.timeline import Event

PHASES = ("microbatch", "step", "other")

COLLECTIVES = (
    "broadcast",
    "scatter",
    "gather",
    "all-gather",
    "reduce",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "send",
    "receive",
    "barrier",
)


class ProgressListener(Protocol):
    """Receives a rank's progress (`launch.heartbeat.Heart`)."""

    def collective(self, name: str, axis: str) -> None: ...

    def action(self, index: int, microbatch: int | None) -> None: ...


class Recorder:
    """What one rank communicated and computed.

    Attributes:
        phase: what collectives are counted under: `microbatch` (grows with the microbatches),
            `step` (once a step) or `other` (set-up, saves, evaluation). The engine switches it.
        recording: whether spans are noted.
        beat: is notified of every collective as it is entered, and of every action of the schedule.
        origin: subtracted from every time. The clock is the machine's monotonic one, which its
            processes share; on several machines set the origin after a barrier.
    """

    def __init__(self, rank: int = 0, device: torch.device | str = "cpu") -> None:
        self.rank = rank
        self.phase = "other"
        self.recording = False
        self.origin = 0.0
        self.beat: ProgressListener | None = None
        self._cuda = torch.device(device).type == "cuda"
        self._counts: dict[tuple[str, str, str], list[int]] = {}
        self._spans: list[tuple[Any, Any, dict[str, Any]]] = []
        self._waits: list[tuple[Any, Any]] = []
        self._base: tuple[Any, float] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Recorder:
        return self  # a copied module is counted with its original

    # --- counting --------------------------------------------------------------------------

    def count(self, name: str, axis: str, nbytes: int) -> None:
        """Count one collective of `nbytes` on this rank."""
        if self.beat is not None:
            self.beat.collective(name, axis)
        key = (name, axis, self.phase)
        entry = self._counts.get(key)
        if entry is None:
            assert name in COLLECTIVES, name
            self._counts[key] = [1, nbytes]
        else:
            entry[0] += 1
            entry[1] += nbytes

    def collectives(self) -> list[dict[str, Any]]:
        """Rows of name, axis, phase, count and bytes, sorted."""
        return [
            {"name": name, "axis": axis, "phase": phase, "count": count, "bytes": nbytes}
            for (name, axis, phase), (count, nbytes) in sorted(self._counts.items())
        ]

    def enqueued(self) -> dict[str, int]:
        """Collectives by axis, in all phases, without messages to one rank."""
        found: dict[str, int] = {}
        for (name, axis, _), (count, _) in list(self._counts.items()):
            if name not in ("send", "receive"):
                found[axis] = found.get(axis, 0) + count
        return found

    def clear(self) -> None:
        self._counts.clear()
        self._spans.clear()
        self._waits.clear()
        self._base = None

    @contextmanager
    def in_phase(self, phase: str) -> Iterator[None]:
        """Count under `phase` inside the block."""
        assert phase in PHASES, phase
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before

    # --- timing ----------------------------------------------------------------------------

    def mark(self) -> Any:
        """This moment: seconds, or a CUDA event. None while not recording."""
        if not self.recording:
            return None
        if not self._cuda:
            return time.perf_counter()
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        if self._base is None:
            event.synchronize()
            self._base = (event, time.perf_counter())
        return event

    def add(self, start: Any, lane: str, kind: str, name: str, **fields: Any) -> None:
        """Note a span from `start` (a mark) to now. Nothing if `start` is None.

        `fields` are those of `spec.timeline.Event`: stage, microbatch, axis, bytes.
        """
        if start is not None and self.recording:
            self._spans.append(
                (start, self.mark(), dict(lane=lane, kind=kind, name=name, **fields))
            )

    def span(self, lane: str, kind: str, name: str, **fields: Any) -> AbstractContextManager[None]:
        """Note the block as one span; costs nothing while not recording."""
        return self._span(lane, kind, name, fields) if self.recording else nullcontext()

    @contextmanager
    def _span(self, lane: str, kind: str, name: str, fields: dict[str, Any]) -> Iterator[None]:
        start = self.mark()
        try:
            yield
        finally:
            self.add(start, lane, kind, name, **fields)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Note the block as one that waits for a collective which runs alongside compute."""
        start = self.mark()
        yield
        if start is not None and self.recording:
            self._waits.append((start, self.mark()))

    def waits(self) -> list[tuple[float, float]]:
        """Start and end of each such block, in seconds as of `timeline_events`."""
        return [(self._seconds(start), self._seconds(end)) for start, end in self._waits]

    def timeline_events(self) -> list[Event]:
        """The spans noted so far, as events of this rank in seconds."""
        if self._cuda and self._spans:
            torch.cuda.synchronize()
        return [
            Event(rank=self.rank, start=self._seconds(start), end=self._seconds(end), **fields)
            for start, end, fields in self._spans
        ]

    def _seconds(self, mark: Any) -> float:
        if isinstance(mark, float):
            return mark - self.origin
        assert self._base is not None
        event, seconds = self._base
        return seconds - self.origin + float(event.elapsed_time(mark)) / 1e3
