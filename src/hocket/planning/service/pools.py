"""Pools: prefill and decode on GPUs of their own (Zhong et al. 2024, DistServe; Patel et al. 2024,
Splitwise).

    prefill pool   a service whose answers end with their first token
    transfer       keys and values of the prompt, from a replica of one pool to one of the other
    decode pool    a service whose prompts are in the cache, but for the last token

No prompt delays a decode step, and each pool has the layout that suits it. The goals part as the
latencies do: the time per output token is the decode pool's alone; of the time to first token the
prefill pool has what the transfer and the wait for a place in the decode pool leave.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from hocket.planning.service.forecast import ServiceForecast, nodes
from hocket.planning.service.problem import ServiceProblem
from hocket.planning.service.search import Deployed, forecast_of, search_deployments
from hocket.spec.units import format_seconds

SOFTWARE = ("vLLM", "SGLang")
"""What serves from two pools; hocket's own server does not."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PooledForecast:
    """What two pools would give.

    Attributes:
        prefill, decode: each pool, as a service of its own.
        transfer_seconds: of a prompt's keys and values.
        ttft: seconds, at the percentile of the goals: of the prefill pool, the transfer, and the
            decode pool until its first token; an upper bound, since percentiles are added.
        tpot: of the decode pool.
    """

    prefill: ServiceForecast
    decode: ServiceForecast
    transfer_seconds: float
    ttft: float
    tpot: float

    @property
    def num_gpus(self) -> int:
        return self.prefill.num_gpus + self.decode.num_gpus

    @property
    def dollars_per_hour(self) -> float | None:
        """Of both; None without a price."""
        parts = (self.prefill.dollars_per_hour, self.decode.dollars_per_hour)
        return None if None in parts else sum(part for part in parts if part is not None)

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {
            "prefill": self.prefill.to_json(),
            "decode": self.decode.to_json(),
            "transfer_seconds": self.transfer_seconds,
            "ttft": self.ttft,
            "tpot": self.tpot,
            "num_gpus": self.num_gpus,
            "dollars_per_hour": self.dollars_per_hour,
        }


def pooled(problem: ServiceProblem) -> PooledForecast | None:
    """The fewest GPUs that meet the goals in two pools; None: no such pools are there, or requests
    are those of a trace, which is simulated on one pool alone."""
    if problem.trace is not None:
        return None
    service, at = problem.service, problem.service.percentile
    later = dataclasses.replace(service, ttft_ms=None, prefix_cache_hit_rate=1.0)
    decode = _fewest(problem.under(later))
    if decode is None:
        return None
    waits = decode.latencies.ttft.at(at)
    size = decode.candidate.size
    while True:  # a smaller replica sends for longer, and leaves less of the goal
        moved = transfer_seconds(problem, size, decode.candidate.size)
        goal = None if service.ttft_ms is None else service.ttft_ms - 1e3 * (waits + moved)
        if goal is not None and goal <= 0:
            return None
        first = dataclasses.replace(service, output_len=1, ttft_ms=goal, tpot_ms=None)
        prefill = _fewest(problem.under(first))
        if prefill is None or not _there(problem, prefill, decode):
            return None
        if prefill.candidate.size >= size:
            break
        size = prefill.candidate.size
    moved = transfer_seconds(problem, prefill.candidate.size, decode.candidate.size)
    return PooledForecast(
        prefill=forecast_of(problem.under(first), prefill),
        decode=forecast_of(problem.under(later), decode),
        transfer_seconds=moved,
        ttft=prefill.latencies.ttft.at(at) + moved + waits,
        tpot=decode.latencies.tpot.at(at),
    )


def transfer_seconds(problem: ServiceProblem, prefill: int, decode: int) -> float:
    """Seconds to bring a prompt's keys and values from a replica of one pool to one of the other:
    over the network cards of the fewer GPUs, at most those of a node; inside one node, over its
    links. None of it is hidden behind the prompt's layers.

    Args:
        prefill, decode: GPUs of a replica of each pool.
    """
    node = problem.cluster.node
    ranks = min(prefill, decode)
    inside = prefill + decode <= node.num_gpus and problem.num_gpus is not None
    inside = inside and problem.cluster.num_nodes == 1
    each = (node.link.bandwidth or node.pcie) if inside else node.network / node.num_gpus
    rate = each * (ranks if inside else min(ranks, node.num_gpus))
    held = problem.cache_per_token * problem.service.prompt_len
    return held / rate if rate else float("inf")


def pools_sentence(found: PooledForecast, at: int) -> str:
    """Two pools that take fewer GPUs than one. `at`: the percentile of the goals."""
    first, then, hourly = found.prefill, found.decode, found.dollars_per_hour
    return (
        f"Fewer GPUs with prefill and decode in pools of their own: {found.num_gpus}, "
        f"{first.num_gpus} for prefill as {first.layout} and {then.num_gpus} for decode as "
        f"{then.layout}. TTFT p{at} {format_seconds(found.ttft)}, of which "
        f"{format_seconds(found.transfer_seconds)} bring the keys and values over; TPOT p{at} "
        f"{format_seconds(found.tpot)}"
        + ("" if hourly is None else f"; ${hourly:,.2f}/h")
        + f". {' and '.join(SOFTWARE)} serve so, hocket's server does not."
    )


def _fewest(problem: ServiceProblem) -> Deployed | None:
    found = search_deployments(problem, top=1)
    return found[0] if found else None


def _there(problem: ServiceProblem, *pools: Deployed) -> bool:
    """Whether the nodes that there are hold both pools."""
    if not problem.bounded:
        return True
    cluster = problem.cluster
    if cluster.num_nodes == 1:
        return sum(pool.gpus for pool in pools) <= cluster.num_gpus
    held = sum(nodes(problem, pool.candidate.size, pool.replicas) for pool in pools)
    return held <= cluster.num_nodes
