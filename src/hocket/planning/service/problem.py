"""ServiceProblem: one model, one kind of node, one load; its replicas are estimated through `cost`.

A replica is tp x pp GPUs that hold the model once; a deployment is dp of them. A kind of node
stands for as many nodes as are needed, unless the question says how many there are.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from hocket.catalogue.curves import curves_of
from hocket.cost import serving_constants
from hocket.cost.serving import CACHE_BYTES, WEIGHT_BYTES, ServingPrices, serving_prices
from hocket.planning.layouts import tensor_degrees
from hocket.planning.problem import EXPERT_IMBALANCE, check_imbalance, check_size
from hocket.planning.service.trace import RequestTrace
from hocket.simulation.traffic import RoundTable
from hocket.spec.cluster import Cluster, Gpu
from hocket.spec.errors import OptionError, unknown
from hocket.spec.expert_copies import copied_imbalance
from hocket.spec.layout import divisors
from hocket.spec.model_shape import ModelShape
from hocket.spec.service import Service

Kind = TypeVar("Kind")

CHUNKS = (2048, 512, 8192)
"""Budgets of tokens of one step that are tried, see `usual_chunk`."""

LONG_PROMPT = 8192
"""Tokens of a prompt that are not cached, from which on context ranks are tried."""

CONTEXT = (2, 4, 8, 16)
"""Context ranks that are tried: they divide the 16 tokens of a block of hocket's cache."""

COPIES = (1, 2)
"""Copies of experts on each rank that are tried."""

