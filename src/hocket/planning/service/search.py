"""The search: fewest GPUs of one kind that meet a service's goals.

every (tp, pp, ep, cp, token budget) that fits -> its rate in a steady state -> least replicas
-> the most promising are simulated against the traffic, with more replicas until the goals are met

In a steady state of b sequences a round of T(b) seconds gives b tokens and reads b x prompt /
output prompt tokens: b / (output x T(b)) requests a second. T(b) is then about the TPOT.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from hocket.planning.service.forecast import (
    ServiceForecast,
    deployment_forecast,
    misses,
    nodes,
    prefill_alone,
)
from hocket.planning.service.problem import CHUNKS, ServiceProblem, usual_chunk
from hocket.planning.service.trace import RequestTrace
from hocket.simulation.traffic import (
    Latencies,
    LatencyLimits,
    RequestTimes,
    RoundTable,
    latencies_of,
    play_requests,
    poisson,
    simulate_requests,
)
from hocket.spec.service import Service

COUNTED = 400
"""Requests whose latencies are counted."""

MOST_LOADED = 0.95
"""Share of the rate at which a replica saturates that it is loaded with at most."""

MOST_TRIES = 12
"""Numbers of replicas that are simulated for one replica's layout."""

PROMISING = 10
"""Replicas' layouts that are simulated, at least."""

PAYS = 1.01
"""Requests per second with copies of experts, relative to those without, that they are worth."""

Pins = Mapping[str, int]


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A replica that fits.

    Attributes:
        most: requests per second at which it saturates. good: those at which the mean time per
            token is still within the goal.
        floor_ttft, floor_tpot: seconds of a request alone: no number of replicas is faster.
        ep: data ranks of the replica, over which its experts are divided.
        cp: context ranks of the replica.
        redundant: copies of experts in each layer.
    """

    tp: int
    pp: int
    chunk: int
    most: float
    good: float
    floor_ttft: float
    floor_tpot: float
    ep: int = 1
    cp: int = 1
    redundant: int = 0

    @property
    def size(self) -> int:
        """GPUs of the replica."""
        return self.tp * self.pp * self.ep * self.cp


def candidate_replicas(problem: ServiceProblem, pins: Pins | None = None) -> list[Candidate]:
    """Every replica that fits and holds a request, whatever its latency, at one token budget."""
    pins = pins or {}
    found = []
    for group in problem.groups():
        if pins.get("ep", group.ep) != group.ep or pins.get("cp", group.cp) != group.cp:
            continue
        for tp, pp in group.splits():
            chunk = pins.get("max_num_batched_tokens", usual_chunk(pp))
            pinned = pins.get("tp", tp) == tp and pins.get("pp", pp) == pp
            if pinned and group.sequences(tp, pp, chunk) >= 1:
                found.append(with_copies(group, tp, pp, chunk))
    return found


def with_copies(problem: ServiceProblem, tp: int, pp: int, chunk: int) -> Candidate:
    """A replica with as many copies of experts as pay: their memory is taken from the cache."""
    best = candidate(problem, tp, pp, chunk)
    for group in problem.with_copies():
        if group.sequences(tp, pp, chunk) >= 1:
            other = candidate(group, tp, pp, chunk)
            if other.good > PAYS * best.good:
                best = other
    return best


def candidate(problem: ServiceProblem, tp: int, pp: int, chunk: int) -> Candidate:
    """A replica's rates in a steady state."""
    goal = problem.service.tpot_ms
    rounds, floor_ttft, floor_tpot = problem.remembered(
        ("steady", tp, pp, chunk), lambda: _steady(problem, tp, pp, chunk)
    )
    kept = [rate for seconds, rate in rounds if goal is None or seconds * 1e3 <= goal]
    return Candidate(
        tp=tp,
        pp=pp,
        chunk=chunk,
        most=max((rate for _, rate in rounds), default=0.0),
        good=max(kept, default=0.0),
        floor_ttft=floor_ttft,
        floor_tpot=floor_tpot,
        ep=problem.ep,
        cp=problem.cp,
        redundant=problem.redundant,
    )


def _steady(
    problem: ServiceProblem, tp: int, pp: int, chunk: int
) -> tuple[list[tuple[float, float]], float, float]:
    """(seconds of a round, requests per second) of every batch, and a request alone."""
    service = problem.service
    table = problem.table(tp, pp, chunk)
    slots = problem.sequences(tp, pp, chunk)
    budget = chunk * problem.ep * table.stages
    share = service.prefilled / service.output_len
    found = []
    for b in sorted({min(int(b), slots) for b in table.batches if b >= 1}):
        tokens = min(b * share, budget - b)
        if tokens <= 0:
            break
        share_read = tokens / (budget - b)
        # Prompt tokens spread over all rounds, or filling some: the traffic is not worse than both.
        spread = _round(table, service, tokens, b)
        bunched = share_read * _round(table, service, budget - b, b)
        bunched += (1 - share_read) * _round(table, service, 0, b)
        seconds = min(spread, bunched)
        rate = min(b / service.output_len, tokens / service.prefilled) / seconds
        found.append((seconds, rate))
    return found, prefill_alone(problem, tp, pp, chunk), _round(table, service, 0, 1)


