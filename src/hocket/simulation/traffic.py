"""Traffic: requests x prices to latency, by simulating one replica's continuous batching.

A server works in rounds. In a round every sequence that decodes gets one token, and what is left
of the token budget goes to prompts, first come first served (chunked prefill: Agrawal et al. 2024,
Sarathi-Serve; continuous batching: Yu et al. 2022, Orca):

    waiting --(cache reserved for prompt and answer)--> prompt, in chunks --> decode --> done
              ^ 1                                        ^ 2, first token        ^ 3, cache freed

With p pipeline stages a round has up to p batches on their way at once: it takes as long as the
slowest stage takes for all of them, or one batch through every stage, whichever is longer.

Only what changes the batch is an event: rounds of decode alone between an arrival and the next end
are summed, their context growing by one token each. Replicas are dealt requests in turn, so each
sees every R-th arrival, and all are identical: one is simulated.

Legend: rounds are in seconds; b sequences that decode, c their mean context, n prompt tokens.
"""

from __future__ import annotations

import bisect
import dataclasses
import heapq
import math
from collections import deque
from collections.abc import Sequence
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
        answered_seconds: from the first counted arrival to the last token of a counted request.
        output_tokens_per_second: tokens of counted answers over that time, of all replicas.
        request_tokens_per_second: tokens of an answer over its `end_to_end`, which so many percent
            of the requests reach or exceed.
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
    answered_seconds: float
    output_tokens_per_second: float
    request_tokens_per_second: Percentiles

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class RequestTimes:
    """What the counted requests of one replica met with, one number a request, in seconds.

    Attributes:
        came, begun, first, done: arrival, begin of the prompt, first and last token.
        output: tokens of the answer.
        batch_seconds, cache_seconds: decoding sequences, and share of the cache, times seconds.
        batch_peak, cache_peak: at most. idle: seconds without work.
        span: seconds in which all of that was counted: from the first arrival to the last one, or,
            if no later requests keep the replica busy, to the last token.
    """

    came: Floats
    begun: Floats
    first: Floats
    done: Floats
    output: Floats
    batch_seconds: float
    batch_peak: int
    cache_seconds: float
    cache_peak: float
    idle: float
    span: float


def latencies_of(parts: Sequence[RequestTimes]) -> Latencies:
    """Latencies over the requests of one replica, or of several that worked at the same time."""
    came, begun, first, done, output = (
        np.concatenate([getattr(part, name) for part in parts])
        for name in ("came", "begun", "first", "done", "output")
    )
    spans = sum(part.span for part in parts)
    whole = done - came
    slowest = np.percentile(output / np.maximum(whole, 1e-12), [50, 10, 1])
    answered = max(float(done.max() - came.min()), 1e-12)
    return Latencies(
        ttft=_percentiles(first - came),
        tpot=_percentiles((done - first) / np.maximum(output - 1, 1)),
        end_to_end=_percentiles(whole),
        queue=_percentiles(begun - came),
        requests=len(came),
        simulated_seconds=max(part.span for part in parts),
        batch=sum(part.batch_seconds for part in parts) / spans,
        batch_peak=max(part.batch_peak for part in parts),
        cache=sum(part.cache_seconds for part in parts) / spans,
        cache_peak=max(part.cache_peak for part in parts),
        busy=1 - sum(part.idle for part in parts) / spans,
        answered_seconds=answered,
        output_tokens_per_second=float(output.sum()) / answered,
        request_tokens_per_second=Percentiles(*map(float, slowest)),
    )


def simulate_requests(
    table: RoundTable,
    arrivals: list[float],
    *,
    prompt: int | Sequence[int],
    output: int | Sequence[int],
    capacity: float,
    most: int,
    cached: int | Sequence[int] = 0,
    warm_up: int = 0,
    tail: int = 0,
    limits: LatencyLimits | None = None,
) -> Latencies | None:
    """Latencies of one replica; see `play_requests`."""
    times = play_requests(
        table, arrivals, prompt=prompt, output=output, capacity=capacity, most=most,
        cached=cached, warm_up=warm_up, tail=tail, limits=limits,
    )  # fmt: skip
    return None if times is None else latencies_of([times])