LARGEST = 4
"""A replica has at most so many times the GPUs that its weights need."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServiceProblem:
    """What is asked of one kind of GPU.

    Attributes:
        shape: the model.
        cluster: what the GPUs stand in; its number of nodes counts only where `bounded`.
        service: the load and its goals.
        bounded: whether there are no more GPUs than the cluster has.
        precision: of weights and products. expert_precision: of the experts' weights; None: the
            same. cache_precision: of keys and values; None: 8 bits with 8-bit weights, else 16.
        engine: whose constants price it; None: the default.
        usable: share of a GPU's memory that the engine may fill.
        trace: requests as they came, instead of equal ones that arrive at random; `service` has
            their means.
        expert_imbalance: tokens of the expert rank that gets most, over the mean.
        ep: data ranks of one replica: attention divides its sequences among them, and each holds a
            share of the experts (DeepSeek-AI 2024, section 3.4). 1: replicas of tp and pp alone.
        cp: context ranks of one replica, which share each prompt and the cache.
        redundant: copies of experts in each layer, over the ranks that hold them.
        max_num_seqs: requests that a data rank runs at once; None: as many as fit.
    """

    shape: ModelShape
    cluster: Cluster
    service: Service
    bounded: bool = False
    precision: str = "bf16"
    expert_precision: str | None = None
    cache_precision: str | None = None
    engine: str | None = None
    usable: float = 0.9
    ep: int = 1
    cp: int = 1
    redundant: int = 0
    max_num_seqs: int | None = None
    trace: RequestTrace | None = None
    expert_imbalance: float = EXPERT_IMBALANCE

    def __post_init__(self) -> None:
        check_size(self.cluster)
        check_imbalance(self.expert_imbalance)
        if not (math.isfinite(self.usable) and 0 < self.usable <= 1):
            raise OptionError(
                f"usable is {self.usable:g}; it is a fraction of a GPU's memory, at most 1",
                hint="--gpu-memory-utilization 0.9",
            )
        if self.precision not in WEIGHT_BYTES:
            message, hint = unknown("precision", self.precision, WEIGHT_BYTES)
            raise OptionError(message, hint=hint)
        rates = self.gpu.flops
        if self.precision == "bf16" and "bf16" not in rates:
            raise OptionError(
                f"{self.gpu.name} does not compute in bf16, but in {', '.join(rates)}",
                hint="--dtype fp16" if "fp16" in rates else "another --cluster",
            )
        if self.cache_precision is not None and self.cache_precision not in CACHE_BYTES:
            message, hint = unknown("cache precision", self.cache_precision, CACHE_BYTES)
            raise OptionError(message, hint=hint)
        known = serving_constants.engines()
        if self.engine is not None and self.engine not in known:
            message, hint = unknown("engine", self.engine, known)
            raise OptionError(message, hint=hint)

    @property
    def gpu(self) -> Gpu:
        return self.cluster.node.gpu

    @property
    def memory(self) -> float:
        """Bytes of a GPU that the engine may fill."""
        return self.usable * self.gpu.usable

    @functools.cached_property
    def requests(self) -> RequestTrace | None:
        return None if self.trace is None else self.trace.under(self.service)

    @property
    def longest(self) -> int:
        return self.service.tokens if self.requests is None else self.requests.longest

    @property
    def cached_in(self) -> str:
        """The precision of keys and values."""
        return self.cache_precision or ("fp8" if self.precision in ("fp8", "fp4") else "bf16")

    @property
    def engine_name(self) -> str:
        """The engine whose constants price it."""
        return self.engine or serving_constants.default_engine()

    @property
    def num_gpus(self) -> int | None:
        """GPUs that there are; None: as many as are needed."""
        return self.cluster.num_gpus if self.bounded else None

    # --- replicas ----------------------------------------------------------------------------

    def splits(self) -> Iterator[tuple[int, int]]:
        """Every (tp, pp) that a replica can have, fewest GPUs first.

        tp divides the model (see `layouts.tensor_degrees`); it divides a node or is whole nodes,
        and stays inside the links that GPUs share (the NVLink domain), or is whole domains. Of all
        pp that leave the largest stage as many layers, the least.
        """
        return iter(self.remembered(("splits", self.bounded), self._splits))

    def _splits(self) -> list[tuple[int, int]]:
        held = self.cluster.node.num_gpus
        least = self.weights / self.memory
        domain = max(self.cluster.node.link.domain, held)
        most = self.num_gpus or max(2 * held, domain, math.ceil(LARGEST * least))
        layers = len(self.shape.layers)
        stages = sorted({math.ceil(layers / m) for m in range(1, layers + 1)})
        found = [
            (tp, pp)
            for tp in tensor_degrees(self.shape)
            if held % tp == 0 or (tp % held == 0 and (tp <= domain or tp % domain == 0))
            for pp in stages
            if least <= tp * pp * self.ep and tp * pp * self.ep * self.cp <= most
            if self.ep * self.cp == 1 or tp * self.ep * self.cp <= domain
        ]
        return sorted(found, key=lambda split: (split[0] * split[1], split[1]))

    def groups(self) -> list[ServiceProblem]:
        """The problem with each number of data ranks that a replica's experts can be divided over,
        and of context ranks where prompts are long, inside the links that GPUs share: collectives
        follow every layer."""
        most = max(self.cluster.node.link.domain, self.cluster.node.num_gpus)
        room = min(most, self.num_gpus or most)
        degrees = [n for n in divisors(self.shape.experts or 1) if 1 < n <= room]
        long = self.service.prefilled >= LONG_PROMPT and self.shape.attends
        context = [n for n in CONTEXT if n <= room] if long else []
        return [
            self,
            *(self.grouped(n) for n in degrees),
            *(self.grouped(1, n) for n in context),
        ]

    def with_copies(self) -> Iterator[ServiceProblem]:
        """The problem with one and two more experts on each rank that has a part of them."""
        for more in COPIES if self.ep > 1 and self.expert_imbalance > 1 else ():
            if more <= self.shape.experts * (self.ep - 1) // self.ep:
                yield self.grouped(self.ep, self.cp, more * self.ep)

    def grouped(self, ep: int, cp: int = 1, redundant: int = 0) -> ServiceProblem:
        """The problem of replicas with so many data ranks and context ranks, and copies of experts;
        each is kept."""
        if (ep, cp, redundant) == (self.ep, self.cp, self.redundant):
            return self
        group = self.remembered(
            ("grouped", ep, cp, redundant),
            lambda: dataclasses.replace(self, ep=ep, cp=cp, redundant=redundant),
        )
        if (group.service, group.bounded) == (self.service, self.bounded):
            return group
        return group.under(self.service, bounded=self.bounded)

    @functools.cached_property
    def weights(self) -> float:
        """Bytes of the model's weights, held once."""
        return float(self.grouped(1).prices(1, 1).weight_bytes)

    @functools.cached_property
    def cache_per_token(self) -> float:
        """Bytes of a token's keys and values over all layers, held once; mean of a request."""
        return float(self.prices(1, 1).cache_bytes)

    @functools.cached_property
    def _known(self) -> dict[tuple[float, ...], ServingPrices]:
        return {}

    @functools.cached_property
    def _memory(self) -> dict[tuple[Any, ...], Any]:
        return {}

    def remembered(self, key: tuple[Any, ...], compute: Callable[[], Kind]) -> Kind:
        """What does not depend on the load, once for all loads of requests of the same length."""
        if key not in self._memory:
            self._memory[key] = compute()
        found: Kind = self._memory[key]
        return found

    @functools.cached_property
    def _curves(self) -> tuple[object, ...]:
        return curves_of(self.cluster.node)

    def prices(self, tp: int, pp: int, chunk: int = CHUNKS[0]) -> ServingPrices:
        """Prices of a replica, on nodes that it fills or shares."""
        key = tp, pp, chunk, self.service.tokens
        if key not in self._known:
            node = self.cluster.node
            nodes = max(1, math.ceil(tp * pp * self.ep * self.cp / node.num_gpus))
            rates = node.gpu.flops
            if "bf16" not in rates:  # prices are those of 16 bits, whichever they are
                gpu = dataclasses.replace(node.gpu, flops={**rates, "bf16": rates["fp16"]})
                node = dataclasses.replace(node, gpu=gpu)
            self._known[key] = serving_prices(
                self.shape.with_copies(self.redundant),
                dataclasses.replace(self.cluster, num_nodes=nodes, node=node),
                tp=tp,
                pp=pp,
                ep=self.ep,
                attention_dp=self.ep,
                cp=self.cp,
                precision=self.precision,
                expert_precision=self.expert_precision,
                cache_precision=self.cached_in,
                engine=self.engine,
                max_num_batched_tokens=chunk,
                expert_imbalance=copied_imbalance(
                    self.shape.experts,
                    self.ep,
                    self.redundant,
                    min(self.expert_imbalance, float(self.ep)),
                ),
                curves=self._curves,  # type: ignore[arg-type]
                request_tokens=self.service.tokens,
            )
        return self._known[key]

    def cached_tokens(self, tp: int, pp: int, chunk: int = CHUNKS[0]) -> float:
        """Tokens that a replica caches next to its weights; at most 0: it does not fit."""
        return float(self.prices(tp, pp, chunk).capacity(self.usable))

    def sequences(self, tp: int, pp: int, chunk: int = CHUNKS[0]) -> int:
        """Whole requests that a replica holds at once; 0: not one. A step decodes as many at most
        as it has tokens."""

        def count() -> int:
            prices = self.prices(tp, pp, chunk)
            room = self.cached_tokens(tp, pp, chunk)
            fit = room // self.service.tokens if room >= self.longest else 0
            rank = min(chunk * prices.stages, self.max_num_seqs or math.inf)
            return int(max(0, min(fit, rank * self.ep)))

        return self.remembered(("sequences", tp, pp, chunk), count)

    def table(self, tp: int, pp: int, chunk: int) -> RoundTable:
        """Seconds of rounds of a replica that fits."""
        return self.remembered(
            ("table", tp, pp, chunk),
            lambda: RoundTable(
                self.prices(tp, pp, chunk),
                chunk=chunk * self.ep,
                longest=self.longest,
                most=self.sequences(tp, pp, chunk),
            ),
        )

    def begin_seconds(self, tp: int, pp: int, chunk: int) -> float:
        """Seconds of a request before its prompt is run: the engine's constant."""
        return float(self.prices(tp, pp, chunk).replica.constants.prefill_time)

    def under(self, service: Service, *, bounded: bool | None = None) -> ServiceProblem:
        """The problem under another load; with requests of the same length, prices are kept."""
        kept = self.bounded if bounded is None else bounded
        other = dataclasses.replace(self, service=service, bounded=kept)
        other.__dict__["_known"] = self._known
        names = ("prompt_len", "output_len", "prefix_cache_hit_rate")
        if all(getattr(self.service, name) == getattr(service, name) for name in names):
            other.__dict__["_memory"] = self._memory
        return other

    def unbounded(self) -> ServiceProblem:
        """The problem with as many GPUs as are needed."""
        return self.under(self.service, bounded=False)


def usual_chunk(pp: int) -> int:
    """The budget that is tried first: small with stages, since a batch with a long chunk keeps the
    others waiting (Agrawal et al. 2024, section 3.3)."""
    return CHUNKS[0] if pp == 1 else CHUNKS[1]