def _round(table: RoundTable, service: Service, tokens: float, batch: int) -> float:
    """Seconds of a round at the mean contexts of a steady state."""
    low, slope, each = table.terms(tokens, batch)
    return low + slope * (service.context - 1) + each * (service.cached + service.prefilled / 2)


def quick_enough(problem: ServiceProblem, one: Candidate) -> bool:
    """Whether a token alone comes within the goal, and with some load too."""
    goal = problem.service.tpot_ms
    return one.good > 0 and (goal is None or one.floor_tpot * 1e3 <= goal)


def too_slow(problem: ServiceProblem, one: Candidate) -> bool:
    """Whether even a request alone misses a goal."""
    service = problem.service
    return (service.ttft_ms is not None and one.floor_ttft * 1e3 > service.ttft_ms) or (
        service.tpot_ms is not None and one.floor_tpot * 1e3 > service.tpot_ms
    )


def least_replicas(problem: ServiceProblem, one: Candidate) -> int:
    """Replicas below which the goals cannot be met."""
    rate = min(one.good, MOST_LOADED * one.most)
    if rate <= 0:
        return most_replicas(problem, one) + 1
    if problem.trace is not None:  # its bursts and its end are not a steady state
        rate *= 2
    return max(1, math.ceil(problem.service.requests_per_second / rate - 1e-9))


def most_replicas(problem: ServiceProblem, one: Candidate) -> int:
    """Replicas that there is room for; a million where GPUs are not bounded."""
    if not problem.bounded:
        return 10**6
    low, high = 0, problem.cluster.num_gpus
    while low < high:
        middle = (low + high + 1) // 2
        if nodes(problem, one.size, middle) <= problem.cluster.num_nodes:
            low = middle
        else:
            high = middle - 1
    return low


def simulated_latencies(
    problem: ServiceProblem,
    one: Candidate,
    replicas: int,
    *,
    counted: int = COUNTED,
    hasty: bool = False,
) -> Latencies | None:
    """Latencies of a deployment; None: it is saturated.

    Args:
        hasty: None as well as soon as it is certain that a goal is missed.
    """
    problem = problem.grouped(one.ep, one.cp, one.redundant)
    service = problem.service
    if problem.requests is not None:
        return _played_trace(problem, problem.requests, one, replicas, hasty=hasty)
    rate = service.requests_per_second / replicas
    if rate >= MOST_LOADED * one.most:
        return None
    table = problem.table(one.tp, one.pp, one.chunk)
    begin = problem.begin_seconds(one.tp, one.pp, one.chunk)
    # Before the first counted request the batch has filled up; after the last it stays full.
    residence = one.floor_ttft + service.output_len * one.floor_tpot
    full = min(2000, math.ceil(2 * rate * residence)) + 10
    arrivals = poisson(service.requests_per_second, counted + 2 * full, seed=0, every=replicas)
    found = simulate_requests(
        table,
        arrivals,
        prompt=service.prompt_len,
        output=service.output_len,
        cached=service.cached,
        capacity=problem.cached_tokens(one.tp, one.pp, one.chunk),
        most=problem.sequences(one.tp, one.pp, one.chunk),
        warm_up=full,
        tail=full,
        limits=_limits(service, counted, begin) if hasty else None,
    )
    return None if found is None else found.later(begin)


def _played_trace(
    problem: ServiceProblem, trace: RequestTrace, one: Candidate, replicas: int, *, hasty: bool
) -> Latencies | None:
    """Latencies of all requests of a trace, dealt to the replicas in turn; of one that comes faster
    than it can be answered too, since it ends."""
    service = problem.service
    begin = problem.begin_seconds(one.tp, one.pp, one.chunk)
    prices = problem.prices(one.tp, one.pp, one.chunk)
    parts: list[RequestTimes] = []
    for replica in range(min(replicas, len(trace))):
        prompts = trace.prompts[replica::replicas]
        times = play_requests(
            problem.table(one.tp, one.pp, one.chunk),
            list(trace.arrivals[replica::replicas]),
            prompt=prompts,
            output=trace.outputs[replica::replicas],
            cached=[service.cached_of(tokens) for tokens in prompts],
            capacity=problem.cached_tokens(one.tp, one.pp, one.chunk),
            most=one.chunk * problem.ep * prices.stages,
            limits=_limits(service, len(trace), begin) if hasty else None,
        )
        if times is None:
            return None
        parts.append(times)
    return latencies_of(parts).later(begin)