def play_requests(
    table: RoundTable,
    arrivals: list[float],
    *,
    prompt: int | Sequence[int],
    output: int | Sequence[int],
    capacity: float,
    most: int,
    cached: int | Sequence[int] = 0,
    warm_up: int = 0,
    tail: int = 0,
    limits: LatencyLimits | None = None,
) -> RequestTimes | None:
    """Play one replica.

    Args:
        arrivals: seconds, ascending.
        prompt, output: tokens of each request, or one number for all. cached: tokens of the prompt
            whose keys and values are in the cache already. With all of them another pool has
            given the first token: a request decodes `output` more as soon as it is begun, and
            `first` is that time.
        capacity: tokens that the cache holds; a request reserves prompt + output, so that none is
            put out again.
        most: sequences at once, the cache apart.
        warm_up: first requests that are not counted. tail: last ones, which keep it busy.
        limits: None is returned as soon as more of the counted requests are slower.
    """
    count = len(arrivals)
    prompts, outputs, known = (
        [values] * count if isinstance(values, int) else list(values)
        for values in (prompt, output, cached)
    )
    needs = [a + b for a, b in zip(prompts, outputs, strict=True)]
    assert most >= 1, "a request must fit"
    assert max(needs) <= capacity, "every request must fit"
    last = count - tail
    assert warm_up < last
    begun, first, done = [0.0] * count, [0.0] * count, [0.0] * count
    reading: deque[list[int]] = deque()  # [request, prompt tokens left]
    ends: list[tuple[int, int]] = []  # (round in which the last token comes, request)
    budget = table.chunk * table.stages
    now, turn, arrived, admitted, finished = arrivals[0], 0, 0, 0, 0
    decoding, contexts = 0, 0.0
    peak = most_held = held = 0
    area_batch = area_held = idle = 0.0
    start, stop = arrivals[warm_up], arrivals[last - 1] if tail else math.inf
    slow = 0
    latest, slowest, exceptions = math.inf, math.inf, count
    if limits is not None:
        latest, slowest, exceptions = limits.ttft, limits.tpot, limits.exceptions

    while finished < count:
        while arrived < count and arrivals[arrived] <= now:
            arrived += 1
        while (  # 1
            admitted < arrived and admitted - finished < most and held + needs[admitted] <= capacity
        ):
            begun[admitted] = now
            held += needs[admitted]
            left = prompts[admitted] - known[admitted]
            if left:
                reading.append([admitted, left])
            else:
                heapq.heappush(ends, (turn + outputs[admitted], admitted))
                first[admitted] = now
                decoding += 1
                contexts += prompts[admitted]
            admitted += 1
        if admitted == finished:
            idle += _overlap(now, arrivals[arrived], start, stop)
            now = arrivals[arrived]
            continue
        before, reserved = now, held
        if reading:
            room = max(budget - decoding, 1)
            tokens, read = 0, 0.0
            complete: list[int] = []
            while reading and tokens < room:
                head = reading[0]
                take = min(head[1], room - tokens)
                seen = prompts[head[0]] - head[1]
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
                if outputs[request] == 1:
                    done[request] = now
                    finished += 1
                    held -= needs[request]
                else:
                    heapq.heappush(ends, (turn + outputs[request] - 1, request))
                    decoding += 1
                    contexts += prompts[request] + 1
        else:
            rounds = ends[0][0] - turn
            low, slope, _ = table.terms(0, decoding)
            each_round = low + slope * (contexts / decoding - 1)
            # The context grows by one a round: k rounds take k x + s k (k - 1) / 2.
            wait = arrivals[arrived] - now if arrived < count else math.inf
            free = admitted == arrived < count and admitted - finished < most
            free = free and held + needs[admitted] <= capacity
            if free and wait < rounds * (each_round + slope * rounds / 2):
                guess = _rounds_in(wait, each_round, slope)
                rounds = max(1, min(rounds, guess))
            now += rounds * each_round + slope * rounds * (rounds - 1) / 2
            turn += rounds
            contexts += rounds * decoding
            batch = decoding
        if now > start and before < stop:
            passed = _overlap(before, now, start, stop)
            peak = max(peak, batch)
            most_held = max(most_held, reserved)
            area_batch += batch * passed
            area_held += reserved * passed
        while ends and ends[0][0] <= turn:  # 3
            _, request = heapq.heappop(ends)
            done[request] = now
            finished += 1
            decoding -= 1
            contexts -= needs[request]
            held -= needs[request]
            each_token = (now - first[request]) / max(outputs[request] - 1, 1)
            late = first[request] - arrivals[request] > latest or each_token > slowest
            if late and warm_up <= request < last:
                slow += 1
                if slow > exceptions:
                    return None
    kept = slice(warm_up, last)
    return RequestTimes(
        came=np.array(arrivals[kept]),
        begun=np.array(begun[kept]),
        first=np.array(first[kept]),
        done=np.array(done[kept]),
        output=np.array(outputs[kept], dtype=np.float64),
        batch_seconds=area_batch,
        batch_peak=peak,
        cache_seconds=area_held / capacity,
        cache_peak=most_held / capacity,
        idle=idle,
        span=max((stop if tail else max(done)) - start, 1e-12),
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
