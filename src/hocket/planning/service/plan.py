"""ServicePlan: the answer to how many GPUs of which kind a service needs, or why none will do."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from hocket.planning.layouts import tensor_degrees
from hocket.planning.service.forecast import ServiceForecast, deployment_forecast, nodes
from hocket.planning.service.memory import MemoryLevels, MemoryMinimum, held_levels, memory_minimum
from hocket.planning.service.need import NeedMap
from hocket.planning.service.pools import SOFTWARE, PooledForecast, pooled
from hocket.planning.service.problem import LARGEST, ServiceProblem, usual_chunk
from hocket.planning.service.search import (
    Candidate,
    Pins,
    candidate_replicas,
    deploy,
    forecast_of,
    least_replicas,
    most_replicas,
    search_deployments,
    simulated_latencies,
    too_slow,
    with_copies,
)
from hocket.planning.service.stored import NONE, OTHERS, StoredWeights
from hocket.spec import legality, renamed
from hocket.spec.errors import LayoutError, OptionError, unknown
from hocket.spec.layout import Layout
from hocket.spec.service import Service
from hocket.spec.units import format_bytes

PINS = ("tp", "pp", "cp", "ep", "dp", "max_num_batched_tokens")
"""What can be pinned; dp is the number of replicas."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class KindAnswer:
    """The answer for one kind of GPU.

    Attributes:
        gpu: the kind. cluster: as it was asked for. gpus_per_node: of its nodes.
        memory: fewest GPUs that hold the model and one request. held: those for several at once.
        deployments: those that meet the goals, best first; or the one that was asked for.
        reason: why there are none.
        pools: prefill and decode on GPUs of their own, where that meets the goals.
        floor_ttft, floor_tpot: seconds of a request alone, each on the layout that is quickest at
            it; None where nothing fits.
    """

    gpu: str
    cluster: str
    gpus_per_node: int
    memory: MemoryMinimum
    deployments: tuple[ServiceForecast, ...]
    held: tuple[MemoryLevels, ...] = ()
    reason: str = ""
    pools: PooledForecast | None = None
    floor_ttft: float | None = None
    floor_tpot: float | None = None

    @property
    def best(self) -> ServiceForecast | None:
        return self.deployments[0] if self.deployments else None

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        data = dataclasses.asdict(self)
        data["deployments"] = [one.to_json() for one in self.deployments]
        data["pools"] = None if self.pools is None else self.pools.to_json()
        return data


@dataclasses.dataclass(frozen=True, kw_only=True)
class OtherWeights:
    """The cheapest deployment with weights that are stored otherwise.

    Attributes:
        stored: how. weight_bytes: of all weights. best: None where none meets the goals.
    """

    stored: StoredWeights
    weight_bytes: float
    best: ServiceForecast | None

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        best = None if self.best is None else self.best.to_json()
        return {**dataclasses.asdict(self), "best": best}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServicePlan:
    """GPUs for one service.

    Attributes:
        model: its name. claim, source: of a hypothesis, what it assumes and who says so.
        service: the load and its goals. stored: precision of the weights. engine: what is
            estimated.
        cache_precision: of keys and values.
        usable: share of a GPU's memory.
        parameters, weight_bytes, cache_bytes_per_token, heads, layers, experts: of the model; 0
            experts where it is dense.
        request_tokens: of the longest request, prompt and answer.
        trace_requests: of the trace that was simulated; 0: equal requests at random times.
        kinds: an answer for each kind of GPU, cheapest first, those without an answer last.
        need: GPUs over load and latency, one map for each kind that has an answer.
        memory_map: GPUs over concurrent requests and context: kind to rows; see `concurrent` and
            `contexts`.
        others: the cheapest deployments with weights stored otherwise.
        explanation: sentences, where asked for. notes: what a reader should know.
    """

    model: str
    service: Service
    stored: StoredWeights
    engine: str
    usable: float
    parameters: int
    weight_bytes: float
    cache_bytes_per_token: float
    cache_precision: str
    kinds: tuple[KindAnswer, ...]
    heads: int
    layers: int
    experts: int = 0
    request_tokens: int = 0
    trace_requests: int = 0
    claim: str = ""
    source: str = ""
    need: tuple[NeedMap, ...] = ()
    concurrent: tuple[int, ...] = ()
    contexts: tuple[int, ...] = ()
    memory_map: dict[str, tuple[tuple[int | None, ...], ...]] = dataclasses.field(
        default_factory=dict
    )
    others: tuple[OtherWeights, ...] = ()
    explanation: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def precision(self) -> str:
        """Of weights and products, experts' weights apart."""
        return self.stored.precision

    @property
    def best(self) -> ServiceForecast | None:
        """The cheapest deployment that meets the goals; its `layout` is what can be run."""
        return next((kind.best for kind in self.kinds if kind.best is not None), None)

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        data = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        data["service"] = dataclasses.asdict(self.service)
        data["precision"] = self.precision
        data["stored"] = dataclasses.asdict(self.stored)
        data["others"] = [one.to_json() for one in self.others]
        data["kinds"] = [kind.to_json() for kind in self.kinds]
        data["need"] = [one.to_json() for one in self.need]
        best = self.best
        data["best"] = None if best is None else {"gpu": best.gpu, "layout": str(best.layout)}
        return data


