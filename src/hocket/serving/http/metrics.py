"""Metrics: what a server does, for Prometheus.

Counters and gauges are read where they are kept when somebody asks; only the histograms are
touched while requests run, once per call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from hocket.serving.front.completion import CompletionCall, RequestCounts

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 150.0)
_PER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)

GAUGES = {
    "running": "Requests that are being computed",
    "waiting": "Requests that wait to be computed",
    "waiting_tokens": "Prompt tokens that wait to be computed",
    "blocks_used": "Blocks of the key/value cache that requests hold",
    "blocks_cached": "Blocks of the key/value cache kept for prompts to come",
    "blocks_total": "Blocks of the key/value cache",
}
COUNTERS = {
    "preempted": "Requests whose cache was given up and is computed again",
    "prefix_hits": "Prompt tokens found in the prefix cache",
    "prefix_queries": "Prompt tokens looked for in the prefix cache",
    "generated_tokens": "Tokens of answers",
    "recomputed_tokens": "Tokens computed again after their cache was given up",
    "steps": "Steps of the engine",
    "finished": "Requests that have ended",
}
"""Figures of a replica, where it tells them."""


class ServerMetrics:
    """What one server does.

    Args:
        counts: tokens since the start. stats: the replicas' newest figures.
    """

    def __init__(self, counts: RequestCounts, stats: Callable[[], Mapping[str, Any]]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_Read(counts, stats))
        self.responses = Counter(
            "hocket_http_responses",
            "Responses by route and status",
            ("route", "status"),
            registry=self.registry,
        )
        self.under_way = Gauge(
            "hocket_http_requests", "Requests that are under way", registry=self.registry
        )
        self.first = Histogram(
            "hocket_time_to_first_token_seconds",
            "From a call's arrival to its first token",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.each = Histogram(
            "hocket_time_per_output_token_seconds",
            "From the first token of an answer to its last, over the tokens between",
            buckets=_PER_TOKEN,
            registry=self.registry,
        )
        self.whole = Histogram(
            "hocket_request_seconds",
            "From a call's arrival to its end",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.cancelled = Counter(
            "hocket_cancelled", "Calls whose client went away", registry=self.registry
        )

    def tell(self, completion: CompletionCall, now: float) -> None:
        """A call has ended."""
        if completion.first is None:
            return
        self.first.observe(completion.first - completion.began)
        self.whole.observe(now - completion.began)
        answers = completion.ask.answers
        between = completion.usage.completion_tokens / answers - 1
        if between > 0 and completion.last is not None:
            self.each.observe((completion.last - completion.first) / between)

    def text(self) -> bytes:
        """What Prometheus reads."""
        return generate_latest(self.registry)


class _Read(Collector):
    """Figures that others keep."""

    def __init__(self, counts: RequestCounts, stats: Callable[[], Mapping[str, Any]]) -> None:
        self.counts = counts
        self.stats = stats

    def collect(self) -> Iterator[Metric]:
        counters = {
            "prompt_tokens": ("Tokens of prompts", self.counts.prompt_tokens),
            "completion_tokens": ("Tokens of answers", self.counts.completion_tokens),
            "cached_tokens": ("Prompt tokens that were cached", self.counts.cached_tokens),
        }
        for name, (text, value) in counters.items():
            family = CounterMetricFamily(f"hocket_{name}", text)
            family.add_metric([], value)
            yield family
        each: Mapping[Any, Mapping[str, Any]] = self.stats().get("replicas") or {}
        for names, kind in ((GAUGES, GaugeMetricFamily), (COUNTERS, CounterMetricFamily)):
            for name, text in names.items():
                found = kind(f"hocket_{name}", text, labels=("replica",))
                for number, figures in each.items():
                    if isinstance(figures.get(name), int | float):
                        found.add_metric([str(number)], float(figures[name]))
                yield found
        imbalance = GaugeMetricFamily(
            "hocket_expert_imbalance",
            "Tokens of the rank of experts with most over the mean, before and after copies of "
            "experts were last placed",
            labels=("replica", "placement"),
        )
        for number, figures in each.items():
            for placement, value in (figures.get("expert_imbalance") or {}).items():
                imbalance.add_metric([str(number), placement], float(value))
        yield imbalance
        ready = GaugeMetricFamily("hocket_replicas", "Replicas that are ready")
        ready.add_metric([], len(each))
        yield ready
