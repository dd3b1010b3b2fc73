"""The forecast of a server on this machine, and the choice of its layout.

    Servers    CPU cores that were measured (`measured_servers`) or GPUs (`gpu_servers`)
    replica    of a layout: seconds of its steps, bytes of its ranks
        -> decode steps and prompts alone -> the rate at which it saturates
        -> latencies under load, simulated -> replicas for a load

In a steady state of b requests a round of T(b) seconds gives b tokens and reads the prompts of
b / output new requests: b / (output x T(b)) requests a second. T(b) is the time per token.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from hocket.simulation.traffic import EngineStepCosts, RoundTable, poisson, simulate_requests
from hocket.spec.errors import OptionError
from hocket.spec.layout import Layout
from hocket.spec.service import Service
from hocket.spec.serving import num_replicas
from hocket.spec.serving_forecast import (
    ConsideredServer,
    Decode,
    Need,
    Prefill,
    ServiceLoad,
    ServingForecast,
)
from hocket.spec.units import format_bytes

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
SHARES = (0.1, 0.25, 0.5, 0.7, 0.85, 0.95)
"""Of the rate at which a replica saturates: the loads that are simulated."""

NEEDS = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Times that rate: the loads for which replicas are counted."""

COUNTED = 300
"""Requests whose latencies are counted in a play."""

TRIES = 7
"""Halvings in the search for the rate at which goals are still met."""

MAX_UTILIZATION = 0.95
"""Of the rate at which it saturates, what a replica is loaded with at most."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineSizes:
    """What a replica's engine is given.

    Attributes:
        batch_tokens: of a step. rows: requests at once. longest: tokens of a request.
        block_size: of the cache. cache: bytes of it on each rank; 0: what is free.
        tokens: that the cache is to hold; 0: as many as `cache` bytes do.
        dtype: of weights and cache. kv_cache_dtype: of the cache where it is another, fp8.
    """

    batch_tokens: int
    rows: int
    longest: int
    block_size: int = 16
    cache: int = 0
    tokens: int = 0
    dtype: str = "fp32"
    kv_cache_dtype: str = "auto"


def usual(longest: int) -> Service:
    """The requests that a forecast is made of where nobody has said others."""
    return Service(
        prompt_len=max(1, min(512, longest // 2)), output_len=max(1, min(128, longest // 4))
    )


def rank_memory(
    stages: Sequence[Mapping[str, int]], sizes: EngineSizes, available: int, layout: Layout
) -> tuple[list[dict[str, int]], int]:
    """Of each rank of a replica the bytes of `weights`, `step`, `cache` and their `total`; and the
    tokens that the cache of a data rank holds (0: not even the weights fit).

    Args:
        stages: of each, bytes of `weights`, of the largest `step` and of one cached `token`.
        available: bytes that a rank may hold; 0 if unknown. layout: of the replica.
    """
    most = 2 * sizes.rows * sizes.longest  # what is beyond only remembers prompts
    tokens = []
    for one in stages:
        each = max(1, one["token"])
        free = max(0, available - one["weights"] - one["step"]) // each
        found = min(most, free) if available else most
        tokens.append(sizes.tokens or (sizes.cache // each if sizes.cache else found))
    fit = min(tokens) // sizes.block_size * sizes.block_size
    rows = []
    for one in stages:
        row = {"weights": one["weights"], "step": one["step"], "cache": fit * one["token"]}
        row["total"] = sum(row.values())
        rows += [dict(row) for _ in range(layout.world_size // layout.pp)]
    return rows, fit


class ReplicaSteps(EngineStepCosts, Protocol):
    """Seconds of what one replica does."""

    def prefill_seconds(self, tokens: int, /, *, chunk: int) -> Any:
        """Of a prompt alone, in chunks of at most `chunk` tokens, to its first token."""

    def decode_seconds(self, batch: float, context: float) -> Any:
        """Of a step that gives each of `batch` requests a token."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplicaEstimate:
    """One replica of a layout.

    Attributes:
        steps: its seconds while all replicas work; `alone`: while the others are idle.
        memory: of each of its ranks the bytes of `weights`, `step`, `cache` and their `total`.
        cache_tokens: that its cache holds; 0: not even the weights fit. cache_bytes: of one token
            on the rank with most.
        capacity: bytes that a rank may hold; 0 if unknown.
        data_ranks: that run steps of `EngineSizes.batch_tokens` each.
        notes: what was assumed.
    """

    steps: ReplicaSteps
    alone: ReplicaSteps
    memory: tuple[dict[str, int], ...]
    cache_tokens: int
    cache_bytes: int
    capacity: int
    data_ranks: int = 1
    notes: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        stages: Sequence[Mapping[str, int]],
        sizes: EngineSizes,
        available: int,
        layout: Layout,
        **rest: Any,
    ) -> ReplicaEstimate:
        """With the cache that fits; arguments as of `rank_memory`, and the other fields."""
        memory, tokens = rank_memory(stages, sizes, available, layout)
        return cls(
            memory=tuple(memory),
            cache_tokens=tokens * layout.dp,
            cache_bytes=max(one["token"] for one in stages),
            capacity=available,
            data_ranks=layout.dp,
            **rest,
        )