def service_pins(texts: Sequence[str]) -> dict[str, int]:
    """Pins from `tp=8`. Raises OptionError: no such axis, with the nearest, or no whole number."""
    found: dict[str, int] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        key = key.strip().replace("-", "_")
        (key,) = renamed.present_options({key: None}, PINS)
        if key not in PINS:
            message, hint = unknown("axis", key, PINS)
            raise OptionError(f"--pin: {message}", hint=hint)
        if not equals or not value.strip(" ").isdecimal() or int(value) < 1:
            raise OptionError(
                f"--pin {text!r}: {key} is a whole number of at least 1", hint=f"--pin {key}=8"
            )
        if found.get(key, int(value)) != int(value):
            raise OptionError(f"--pin gives {key} twice: {found[key]} and {int(value)}")
        found[key] = int(value)
    return found


def answer(problem: ServiceProblem, *, top: int = 10, pins: Pins | None = None) -> KindAnswer:
    """What one kind of GPU can do."""
    pins = pins or {}
    _divides(problem, pins.get("tp", 1), pins.get("pp", 1))
    memory = memory_minimum(problem)
    fitting = candidate_replicas(problem, pins)
    found = search_deployments(problem, top=top, pins=pins, found=fitting)
    reason = "" if found else _why_none(problem, fitting, pins, memory)
    return KindAnswer(
        gpu=problem.gpu.name,
        cluster=problem.cluster.name,
        gpus_per_node=problem.cluster.node.num_gpus,
        memory=memory,
        deployments=tuple(forecast_of(problem, one) for one in found),
        held=held_levels(problem.unbounded()),
        reason=reason,
        pools=None if pins else pooled(problem),
        floor_ttft=min((one.floor_ttft for one in fitting), default=None),
        floor_tpot=min((one.floor_tpot for one in fitting), default=None),
    )


def answer_one(problem: ServiceProblem, layout: Layout, chunk: int | None = None) -> KindAnswer:
    """One layout estimated, whether or not it meets the goals.

    Raises:
        LayoutError: axes that serving has not, a tp that does not divide the model, more stages
            than layers, more GPUs than there are, or a replica that holds no request.
    """
    tp, pp = layout.tp, layout.pp
    plain = Layout(dp=layout.dp, pp=pp, cp=layout.cp, tp=tp, ep=layout.ep)
    if layout.cp > 1 and layout.ep > 1:
        raise LayoutError(
            f"{layout}: a server has context ranks (cp) or experts over ranks (ep)",
            hint=f"--layout {legality.narrowed(plain, cp=1)}",
        )
    if layout != plain or layout.ep not in {group.ep for group in problem.groups()}:
        raise LayoutError(
            f"{layout}: serving has replicas (dp), tensor (tp), pipeline (pp), context (cp) and, "
            "of a mixture, expert (ep) parallelism alone",
            hint=f"--layout {dataclasses.replace(plain, ep=1)}",
        )
    _divides(problem, tp, pp)
    problem, replicas = problem.grouped(layout.ep, layout.cp), layout.dp // layout.ep
    chunk = usual_chunk(pp) if chunk is None else chunk
    if problem.sequences(tp, pp, chunk) < 1:
        prices = problem.prices(tp, pp, chunk)
        gigabyte = 1e9
        raise LayoutError(
            f"{problem.shape.name} as {plain} does not hold a request of "
            f"{problem.service.tokens:,} tokens on "
            f"{problem.gpu.name}: of {problem.memory / gigabyte:.1f} GB, weights take "
            f"{prices.weight_bytes / gigabyte:.1f}, overhead {prices.overhead_bytes / gigabyte:.1f}"
            f" and a request {prices.cache_bytes * problem.service.tokens / gigabyte:.1f}",
            hint=_split_hint(memory_minimum(problem)),
        )
    one = with_copies(problem, tp, pp, chunk)
    problem = problem.grouped(one.ep, one.cp, one.redundant)
    if replicas > most_replicas(problem, one):
        raise LayoutError(
            f"{plain} needs {plain.world_size} GPUs; {problem.cluster.name} holds "
            f"{most_replicas(problem, one)} of its replicas",
            hint=f"--cluster {problem.gpu.name}",
        )
    latencies = simulated_latencies(problem, one, replicas)
    found = deployment_forecast(
        problem,
        tp=tp,
        pp=pp,
        chunk=chunk,
        replicas=replicas,
        most=one.most,
        latencies=latencies,
    )
    return KindAnswer(
        gpu=problem.gpu.name,
        cluster=problem.cluster.name,
        gpus_per_node=problem.cluster.node.num_gpus,
        memory=memory_minimum(problem),
        deployments=(found,),
        floor_ttft=one.floor_ttft,
        floor_tpot=one.floor_tpot,
    )


