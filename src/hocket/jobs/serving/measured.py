"""Keeper: what a server does, counted while it runs and kept as measured.json.

    router      when requests came, when their first and last tokens did    -> latencies, load
    drivers     what steps took, by what was in them                        -> decode, prefill

Everything is bounded: of the requests the newest are kept, of the steps sums by size.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hocket.spec.errors import HocketError
from hocket.spec.files import write_text
from hocket.spec.serving_forecast import (
    Decode,
    Percentiles,
    Prefill,
    ReplicaMeasured,
    ServiceLoad,
    ServingMeasured,
)

if TYPE_CHECKING:
    from hocket.jobs.serving.replicas import ReplicaSet
    from hocket.serving.front.router import Router, Timing

PERIOD = 10.0
"""Seconds between two writings."""

KEPT = 20_000
"""Requests whose latencies are kept."""

WINDOW = 10.0
"""Seconds over which arrivals are counted, at least, to say how heavy the load was."""

ENOUGH = 8
"""Requests of a load from which its percentiles are reported."""

PATIENCE = 5.0
"""Seconds that a driver has to answer."""


class Keeper:
    """Counts, and writes what it has counted.

    Args:
        layout: text form. router, replicas: whose. file: measured.json.
    """

    def __init__(self, layout: str, router: Router, replicas: ReplicaSet, file: Path) -> None:
        self.layout = layout
        self.router = router
        self.replicas = replicas
        self.file = file
        self.timings: deque[Timing] = deque(maxlen=KEPT)
        self.requests = self.refused = self.failed = 0
        self.prompt_tokens = self.cached_tokens = self.output_tokens = 0
        self.start_seconds = 0.0
        self._begun: float | None = None
        self._lives: dict[tuple[int, int], dict[str, Any]] = {}
        router.listeners.append(self.count)

    def begin(self, start_seconds: float) -> None:
        """The server is ready."""
        self.start_seconds = start_seconds
        self._begun = time.monotonic()
        self.last()

    @property
    def begun(self) -> bool:
        """Whether the server was ever ready."""
        return self._begun is not None

    def count(self, timing: Timing) -> None:
        """A request is over."""
        self.requests += timing.finished
        self.refused += timing.refused
        self.failed += timing.failed
        if not timing.refused:
            self.prompt_tokens += timing.prompt
            self.cached_tokens += timing.cached
            self.output_tokens += timing.tokens
        if timing.finished and timing.first is not None:
            self.timings.append(timing)

    async def keep(self) -> None:
        """Write it again and again, until cancelled."""
        while True:
            await asyncio.sleep(PERIOD)
            await self.ask()
            with contextlib.suppress(OSError):  # a full disk is no reason to stop answering
                self.last()

    async def ask(self) -> None:
        """Have every replica tell what it has counted."""
        asked = [one for one in self.replicas.replicas if one.client is not None]
        answers = [asyncio.ensure_future(one.client.measured()) for one in asked if one.client]
        if answers:
            await asyncio.wait(answers, timeout=PATIENCE)
        for one, answer in zip(asked, answers, strict=True):
            if not answer.done():
                answer.cancel()
            elif answer.exception() is None:
                self._lives[one.number, one.starts] = answer.result()
        with contextlib.suppress(HocketError, asyncio.CancelledError):
            await asyncio.gather(*answers)

    def last(self) -> ServingMeasured:
        """All that was counted so far, written."""
        found = self.measured()
        write_text(self.file, found.to_json())
        return found

    def measured(self) -> ServingMeasured:
        """All that was counted so far."""
        now = time.monotonic()
        times = list(self.timings)
        return ServingMeasured(
            layout=self.layout,
            seconds=0.0 if self._begun is None else now - self._begun,
            start_seconds=self.start_seconds,
            requests=self.requests,
            refused=self.refused,
            failed=self.failed,
            restarts=self.replicas.restarts,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            output_tokens=self.output_tokens,
            busy_seconds=self.router.busy,
            ttft=percentiles(_ttft(times)),
            tpot=percentiles(_tpot(times)),
            end_to_end=percentiles([one.ended - one.came for one in times if one.ended]),
            loads=loads(times, len(self.replicas.replicas)),
            replicas=tuple(self._replica(number) for number in range(len(self.replicas.replicas))),
        )

    def _replica(self, number: int) -> ReplicaMeasured:
        one = self.replicas.replicas[number]
        lives = [said for (of, _), said in sorted(self._lives.items()) if of == number]
        counted = [said.get("measured") or {} for said in lives]
        counts: dict[str, float] = {}
        for said, steps in zip(lives, counted, strict=True):
            for name, value in {**(said.get("stats") or {}), **steps}.items():
                if isinstance(value, int | float) and not isinstance(value, bool):
                    counts[name] = counts.get(name, 0.0) + value
        return ReplicaMeasured(
            number=number,
            starts=one.starts,
            requests=self.router.routed.get(number, 0),
            cache_tokens=int(one.capacity.get("cache_tokens", 0)),
            decode=_merged_decode(row for said in counted for row in said.get("decode", ())),
            prefill=_merged_prefill(row for said in counted for row in said.get("prefill", ())),
            memory=_rows(one.capacity, "memory"),
            attention=_rows(one.capacity, "attention"),
            graphs=_rows(one.capacity, "graphs"),
            counts=counts,
        )


def _rows(capacity: Mapping[str, Any], key: str) -> tuple[dict[str, Any], ...]:
    return tuple(dict(row) for row in capacity.get(key) or ())


def _merged_decode(rows: Iterable[dict[str, Any]]) -> tuple[Decode, ...]:
    """Rows of several lives of a replica, those of about the same batch in one."""
    found: dict[int, list[Decode]] = {}
    for row in rows:
        one = Decode(**row)
        found.setdefault(round(8 * math.log2(max(one.batch, 1.0))), []).append(one)
    return tuple(
        Decode(
            batch=_mean([(r.batch, r.count) for r in same]),
            context=_mean([(r.context, r.count) for r in same]),
            seconds=_mean([(r.seconds, r.count) for r in same]),
            count=sum(r.count for r in same),
        )
        for _, same in sorted(found.items())
    )


def _merged_prefill(rows: Iterable[dict[str, Any]]) -> tuple[Prefill, ...]:
    found: dict[int, list[Prefill]] = {}
    for row in rows:
        one = Prefill(**row)
        found.setdefault(round(8 * math.log2(max(one.tokens, 1.0))), []).append(one)
    return tuple(
        Prefill(
            tokens=_mean([(r.tokens, r.count) for r in same]),
            seconds=_mean([(r.seconds, r.count) for r in same]),
            count=sum(r.count for r in same),
        )
        for _, same in sorted(found.items())
    )


def _mean(values: Sequence[tuple[float, int]]) -> float:
    total = sum(count for _, count in values)
    return sum(value * count for value, count in values) / total if total else 0.0


def _ttft(times: Iterable[Timing]) -> list[float]:
    return [one.first - one.came for one in times if one.first is not None]


def _tpot(times: Iterable[Timing]) -> list[float]:
    return [
        (one.ended - one.first) / (one.tokens - 1)
        for one in times
        if one.first is not None and one.ended is not None and one.tokens > 1
    ]


def percentiles(values: Iterable[float]) -> Percentiles:
    """Of some seconds: the least value that so many percent do not exceed; 0 of none."""
    ordered = sorted(values)
    if not ordered:
        return Percentiles()

    def at(share: float) -> float:
        return ordered[max(0, math.ceil(share * len(ordered)) - 1)]

    return Percentiles(p50=at(0.5), p90=at(0.9), p99=at(0.99))


def loads(times: Sequence[Timing], replicas: int) -> tuple[ServiceLoad, ...]:
    """What requests met with, by how many came a second to each replica, lightest load first.

    Time is cut into windows; those in which about as many came (within a factor of two) are put
    together. A load with few requests is left out.
    """
    if not times:
        return ()
    start = min(one.came for one in times)
    end = max(one.came for one in times)
    window = max(WINDOW, (end - start) / 200)
    windows: dict[int, list[Timing]] = {}
    for one in times:
        windows.setdefault(int((one.came - start) / window), []).append(one)
    groups: dict[int, list[list[Timing]]] = {}
    for came in windows.values():
        groups.setdefault(round(math.log2(len(came))), []).append(came)
    found = []
    for _, same in sorted(groups.items()):
        inside = [one for came in same for one in came]
        if len(inside) < ENOUGH:
            continue
        seconds = window * len(same)
        if len(windows) == 1:  # nothing tells when the next would have come but those that came
            seconds = max(end - start, 1e-9) * len(inside) / max(len(inside) - 1, 1)
        ttft, tpot = percentiles(_ttft(inside)), percentiles(_tpot(inside))
        ends = [one.ended for one in inside if one.ended is not None]
        span = max(seconds, (max(ends) - min(one.came for one in inside)) if len(same) == 1 else 0)
        decoding = sum(one.ended - one.first for one in inside if one.ended and one.first)
        found.append(
            ServiceLoad(
                rate=len(inside) / seconds / replicas,
                tokens_per_second=sum(one.tokens for one in inside) / span / replicas,
                ttft_p50=ttft.p50,
                ttft_p90=ttft.p90,
                ttft_p99=ttft.p99,
                tpot_p50=tpot.p50,
                tpot_p90=tpot.p90,
                tpot_p99=tpot.p99,
                batch=decoding / span / replicas,
            )
        )
    return tuple(found)
