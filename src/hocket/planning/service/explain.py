"""Explain a service: why the winner wins, why its neighbours lose, what would change the answer.

Every sentence is computed: a neighbour is the best deployment with one axis held at another value,
a counterfactual the best one under another load or on another machine, searched as the winner was.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from hocket.planning.explain import LINKS, about_links, other_links, other_memory
from hocket.planning.layouts import tensor_degrees
from hocket.planning.service.forecast import ServiceForecast, misses, value_range
from hocket.planning.service.plan import KindAnswer
from hocket.planning.service.problem import ServiceProblem
from hocket.planning.service.search import (
    Candidate,
    Deployed,
    Pins,
    candidate,
    forecast_of,
    search_deployments,
    simulated_latencies,
    too_slow,
)
from hocket.spec.expert_copies import copied_imbalance
from hocket.spec.units import format_bytes, format_seconds


def explain_deployment(
    problem: ServiceProblem,
    best: ServiceForecast,
    kinds: Sequence[KindAnswer] = (),
    *,
    pins: Pins | None = None,
) -> tuple[str, ...]:
    """Sentences about the best deployment of a problem.

    Args:
        kinds: the answers for every kind of GPU that was asked for.
        pins: as it was searched with.
    """
    given = dict(pins or {})
    if best.end_to_end is None:  # saturated: there are no latencies to compare
        return (*winner(problem, best), *_kinds(best, kinds), _would_do(problem, best))
    return (
        *winner(problem, best),
        *_losers(problem, best, given),
        *_kinds(best, kinds),
        *_changes(problem, best, given),
    )


# --- the winner ----------------------------------------------------------------------------------


def winner(problem: ServiceProblem, best: ServiceForecast) -> Iterator[str]:
    """How the numbers of a deployment come about: load, memory, time."""
    service = problem.service
    if best.ttft is None or best.tpot is None:
        yield f"{best.layout} saturates at {best.most_requests_per_second:.3g} requests/s."
        return
    at = service.percentile
    yield (
        f"{best.layout} is {_replicas(best)}: saturated at {best.most_requests_per_second:.3g} "
        f"requests/s, loaded to {best.load:.0%} of that. On each, {best.batch:.0f} sequences "
        f"decode together on average; {best.max_sequences} would fit."
    )
    if best.redundant_experts:
        yield _copies(problem, best)
    kinds = best.memory_by_kind
    request = problem.prices(
        best.layout.tp, best.layout.pp, best.max_num_batched_tokens
    ).cache_bytes
    yield (
        f"The peak GPU may fill {format_bytes(best.memory)}: {format_bytes(kinds['weights'])} "
        f"weights, {format_bytes(kinds['overhead'])} overhead, the rest cache, of which a request "
        f"takes {format_bytes(request * service.tokens)} there."
    )
    yield (
        f"A prompt alone takes {format_seconds(best.prefill_seconds)}, a token alone "
        f"{format_seconds(best.decode_seconds)}; under this load TTFT is "
        f"{format_seconds(best.ttft.at(at))} and TPOT {format_seconds(best.tpot.at(at))} at "
        f"the {at}th percentile."
    )
    if best.replicas > 1:
        yield _bound(problem, best)


def _copies(problem: ServiceProblem, best: ServiceForecast) -> str:
    """What copies of experts gain."""
    ep, imbalance = best.layout.ep, problem.expert_imbalance
    even = copied_imbalance(problem.shape.experts, ep, best.redundant_experts, imbalance)
    return (
        f"{best.redundant_experts} copies of experts in each layer (--redundant-experts) take the "
        f"busiest of {ep} ranks from {imbalance:g} to {even:.2f} times the mean number of tokens, "
        "with experts chosen by a router whose logits differ by normal numbers."
    )


def _bound(problem: ServiceProblem, best: ServiceForecast) -> str:
    """What sets the number of GPUs: what one replica fewer would miss."""
    layout = best.layout
    group = problem.grouped(layout.ep, layout.cp, best.redundant_experts)
    one = candidate(group, layout.tp, layout.pp, best.max_num_batched_tokens)
    latencies = simulated_latencies(problem, one, best.replicas - 1)
    if latencies is None:
        return "One replica fewer could not keep up."
    missed = " and ".join(misses(problem, latencies))
    if missed:
        return f"One replica fewer: {missed}."
    service = problem.service
    if problem.trace is None and service.requests_per_second > one.good * (best.replicas - 1):
        return (
            "One replica fewer meets the goals in this simulation, but its mean TPOT in a steady "
            f"state is above {service.tpot_ms:g} ms."
        )
    return "One replica fewer meets the goals too."


def _would_do(problem: ServiceProblem, best: ServiceForecast) -> str:
    """How many replicas of a saturated layout meet the goals."""
    layout = best.layout
    axes = {"tp": layout.tp, "pp": layout.pp, "ep": layout.ep, "cp": layout.cp}
    axes["max_num_batched_tokens"] = best.max_num_batched_tokens
    found = _best(problem.unbounded(), axes)
    if found is None:
        return "No number of these replicas that is looked at meets the goals."
    return f"{forecast_of(problem, found).layout} meets the goals, on {_gpus_text(found.gpus)}."


# --- its neighbours ------------------------------------------------------------------------------


def _losers(problem: ServiceProblem, best: ServiceForecast, pins: dict[str, int]) -> Iterator[str]:
    layout = best.layout
    degrees = tensor_degrees(problem.shape)
    changes: list[tuple[str, dict[str, int]]] = []
    below = [n for n in degrees if n < layout.tp][-1:]
    above = [n for n in degrees if n > layout.tp][:1]
    changes += [(f"tp{n}", {"tp": n}) for n in (*below, *above)]
    stages = {max(1, layout.pp // 2), layout.pp * 2} - {layout.pp}
    changes += [(f"pp{n}", {"pp": n}) for n in sorted(stages)]
    changes += [("ep1", {"ep": 1})] if layout.ep > 1 else []
    changes += [("cp1", {"cp": 1})] if layout.cp > 1 else []
    for name, change in changes:
        if any(key in pins for key in change):
            continue
        found = _best(problem, {**pins, **change})
        if found is None:
            yield f"{name}: {_cannot(problem, best, {**pins, **change})}."
            continue
        other = forecast_of(problem, found)
        assert other.end_to_end is not None
        assert best.end_to_end is not None
        if other.layout == layout:
            continue
        more = other.num_gpus / best.num_gpus - 1
        slower = other.end_to_end.p50 / best.end_to_end.p50 - 1
        verdict = (
            f"as many GPUs, answers {slower:+.0%} long"
            if other.num_gpus == best.num_gpus
            else f"{_gpus_text(other.num_gpus)} ({more:+.0%}), {_why(problem, best, other)}"
        )
        yield f"{name} at best ({other.layout}): {verdict}."


def _why(problem: ServiceProblem, best: ServiceForecast, other: ServiceForecast) -> str:
    """What makes the other deployment need more."""
    a, b = other.layout, best.layout
    size, own = (one.tp * one.pp * one.cp * one.ep for one in (a, b))
    each = other.most_requests_per_second / other.num_gpus
    against = best.most_requests_per_second / best.num_gpus
    if other.num_gpus == size and size > own:
        return "one replica is already larger"
    if a.tp > problem.cluster.domain:
        return "a layer's sums leave the node"
    if other.decode_seconds > 1.15 * best.decode_seconds and problem.service.tpot_ms is not None:
        return (
            f"a token alone takes {format_seconds(other.decode_seconds)}, so fewer share a step "
            "within the goal"
        )
    if each < against:
        return f"a GPU carries {each:.3g} requests/s at most, not {against:.3g}"
    return "whole replicas leave more idle"


def _cannot(problem: ServiceProblem, best: ServiceForecast, pins: dict[str, int]) -> str:
    """Why no deployment with these axes meets the goals."""
    tp, pp = pins.get("tp", best.layout.tp), pins.get("pp", best.layout.pp)
    held = problem.cluster.node.num_gpus
    if (tp, pp) not in set(problem.splits()):
        if tp * pp * problem.memory < problem.weights:
            return "does not hold the weights"
        if pp > len(problem.shape.layers):
            return "more stages than layers"
        if held % tp and tp % held:
            return f"does not divide a node of {held}"
        return "was not considered: fewer stages leave as much on the peak GPU, or it is too large"
    if problem.sequences(tp, pp) < 1:
        return "does not hold weights and a request"
    one: Candidate = candidate(problem, tp, pp, best.max_num_batched_tokens)
    if too_slow(problem, one):
        return (
            f"a request alone takes {format_seconds(one.floor_ttft)} to the first token and "
            f"{format_seconds(one.floor_tpot)} for each other"
        )
    return "meets the goals at no number of replicas that is looked at"


def _kinds(best: ServiceForecast, kinds: Sequence[KindAnswer]) -> Iterator[str]:
    for kind in kinds:
        other = kind.best
        if kind.gpu == best.gpu:
            continue
        if other is None:
            yield f"{kind.gpu}: {kind.reason}."
            continue
        text = f"{kind.gpu}: {_gpus_text(other.num_gpus)} as {other.layout}"
        if other.dollars_per_hour is not None and best.dollars_per_hour is not None:
            text += f", {other.dollars_per_hour / best.dollars_per_hour - 1:+.0%} dollars"
        elif other.dollars_per_hour is None:
            text += ", no price was read"
        yield text + "."


# --- what would change the answer ----------------------------------------------------------------


def _changes(problem: ServiceProblem, best: ServiceForecast, pins: dict[str, int]) -> Iterator[str]:
    unmoved = []
    for name, changed in _counterfactuals(problem):
        found = _best(changed, pins)
        if found is None:
            yield about_links(name, f"With {name} no deployment meets the goals.", matters=True)
            continue
        other = forecast_of(changed, found)
        if other.num_gpus == best.num_gpus:
            assert other.end_to_end is not None
            assert best.end_to_end is not None
            longer = other.end_to_end.p50 / best.end_to_end.p50 - 1
            same = other.layout == best.layout
            if same and name not in LINKS:
                unmoved.append(name)
                continue
            layout = "the same layout" if same else f"but {other.layout}"
            text = f"With {name}: as many GPUs, {layout}; answers {longer:+.0%} long."
            yield about_links(name, text, matters=abs(longer) >= 0.01)
        else:
            text = f"With {name}: {_gpus_text(other.num_gpus)}, {other.layout}."
            yield about_links(name, text, matters=True)
    if unmoved:
        yield f"The same layout wins with {', '.join(unmoved)}."


def _counterfactuals(problem: ServiceProblem) -> Iterator[tuple[str, ServiceProblem]]:
    """The problem on machines with one property changed, and under other loads."""
    service = problem.service

    def under(**changes: Any) -> ServiceProblem:
        return problem.under(dataclasses.replace(service, **changes), bounded=False)

    for name, cluster in (*other_links(problem.cluster), *other_memory(problem.cluster)):
        yield name, dataclasses.replace(problem, cluster=cluster, bounded=False)
    if problem.precision in ("bf16", "fp16"):
        yield (
            "weights and cache in fp8",
            dataclasses.replace(problem, precision="fp8", bounded=False),
        )
    slow = {
        f"{name}_ms": goal / value_range(name, 1.0).high  # type: ignore[union-attr]
        for name, goal in (("ttft", service.ttft_ms), ("tpot", service.tpot_ms))
        if goal is not None and value_range(name, 1.0) is not None
    }
    if slow:
        yield "latencies at the 90th percentile of their error", under(**slow)
    rate = service.requests_per_second
    yield f"{2 * rate:g} requests/s", under(requests_per_second=2 * rate)
    if service.tpot_ms is not None:
        yield f"a TPOT of {service.tpot_ms / 2:g} ms", under(tpot_ms=service.tpot_ms / 2)
    yield (
        f"prompts of {2 * service.prompt_len:,}",
        under(prompt_len=2 * service.prompt_len),
    )


def _best(problem: ServiceProblem, pins: dict[str, int]) -> Deployed | None:
    found = search_deployments(problem, top=1, pins=pins)
    return found[0] if found else None


def _replicas(best: ServiceForecast) -> str:
    count, layout = best.replicas, best.layout
    size = layout.tp * layout.pp * layout.cp * layout.ep
    gpus = f"{size} {best.gpu}"
    return f"{count} replicas of {gpus}" if count > 1 else f"one replica of {gpus}"


def _gpus_text(count: int) -> str:
    """`1 GPU`, `2 GPUs`."""
    return f"{count} GPU" + "s" * (count != 1)