def _divides(problem: ServiceProblem, tp: int, pp: int) -> None:
    """Raises LayoutError where a replica cannot be cut so."""
    shape = problem.shape
    degrees = tensor_degrees(shape)
    if tp not in degrees:
        most = 2 * problem.cluster.node.num_gpus
        raise LayoutError(
            f"tp {tp} does not divide {shape.name}, which has {shape.heads} heads and "
            f"{shape.kv_heads} key/value heads",
            hint="one of " + ", ".join(f"tp={n}" for n in degrees if n <= most),
        )
    if not legality.stages(len(shape.layers), pp):
        raise LayoutError(
            f"pp {pp} is more stages than the {len(shape.layers)} layers of {shape.name}",
            hint=f"pp={len(shape.layers)} at most",
        )


def cost_key(kind: KindAnswer) -> tuple[float, float]:
    """What kinds are sorted by: dollars an hour, those without a price after those with one."""
    if kind.best is None:
        return math.inf, math.inf
    hourly = kind.best.dollars_per_hour
    return math.inf if hourly is None else hourly, float(kind.best.num_gpus)


# --- why none will do ----------------------------------------------------------------------------


def _why_none(
    problem: ServiceProblem, fitting: Sequence[Candidate], pins: Pins, memory: MemoryMinimum
) -> str:
    """Why no deployment of this kind meets the goals, with the numbers."""
    service, name = problem.service, problem.gpu.name
    asked = ", ".join(f"{key}={value}" for key, value in pins.items())
    if not fitting:
        if asked and memory.gpus:
            return f"no legal layout with {asked} holds the model and one request"
        whole = f"{format_bytes(memory.weight_bytes)} of weights and a request of "
        whole += format_bytes(memory.cache_bytes)
        if not problem.bounded:
            return f"{whole} fit no legal layout of up to {LARGEST} times the GPUs of the weights"
        least = memory_minimum(problem.unbounded())
        needed = f" {least.gpus} (pp{least.pp}.tp{least.tp})" if least.gpus else " more than any"
        return f"{whole} need{needed}; there are {problem.num_gpus} {name}"
    for what, goal, floors in (
        ("TTFT", service.ttft_ms, [one.floor_ttft for one in fitting]),
        ("TPOT", service.tpot_ms, [one.floor_tpot for one in fitting]),
    ):
        low = min(floors) * 1e3
        if goal is not None and low > goal:
            at = fitting[floors.index(min(floors))]
            more = "".join(f".{axis}{n}" for axis, n in (("cp", at.cp), ("ep", at.ep)) if n > 1)
            return (
                f"{what} of a request alone is at least {low:,.0f} ms (tp{at.tp}.pp{at.pp}{more}), "
                f"not {goal:g}: no number of {name} is faster"
            )
    both = [one for one in fitting if not too_slow(problem, one)]
    if not both:
        return "no one layout meets both goals, even for a request alone"
    if problem.bounded:
        return _too_few(problem, pins)
    if "dp" in pins:
        ranks = min(least_replicas(problem, one) * one.ep for one in both)
        return f"{asked}: too few replicas; at least {ranks} are needed"
    return "the goals are met by a request alone, but by no number of replicas under this load"


