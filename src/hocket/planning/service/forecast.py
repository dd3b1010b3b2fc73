"""ServiceForecast: what one deployment would give, as plain numbers with their uncertainty."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from hocket.cost import serving_constants
from hocket.planning.forecast import Range
from hocket.planning.service.problem import ServiceProblem
from hocket.simulation.traffic import Latencies
from hocket.spec.layout import Layout
from hocket.spec.serving_forecast import Percentiles

MILLION = 1e6


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServiceForecast:
    """What one deployment would give.

    Attributes:
        layout: tp, pp and ep of a replica, dp of all replicas: dp / ep of them.
        redundant_experts: copies of experts in each layer, over the ranks that hold them.
        gpu: its kind. num_gpus: in all; num_nodes: that they stand in.
        max_num_batched_tokens: tokens of one step, prompts in chunks. max_sequences: requests that
            a replica holds at once.
        batch: sequences that decode together on a replica, mean; `batch_peak`: at most.
        ttft, tpot, end_to_end: seconds, percentiles over the requests; None where saturated.
        queue: of `ttft`, the wait until the prompt is begun.
        request_tokens_per_second: tokens of an answer over its `end_to_end`: what so many percent
            of the requests reach or exceed.
        ttft_range, tpot_range: of the percentile that the goals are set for, between its 10th and
            90th percentile by the residuals of the validation; None where there are none.
        prefill_seconds: of a prompt alone. decode_seconds: of a token alone.
        requests_per_second: asked. most_requests_per_second: where it saturates.
        output_tokens_per_second: in all, and `most_...` where it saturates, with its range; both
            are one where more is asked.
        load: share of the latter.
        memory_by_kind: bytes on the peak GPU: weights, cache, overhead; `cached_tokens` is what
            the cache holds. memory: bytes that it may fill.
        dollars_per_hour, dollars_per_million_output_tokens: at the load that was asked, and
            `full_dollars_...` where it saturates; None without a price.
        price: dollars of a GPU and hour; price_source: of how many quotes, and when read.
        meets: whether every goal is met. misses: which are not, and by how much.
    """

    layout: Layout
    gpu: str
    cluster: str
    num_gpus: int
    num_nodes: int
    max_num_batched_tokens: int
    max_sequences: int
    batch: float
    batch_peak: int
    ttft: Percentiles | None
    tpot: Percentiles | None
    end_to_end: Percentiles | None
    queue: Percentiles | None
    request_tokens_per_second: Percentiles | None
    ttft_range: Range | None
    tpot_range: Range | None
    prefill_seconds: float
    decode_seconds: float
    requests_per_second: float
    most_requests_per_second: float
    output_tokens_per_second: float
    most_output_tokens_per_second: float
    most_range: Range | None
    load: float
    memory_by_kind: dict[str, int]
    memory: int
    cached_tokens: int
    dollars_per_hour: float | None
    dollars_per_million_output_tokens: float | None
    full_dollars_per_million_output_tokens: float | None
    price: float | None
    price_source: str
    meets: bool
    misses: tuple[str, ...]
    redundant_experts: int = 0

    @property
    def replicas(self) -> int:
        """Replicas; each has as many data ranks as its experts are divided over."""
        return self.layout.dp // self.layout.ep

    @property
    def rank_sequences(self) -> int:
        """Requests that one data rank of a replica holds at once: what servers' flags count."""
        return -(-self.max_sequences // self.layout.ep)

    @property
    def title(self) -> str:
        """The layout, and how many copies of experts it has in each layer."""
        copies = f" + {self.redundant_experts} copies" if self.redundant_experts else ""
        return f"{self.layout}{copies}"

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values; the layout as text."""
        return {**dataclasses.asdict(self), "layout": str(self.layout)}


def deployment_forecast(
    problem: ServiceProblem,
    *,
    tp: int,
    pp: int,
    chunk: int,
    replicas: int,
    most: float,
    latencies: Latencies | None,
) -> ServiceForecast:
    """The forecast of a deployment.

    Args:
        most: requests per second at which one replica saturates.
        latencies: as simulated; None: it is saturated.
    """
    service = problem.service
    prices = problem.prices(tp, pp, chunk)
    table = problem.table(tp, pp, chunk)
    size = tp * pp * problem.ep * problem.cp
    gpus = size * replicas
    price = problem.gpu.price
    hourly = None if price is None else price * gpus
    full = most * replicas * service.output_len
    output = min(service.output_tokens_per_second, full)  # no more than it can give
    if problem.trace is not None and latencies is not None:
        output = latencies.output_tokens_per_second

    def per_million(rate: float) -> float | None:
        return None if hourly is None else hourly / 3600 / rate * MILLION

    at = service.percentile
    room = problem.cached_tokens(tp, pp, chunk)
    return ServiceForecast(
        layout=Layout(dp=replicas * problem.ep, pp=pp, cp=problem.cp, tp=tp, ep=problem.ep),
        gpu=problem.gpu.name,
        cluster=problem.cluster.name,
        num_gpus=gpus,
        num_nodes=nodes(problem, size, replicas),
        max_num_batched_tokens=chunk,
        max_sequences=problem.sequences(tp, pp, chunk),
        batch=0.0 if latencies is None else latencies.batch,
        batch_peak=0 if latencies is None else latencies.batch_peak,
        ttft=None if latencies is None else latencies.ttft,
        tpot=None if latencies is None else latencies.tpot,
        end_to_end=None if latencies is None else latencies.end_to_end,
        queue=None if latencies is None else latencies.queue,
        request_tokens_per_second=None
        if latencies is None
        else latencies.request_tokens_per_second,
        ttft_range=None if latencies is None else value_range("ttft", latencies.ttft.at(at)),
        tpot_range=None if latencies is None else value_range("tpot", latencies.tpot.at(at)),
        prefill_seconds=prefill_alone(problem, tp, pp, chunk),
        decode_seconds=_alone(table.terms(0, 1), service.context),
        requests_per_second=service.requests_per_second,
        most_requests_per_second=most * replicas,
        output_tokens_per_second=output,
        most_output_tokens_per_second=full,
        most_range=value_range("throughput", full),
        load=service.requests_per_second / (most * replicas),
        memory_by_kind={
            "weights": round(prices.weight_bytes),
            "cache": round(room * prices.cache_bytes),
            "overhead": round(prices.overhead_bytes),
        },
        memory=round(problem.memory),
        cached_tokens=round(room),
        dollars_per_hour=hourly,
        dollars_per_million_output_tokens=per_million(output),
        full_dollars_per_million_output_tokens=per_million(full),
        price=price,
        price_source=problem.gpu.price_source,
        meets=latencies is not None and not misses(problem, latencies),
        misses=("it cannot keep up: requests wait ever longer",)
        if latencies is None
        else misses(problem, latencies),
        redundant_experts=problem.redundant,
    )


def misses(problem: ServiceProblem, latencies: Latencies) -> tuple[str, ...]:
    """The goals that are not met, as text; empty if all are."""
    service, at = problem.service, problem.service.percentile
    found = []
    for name, goal, value in (
        ("TTFT", service.ttft_ms, latencies.ttft.at(at)),
        ("TPOT", service.tpot_ms, latencies.tpot.at(at)),
    ):
        if goal is not None and value * 1e3 > goal:
            found.append(f"{name} p{at} {value * 1e3:,.0f} ms, not {goal:g}")
    return tuple(found)


def prefill_alone(problem: ServiceProblem, tp: int, pp: int, chunk: int) -> float:
    """Seconds to the first token of a prompt that meets an idle replica."""
    table = problem.table(tp, pp, chunk)
    left, seen = problem.service.prefilled, problem.service.cached
    total = problem.begin_seconds(tp, pp, chunk)
    while left:
        take = min(left, chunk * problem.ep * table.stages)
        low, _, each = table.terms(take, 0)
        total += low + each * (seen + take / 2)
        left, seen = left - take, seen + take
    return total


def nodes(problem: ServiceProblem, size: int, replicas: int) -> int:
    """Nodes that so many replicas of `size` GPUs stand in; none shares a node beyond its GPUs."""
    held = problem.cluster.node.num_gpus
    if size >= held:
        return math.ceil(size / held) * replicas
    return math.ceil(replicas / (held // size))


def value_range(what: str, value: float) -> Range | None:
    """A value with its 10th and 90th percentile, by measured over predicted in the validation.

    Args:
        what: `ttft`, `tpot` or `throughput`.
    """
    residuals = serving_constants.engine_file().get("residuals", {}).get(what)
    if residuals is None:
        return None
    low, high = residuals
    return Range(value * low, value, value * high)


def _alone(terms: tuple[float, float, float], context: float) -> float:
    low, slope, _ = terms
    return low + slope * (context - 1)