class Servers(Protocol):
    """A model's servers on one machine."""

    @property
    def model(self) -> str: ...
    @property
    def cluster(self) -> str:
        """The machine, for people."""

    @property
    def measured(self) -> str:
        """When it was probed, and how; empty: it was not."""

    def replica(self, layout: Layout, sizes: EngineSizes) -> ReplicaEstimate:
        """One replica of a layout of all replicas.

        Raises:
            HocketError: the machine's measurements or constants do not cover it.
        """


def server_forecast(servers: Servers, layout: Layout, sizes: EngineSizes) -> ServingForecast:
    """What a server gives to usual requests; `layout`: of all replicas.

    Raises:
        HocketError: as `Servers.replica`.
    """
    service = usual(sizes.longest)
    one = servers.replica(layout, sizes)
    steps, tokens = one.steps, one.cache_tokens
    contexts = sorted({max(1, sizes.longest // 8), max(1, sizes.longest // 2)})
    decode = tuple(
        Decode(batch=b, context=c, seconds=_number(steps.decode_seconds(b, c)))
        for b in BATCHES
        if b <= sizes.rows
        for c in contexts
        if b * c <= tokens or b == 1
    )
    prompts = [n for n in (16, 64, 256, 1024, 4096, 16384) if n < sizes.longest]
    prefill = tuple(
        Prefill(tokens=n, seconds=_number(steps.prefill_seconds(n, chunk=sizes.batch_tokens)))
        for n in dict.fromkeys([*prompts, service.prompt_len])
    )
    loads, needs, most = under_load(steps, sizes, service, tokens, data_ranks=one.data_ranks)
    return ServingForecast(
        layout=str(layout),
        decode=decode,
        prefill=tuple(sorted(prefill, key=lambda one: one.tokens)),
        tokens_per_second=most * service.output_len,
        prompt_len=service.prompt_len,
        output_len=service.output_len,
        ttft_ms=service.ttft_ms,
        tpot_ms=service.tpot_ms,
        percentile=service.percentile,
        loads=loads,
        needs=needs,
        memory=one.memory,
        cache_bytes=one.cache_bytes,
        cache_tokens=tokens,
        capacity=one.capacity,
        cluster=servers.cluster,
        measured=servers.measured,
        notes=(*one.notes, "the server's own process (HTTP, text) is not included"),
    )


def _number(seconds: Any) -> float:
    """Seconds as one number: fitted prices are arrays."""
    return float(np.asarray(seconds).item())


# --- under load -----------------------------------------------------------------------------------


def under_load(
    steps: EngineStepCosts,
    sizes: EngineSizes,
    service: Service,
    tokens: int,
    *,
    data_ranks: int = 1,
) -> tuple[tuple[ServiceLoad, ...], tuple[Need, ...], float]:
    """One replica under several loads, replicas for several loads, and its rate at most.

    Args:
        steps: its seconds. tokens: that its cache holds. data_ranks: as in `ReplicaEstimate`.
    """
    slots = min(sizes.rows * data_ranks, tokens // service.tokens)
    if slots < 1:
        return (), (), 0.0
    chunk = sizes.batch_tokens * data_ranks
    table = RoundTable(steps, chunk=chunk, longest=service.tokens, most=slots)
    most = max((rate for _, rate in _steady_rounds(table, service, slots)), default=0.0)
    residence = _alone(table, service)
    if not (most > 0 and math.isfinite(most * residence)):
        return (), (), 0.0

    def play(rate: float) -> ServiceLoad:
        full = min(500, math.ceil(2 * rate * residence)) + 10
        found = simulate_requests(
            table,
            poisson(rate, COUNTED + 2 * full),
            prompt=service.prompt_len,
            output=service.output_len,
            capacity=float(tokens),
            most=slots,
            warm_up=full,
            tail=full,
        )
        assert found is not None
        return ServiceLoad(
            rate=rate,
            tokens_per_second=rate * service.output_len,
            ttft_p50=found.ttft.p50,
            ttft_p90=found.ttft.p90,
            ttft_p99=found.ttft.p99,
            tpot_p50=found.tpot.p50,
            tpot_p90=found.tpot.p90,
            tpot_p99=found.tpot.p99,
            batch=found.batch,
        )

    loads = [play(share * most) for share in SHARES]
    good = _good_rate(loads, play, service)
    needs = tuple(
        Need(
            rate=times * most,
            replicas=math.ceil(times * most / (MAX_UTILIZATION * most) - 1e-9),
            within_goals=math.ceil(times * most / good - 1e-9) if good > 0 else None,
        )
        for times in NEEDS
    )
    return tuple(loads), needs, most


def meets(load: ServiceLoad, service: Service) -> bool:
    """Whether a load's latencies are within the goals."""
    at = f"p{service.percentile}"
    ttft, tpot = getattr(load, f"ttft_{at}"), getattr(load, f"tpot_{at}")
    return (service.ttft_ms is None or 1e3 * ttft <= service.ttft_ms) and (
        service.tpot_ms is None or 1e3 * tpot <= service.tpot_ms
    )


def _good_rate(loads: Sequence[ServiceLoad], play: Any, service: Service) -> float:
    """The rate of one replica up to which goals are met; 0 if the lightest load misses one."""
    low, high = 0.0, None
    for load in loads:
        if not meets(load, service):
            high = load.rate
            break
        low = load.rate
    if high is None or low == 0.0:
        return low
    for _ in range(TRIES):
        middle = (low + high) / 2
        low, high = (middle, high) if meets(play(middle), service) else (low, middle)
    return low


def _steady_rounds(table: RoundTable, service: Service, slots: int) -> list[tuple[float, float]]:
    """(seconds of a round, requests a second) of every batch in a steady state."""
    budget = table.chunk * table.stages
    share = service.prompt_len / service.output_len
    found = []
    for b in sorted({min(int(b), slots) for b in table.batches if b >= 1}):
        tokens = min(b * share, budget - b)
        if tokens <= 0:
            break
        low, slope, each = table.terms(tokens, b)
        seconds = low + slope * (service.context - 1) + each * service.prompt_len / 2
        rate = min(b / service.output_len, tokens / service.prompt_len) / seconds
        found.append((seconds, rate))
    return found


def _alone(table: RoundTable, service: Service) -> float:
    """Seconds of a request alone."""
    low, slope, each = table.terms(min(service.prompt_len, table.chunk), 0)
    chunks = math.ceil(service.prompt_len / table.chunk)
    read = chunks * (low + each * service.prompt_len / 2)
    low, slope, _ = table.terms(0, 1)
    return read + service.output_len * (low + slope * (service.context - 1))


# --- measured steps instead of estimated ones -----------------------------------------------------


class MeasuredSteps:
    """Prices of a replica from what its steps were measured to take.

    A round of b tokens takes `fixed + each x b`, by least squares over the rounds as often as they
    were measured; reading prompts likewise. In a step of both, what is fixed is paid once. Contexts
    are those that were met with; a round is whole, whatever stages it went through.

    Raises:
        OptionError: no round was measured.
    """

    stages = 1

    def __init__(self, decode: Sequence[Decode], prefill: Sequence[Prefill]) -> None:
        if not decode:
            raise OptionError("no decode step was measured")
        self._decode = _line([(one.batch, one.seconds, one.count) for one in decode])
        # Prompts that were never read by themselves cost what as many rows of a round do.
        points = [(one.tokens, one.seconds, one.count) for one in prefill]
        self._prefill = _line(points) if points else self._decode

    def step_seconds(self, prefill_tokens: Any, _: Any, decode_batch: Any, __: Any) -> Any:
        n, b = np.broadcast_arrays(
            np.asarray(prefill_tokens, dtype=np.float64), np.asarray(decode_batch, dtype=np.float64)
        )
        fixed = np.where(b > 0, self._decode[0], np.where(n > 0, self._prefill[0], 0.0))
        return fixed + self._decode[1] * b + self._prefill[1] * n

    def stage_seconds(self, prefill_tokens: Any, _: Any, decode_batch: Any, __: Any) -> Any:
        """The same: a round was measured whole."""
        return self.step_seconds(prefill_tokens, _, decode_batch, __)


def _line(points: Sequence[tuple[float, float, int]]) -> tuple[float, float]:
    """(fixed, each) of seconds over sizes by least squares, weighted; neither is negative."""
    sizes, seconds, weights = (
        np.array(column, dtype=np.float64) for column in zip(*points, strict=True)
    )
    weights = np.maximum(weights, 1.0)
    middle, mean = (np.average(values, weights=weights) for values in (sizes, seconds))
    spread = np.average((sizes - middle) ** 2, weights=weights)
    if spread <= 0:
        return 0.0, float(mean / max(middle, 1e-12))
    each = float(np.average((sizes - middle) * (seconds - mean), weights=weights) / spread)
    fixed = float(mean - each * middle)
    if each < 0:  # noise: what is measured does not depend on the size
        return float(mean), 0.0
    return (fixed, each) if fixed >= 0 else (0.0, float(mean / middle))


# --- which layout ---------------------------------------------------------------------------------


def evaluate_servers(
    servers: Servers, sizes: EngineSizes, layouts: Iterable[Layout]
) -> list[tuple[float, ConsideredServer]]:
    """Layouts with the requests a second that they answer within the goals, best first.

    Those that fit come first; then what answers most requests a second with the goal per token
    met, then what answers most tokens.
    """
    service = usual(sizes.longest)
    found: list[tuple[float, ConsideredServer]] = []
    for layout in layouts:
        replica = servers.replica(layout, sizes)
        tokens, ranks = replica.cache_tokens, replica.data_ranks
        fits = tokens >= max(service.tokens, sizes.longest)
        slots = min(sizes.rows * ranks, tokens // service.tokens)
        good = most = 0.0
        if slots >= 1:
            chunk = sizes.batch_tokens * ranks
            table = RoundTable(replica.steps, chunk=chunk, longest=service.tokens, most=slots)
            rates = _steady_rounds(table, service, slots)
            goal = math.inf if service.tpot_ms is None else service.tpot_ms / 1e3
            most = max((rate for _, rate in rates), default=0.0)
            good = max((rate for seconds, rate in rates if seconds <= goal), default=0.0)
        count = num_replicas(layout)
        one = ConsideredServer(
            layout=str(layout),
            ranks=layout.world_size,
            tokens_per_second=count * most * service.output_len,
            ttft=_number(
                replica.alone.prefill_seconds(service.prompt_len, chunk=sizes.batch_tokens)
            ),
            tpot=_number(replica.alone.decode_seconds(1, service.context)),
            cache_tokens=tokens,
            fits=fits,
        )
        found.append((count * good, one))
    return sorted(found, key=lambda p: (not p[1].fits, -p[0], -p[1].tokens_per_second, p[1].ranks))


def choose_server(
    servers: Servers, sizes: EngineSizes, layouts: Iterable[Layout]
) -> ServingForecast:
    """The forecast of the best layout, with the others that were considered.

    Raises:
        OptionError: none of them fits.
    """
    ranked = evaluate_servers(servers, sizes, layouts)
    if not ranked or not ranked[0][1].fits:
        best = max(ranked, key=lambda p: p[1].cache_tokens)[1] if ranked else None
        rank = 0 if best is None else servers.replica(Layout.parse(best.layout), sizes).capacity
        raise OptionError(
            f"{servers.model} fits in no layout of {servers.cluster}"
            + (
                f", where a rank may hold {format_bytes(rank)}: "
                f"next to its weights {best.layout} can cache {best.cache_tokens} tokens, "
                f"one request may have {sizes.longest}"
                if best
                else ""
            ),
            hint=f"--max-model-len {best.cache_tokens}"
            if best and best.cache_tokens > 1
            else "another machine: hocket plan MODEL --serve",
        )
    chosen = Layout.parse(ranked[0][1].layout)
    return with_servers(server_forecast(servers, chosen, sizes), [one for _, one in ranked])


def with_servers(found: ServingForecast, ranked: Sequence[ConsideredServer]) -> ServingForecast:
    return dataclasses.replace(
        found,
        alternatives=tuple(
            dataclasses.replace(one, chosen=one.layout == found.layout) for one in ranked
        ),
    )