def _too_few(problem: ServiceProblem, pins: Pins) -> str:
    enough = search_deployments(problem.unbounded(), top=1, pins=pins)
    there = problem.cluster.num_gpus
    found = most_rate(problem, pins)
    carries = f"; they carry {found:.3g} requests/s within the goals" if found else ""
    if not enough:
        return f"no number of {problem.gpu.name} meets the goals under this load{carries}"
    return f"needs {enough[0].gpus} {problem.gpu.name}, and there are {there}{carries}"


def _two_digits(value: float) -> float:
    """Rounded down, so that what `value` allows is not exceeded."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return float(f"{math.floor(value / unit) * unit:.2g}")


def other_weights(
    problem: ServiceProblem, stored: StoredWeights, published: str, pins: Pins
) -> tuple[OtherWeights, ...]:
    """The cheapest deployment for each other way to store the weights: the checkpoint's own, 16
    bits, and 8 and 4 where the checkpoint has more."""
    published, found = published or NONE, []
    fewer = OTHERS[: OTHERS.index(published)] if published in OTHERS else ()
    for name in dict.fromkeys((published, *fewer, NONE)):
        if name == stored.quantization:
            continue
        other = dataclasses.replace(stored, quantization=name, published=name == published)
        asked = dataclasses.replace(
            problem, precision=other.precision, expert_precision=other.expert_precision
        )
        best = next(iter(search_deployments(asked, top=1, pins=pins)), None)
        found.append(
            OtherWeights(
                stored=other,
                weight_bytes=asked.weights,
                best=None if best is None else forecast_of(asked, best),
            )
        )
    return tuple(found)


def most_rate(problem: ServiceProblem, pins: Pins | None = None) -> float:
    """Most requests per second that the GPUs there are carry within the goals, to two digits."""
    best = 0.0
    for one in candidate_replicas(problem, pins):
        room = most_replicas(problem, one)
        if room < 1 or too_slow(problem, one):
            continue
        high = min(one.good, one.most) * room
        if high <= best:
            continue
        for step in range(14):
            rate = _two_digits(high * 0.9**step)
            if rate <= best:
                break
            service = dataclasses.replace(problem.service, requests_per_second=rate)
            if deploy(problem.under(service), one, replicas=room) is not None:
                best = rate
                break
    return best


def impossible(
    problem: ServiceProblem,
    kind: KindAnswer,
    others: Sequence[str],
    pins: Pins,
    weights: Sequence[OtherWeights] = (),
) -> LayoutError:
    """The error where the only kind that was asked for will not do.

    Args:
        others: other kinds that would, cheapest first. weights: with weights stored otherwise.
    """
    service = problem.service
    hint = None
    if problem.bounded:
        enough = search_deployments(problem.unbounded(), top=1, pins=pins)
        if enough:
            held = problem.cluster.node.num_gpus
            size = enough[0].candidate.size
            count = nodes(problem, size, enough[0].replicas)
            hint = f"--cluster {count}x{held}x{problem.gpu.name}"
    if hint is None and others:
        hint = f"--cluster {others[0]}"
        hint += f", or {', '.join(others[1:])}" if others[1:] else ""
    elif hint is None:
        slower = [
            f"{flag} {math.ceil(1.2e3 * floor)}"
            for flag, goal, floor in (
                ("--ttft-ms", service.ttft_ms, kind.floor_ttft),
                ("--tpot-ms", service.tpot_ms, kind.floor_tpot),
            )
            if goal is not None and floor is not None and floor * 1e3 > goal
        ]
        if slower:
            hint = f"{' '.join(slower)}; none of the GPUs compared is faster"
    enough_bits = [one for one in weights if one.best is not None]
    if enough_bits:
        least = enough_bits[0]
        assert least.best is not None
        text = f"--quantization {least.stored.quantization} takes {least.best.num_gpus} GPU"
        text += "s" * (least.best.num_gpus > 1) + f" ({least.best.layout})"
        hint = text if hint is None else f"{hint}, or {text}"
    message = f"{problem.shape.name} on {problem.cluster.name}: {kind.reason}"
    if kind.pools is not None:
        message += (
            f". {' and '.join(SOFTWARE)} meet the goals with prefill and decode in pools of their "
            f"own: {kind.pools.prefill.layout} and {kind.pools.decode.layout}, "
            f"{kind.pools.num_gpus} GPUs"
        )
    return LayoutError(message, hint=hint)


def _split_hint(memory: MemoryMinimum) -> str | None:
    return f"--layout pp{memory.pp}.tp{memory.tp} holds {memory.requests}" if memory.gpus else None
