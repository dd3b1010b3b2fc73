"""Traffic: requests x prices to latency, by playing one replica's continuous batching.

A server works in rounds. In a round every sequence that decodes gets one token, and what is left
of the token budget goes to prompts, first come first served (chunked prefill: Agrawal et al. 2024,
Sarathi-Serve; continuous batching: Yu et al. 2022, Orca):

    waiting --(cache reserved for prompt and answer)--> prompt, in chunks --> decode --> done
              ^ 1                                        ^ 2, first token        ^ 3, cache freed

With p pipeline stages a round has up to p batches on their way at once: it takes as long as the
slowest stage takes for all of them, or one batch through every stage, whichever is longer.

Only what changes the batch is an event: rounds of decode alone between an arrival and the next end
are summed, their context growing by one token each. Replicas are dealt requests in turn, so each
sees every R-th arrival, and all are alike: one is played.

Legend: rounds are in seconds; b sequences that decode, c their mean context, n prompt tokens.
"""

from __future__ import annotations

import bisect
import dataclasses
import heapq
import math
from collections import deque
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hocket.spec.serving_forecast import Percentiles

Floats = NDArray[np.float64]


class EngineStepCosts(Protocol):
    """Seconds of one engine step of a replica, see `hocket.cost.serving`. Arguments broadcast."""

    @property
    def stages(self) -> int: ...

    def step_seconds(
        self, prefill_tokens: Any, prefill_context: Any, decode_batch: Any, decode_context: Any
    ) -> Floats:
        """Of a step through every stage."""

    def stage_seconds(
        self, prefill_tokens: Any, prefill_context: Any, decode_batch: Any, decode_context: Any
    ) -> Floats:
        """Of a step on its slowest stage."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Latencies:
    """What the requests of one replica met with.

    Attributes:
        ttft, tpot, end_to_end: time to first token, time per output token, and in all.
        queue: of `ttft`, the wait until the prompt was begun.
        requests: how many were counted; `simulated_seconds`: the time in which they arrived.
        batch: sequences that decode together, mean over time; `batch_peak`: at most.
        cache: share of the cache that is reserved, mean over time; `cache_peak`: at most.
        busy: share of the time in which there was work.
    """

    ttft: Percentiles
    tpot: Percentiles
    end_to_end: Percentiles
    queue: Percentiles
    requests: int
    simulated_seconds: float
    batch: float
    batch_peak: int
    cache: float
    cache_peak: float
    busy: float

    def later(self, seconds: float) -> Latencies:
        """With first tokens, and ends, later by so much: what a request takes before its prompt."""
        return dataclasses.replace(
            self, ttft=self.ttft.later(seconds), end_to_end=self.end_to_end.later(seconds)
        )


class RoundTable:
    """Seconds of a round from a small table of prices: interpolated in b and n, linear in contexts.

    Args:
        prices: of one replica.
        chunk: most tokens of one batch's step. longest: tokens of the longest request.
        most: most sequences at once.
    """

    def __init__(self, prices: EngineStepCosts, *, chunk: int, longest: int, most: int) -> None:
        self.stages = int(prices.stages)
        self.chunk = chunk
        budget = chunk * self.stages
        self.prompts = [0.0, *(budget * f for f in (1 / 32, 1 / 8, 1 / 4, 1 / 2, 3 / 4, 1.0))]
        self.batches = _ladder(most)
        self.long = float(max(longest, 2))
        n, b, c, k = np.meshgrid(
            self.prompts, self.batches, [1.0, self.long], [0.0, self.long], indexing="ij"
        )
        seconds = round_seconds(prices, n, k, b, c, chunk=chunk)
        low, slope = seconds[..., 0, 0], (seconds[..., 1, 0] - seconds[..., 0, 0]) / (self.long - 1)
        prompt = (seconds[..., 0, 1] - seconds[..., 0, 0]) / self.long
        self.rows = np.stack([low, slope, prompt], axis=-1).tolist()
        self._known: dict[tuple[float, int], tuple[float, float, float]] = {}

    def terms(self, n: float, b: int) -> tuple[float, float, float]:
        """Of n prompt tokens and b sequences: seconds at context 1, and per token of either."""
        found = self._known.get((n, b))
        if found is None:
            i, x = _between(self.prompts, n)
            j, y = _between(self.batches, b)
            near, far = self.rows[i], self.rows[i + 1]
            p, q, r, s = near[j], near[j + 1], far[j], far[j + 1]
            u, v, w, z = (1 - x) * (1 - y), (1 - x) * y, x * (1 - y), x * y
            found = (
                u * p[0] + v * q[0] + w * r[0] + z * s[0],
                u * p[1] + v * q[1] + w * r[1] + z * s[1],
                u * p[2] + v * q[2] + w * r[2] + z * s[2],
            )
            self._known[n, b] = found
        return found


def round_seconds(
    prices: EngineStepCosts,
    prompt_tokens: Any,
    prompt_context: Any,
    batch: Any,
    context: Any,
    *,
    chunk: int,
) -> Floats:
    """Seconds in which each of `batch` sequences gets a token and so many prompt tokens are read.

    With stages, sequences are dealt evenly to as many batches as keep them busy, and prompt tokens
    to as few of these as hold them. Arguments broadcast.
    """
    n, k, b, c = np.broadcast_arrays(
        *(np.asarray(x, dtype=np.float64) for x in (prompt_tokens, prompt_context, batch, context))
    )
    if prices.stages == 1:
        return prices.step_seconds(n, k, b, c)
    reading = np.ceil(n / chunk)
    parts = np.clip(np.maximum(b, reading), 1.0, float(prices.stages))
    heavy = n / np.maximum(reading, 1.0)
    through = prices.step_seconds(heavy, k, b / parts, c)
    most = np.minimum(np.maximum(reading, 1.0), parts)
    rest = parts - most
    slowest = most * prices.stage_seconds(heavy, k, b / parts, c)
    slowest = slowest + rest * prices.stage_seconds(0.0, 0.0, b / parts, c)
    found: Floats = np.maximum(through, slowest)
    return found


def poisson(rate: float, count: int, *, seed: int = 0, every: int = 1) -> list[float]:
    """Arrival times of `count` requests, in seconds: every `every`-th of a Poisson stream."""
    gaps = np.random.default_rng(seed).gamma(every, 1.0 / rate, count)
    found: list[float] = np.cumsum(gaps).tolist()
    return found


@dataclasses.dataclass(frozen=True)
class LatencyLimits:
    """Seconds that a request may take, and how many may take longer."""

    ttft: float
    tpot: float
    exceptions: int


def simulate_requests(
    table: RoundTable,
    arrivals: list[float],
    *,
    prompt: int,
    output: int,
    capacity: float,
    most: int,
    warm_up: int = 0,
    tail: int = 0,
    limits: LatencyLimits | None = None,
) -> Latencies | None:
    """Play one replica.

    Args:
        arrivals: seconds, ascending.
        prompt, output: tokens of each request.
        capacity: tokens that the cache holds; a request reserves prompt + output, so that none is
            put out again.
        most: sequences at once, the cache apart.
        warm_up: first requests that are not counted. tail: last ones, which keep it busy.
        limits: None is returned as soon as more of the counted requests are slower.
    """
    need = prompt + output
    slots = min(most, int(capacity // need))
    assert slots >= 1, "a request must fit"
    count = len(arrivals)
    last = count - tail
    assert warm_up < last
    begun, first, done = [0.0] * count, [0.0] * count, [0.0] * count
    reading: deque[list[int]] = deque()  # [request, prompt tokens left]
    ends: list[tuple[int, int]] = []  # (round in which the last token comes, request)
    budget = table.chunk * table.stages
    now, turn, arrived, admitted, finished = arrivals[0], 0, 0, 0, 0
    decoding, contexts = 0, 0.0
    peak = most_held = 0
    area_batch = area_held = idle = 0.0
    start, stop = arrivals[warm_up], arrivals[last - 1]
    span = max(stop - start, 1e-12)
    slow = 0
    latest, slowest, exceptions = math.inf, math.inf, count
    if limits is not None:
        latest, exceptions = limits.ttft, limits.exceptions
        slowest = limits.tpot * max(output - 1, 1)

    while finished < count:
        while arrived < count and arrivals[arrived] <= now:
            arrived += 1
        while admitted < arrived and admitted - finished < slots:  # 1
            begun[admitted] = now
            reading.append([admitted, prompt])
            admitted += 1
        if admitted == finished:
            idle += _overlap(now, arrivals[arrived], start, stop)
            now = arrivals[arrived]
            continue
        before = now
        held = admitted - finished
        if reading:
            room = max(budget - decoding, 1)
            tokens, read = 0, 0.0
            complete: list[int] = []
            while reading and tokens < room:
                head = reading[0]
                take = min(head[1], room - tokens)
                seen = prompt - head[1]
                read += take * (seen + take / 2)
                tokens += take
                head[1] -= take
                if head[1] == 0:
                    complete.append(head[0])
                    reading.popleft()
            low, slope, each = table.terms(tokens, decoding)
            mean = contexts / decoding if decoding else 1.0
            now += low + slope * (mean - 1) + each * (read / tokens)
            turn += 1
            contexts += decoding
            batch = decoding
            for request in complete:  # 2
                first[request] = now
                if output == 1:
                    done[request] = now
                    finished += 1
                else:
                    heapq.heappush(ends, (turn + output - 1, request))
                    decoding += 1
                    contexts += prompt + 1
        else:
            rounds = ends[0][0] - turn
            low, slope, _ = table.terms(0, decoding)
            each_round = low + slope * (contexts / decoding - 1)
            # The context grows by one a round: k rounds take k x + s k (k - 1) / 2.
            wait = arrivals[arrived] - now if arrived < count else math.inf
            if admitted - finished < slots and wait < rounds * (each_round + slope * rounds / 2):
                guess = _rounds_in(wait, each_round, slope)
                rounds = max(1, min(rounds, guess))
            now += rounds * each_round + slope * rounds * (rounds - 1) / 2
            turn += rounds
            contexts += rounds * decoding
            batch = decoding
        if now > start and before < stop:
            passed = _overlap(before, now, start, stop)
            peak = max(peak, batch)
            most_held = max(most_held, held)
            area_batch += batch * passed
            area_held += held * passed
        while ends and ends[0][0] <= turn:  # 3
            _, request = heapq.heappop(ends)
            done[request] = now
            finished += 1
            decoding -= 1
            contexts -= need
            late = first[request] - arrivals[request] > latest or now - first[request] > slowest
            if late and warm_up <= request < last:
                slow += 1
                if slow > exceptions:
                    return None
    kept = slice(warm_up, last)
    came, began = np.array(arrivals[kept]), np.array(begun[kept])
    spoke, ended = np.array(first[kept]), np.array(done[kept])
    share = need / capacity
    return Latencies(
        ttft=_percentiles(spoke - came),
        tpot=_percentiles((ended - spoke) / max(output - 1, 1)),
        end_to_end=_percentiles(ended - came),
        queue=_percentiles(began - came),
        requests=last - warm_up,
        simulated_seconds=span,
        batch=area_batch / span,
        batch_peak=peak,
        cache=area_held / span * share,
        cache_peak=most_held * share,
        busy=1 - idle / span,
    )


def _overlap(begin: float, end: float, low: float, high: float) -> float:
    """Seconds of [begin, end] that lie in [low, high]."""
    return max(0.0, min(end, high) - max(begin, low))


def _rounds_in(wait: float, each: float, slope: float) -> int:
    """The first number of rounds that take at least `wait`."""
    if slope <= 0:
        return math.ceil(wait / each)
    half = slope / 2
    linear = each - half
    return math.ceil((-linear + math.sqrt(linear * linear + 4 * half * wait)) / (2 * half))


def _ladder(most: int) -> list[float]:
    """0, 1, 2, 3, 4, 6, 8, 12, ... up to at least `most`."""
    steps = [0.0, 1.0, 2.0]
    while steps[-1] < max(most, 2):
        steps.append(steps[-1] * 1.5 if math.log2(steps[-1]).is_integer() else steps[-1] * 4 / 3)
    return steps


def _between(values: list[float], value: float) -> tuple[int, float]:
    """Index of the interval that holds a value, and how far into it."""
    at = min(max(bisect.bisect_right(values, value) - 1, 0), len(values) - 2)
    return at, (value - values[at]) / (values[at + 1] - values[at])


def _percentiles(values: Floats) -> Percentiles:
    found = np.percentile(values, [50, 90, 99])
    return Percentiles(*map(float, found))