def _limits(service: Service, counted: int, begin: float) -> LatencyLimits:
    """With more exceptions than these one of the goals is missed, whichever they miss."""
    share = 1 - service.percentile / 100
    goals = [goal for goal in (service.ttft_ms, service.tpot_ms) if goal is not None]
    return LatencyLimits(
        ttft=math.inf if service.ttft_ms is None else service.ttft_ms / 1e3 - begin,
        tpot=math.inf if service.tpot_ms is None else service.tpot_ms / 1e3,
        exceptions=max(len(goals), 1) * (math.ceil(share * counted) + 1),
    )


@dataclasses.dataclass(frozen=True)
class Deployed:
    """Replicas that meet the goals, with what they were measured at."""

    candidate: Candidate
    replicas: int
    latencies: Latencies

    @property
    def gpus(self) -> int:
        return self.candidate.size * self.replicas


def deploy(
    problem: ServiceProblem,
    one: Candidate,
    *,
    most: int | None = None,
    replicas: int | None = None,
) -> Deployed | None:
    """The fewest replicas of one layout that meet the goals; None: none up to `most` GPUs.

    Args:
        replicas: this number alone.
    """
    limit = most_replicas(problem, one)
    if most is not None:
        limit = min(limit, most // one.size)
    least = least_replicas(problem, one)
    if one.good <= 0 or too_slow(problem, one):
        return None
    if replicas is not None:
        least = limit = replicas
    known: dict[int, Latencies | None] = {}

    def good(count: int) -> bool:
        if count not in known:
            known[count] = simulated_latencies(problem, one, count, hasty=True)
        found = known[count]
        return found is not None and not misses(problem, found)

    low, count = least - 1, least  # low fails
    tries = 0
    while count <= limit and not good(count):
        tries += 1
        low, count = count, max(count + 1, math.ceil(count * 1.2))
        if tries > MOST_TRIES:
            return None
        if low < limit < count:
            count = limit
    if count > limit:
        return None
    while count - low > 1:
        middle = (low + count) // 2
        if good(middle):
            count = middle
        else:
            low = middle
    found = known[count]
    assert found is not None
    return Deployed(one, count, found)


def search_deployments(
    problem: ServiceProblem,
    *,
    top: int = 10,
    pins: Pins | None = None,
    found: list[Candidate] | None = None,
) -> list[Deployed]:
    """The deployments that meet the goals, fewest GPUs first, then quickest answers.

    Args:
        top: how many, each with another (tp, pp, ep, cp).
        pins: tp, pp, ep, cp, dp (of all replicas) or max_num_batched_tokens to the only value that
            each may have.
        found: the candidates, where they are known.
    """
    pins = pins or {}
    fitting = candidate_replicas(problem, pins) if found is None else found
    asked = pins.get("dp")
    hopeful = [one for one in fitting if quick_enough(problem, one)]
    hopeful = [one for one in hopeful if asked is None or asked % one.ep == 0]
    hopeful.sort(key=lambda one: (least_replicas(problem, one) * one.size, one.floor_tpot))
    best: list[Deployed] = []
    for number, one in enumerate(hopeful):
        sizes = sorted(deployed.gpus for deployed in best)
        enough = sizes[top - 1] if len(sizes) >= top else None
        lower = least_replicas(problem, one) * one.size
        if (enough is not None and lower > enough) or (best and number >= PROMISING + 2 * top):
            break
        deployed = None
        others = () if "max_num_batched_tokens" in pins else CHUNKS
        for chunk in dict.fromkeys((one.chunk, *others)):
            group = problem.grouped(one.ep, one.cp, one.redundant)
            other = one if chunk == one.chunk else candidate(group, one.tp, one.pp, chunk)
            most = enough if deployed is None else deployed.gpus - one.size
            replicas = None if asked is None else asked // one.ep
            again = deploy(problem, other, most=most, replicas=replicas)
            deployed = again or deployed
        if deployed is not None:
            best.append(deployed)
    return sorted(best, key=lambda d: (d.gpus, d.latencies.end_to_end.p50))[:top]


def forecast_of(problem: ServiceProblem, deployed: Deployed) -> ServiceForecast:
    one = deployed.candidate
    return deployment_forecast(
        problem.grouped(one.ep, one.cp, one.redundant),
        tp=one.tp,
        pp=one.pp,
        chunk=one.chunk,
        replicas=deployed.replicas,
        most=one.most,
        latencies=deployed.latencies,
    )
