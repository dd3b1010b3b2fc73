"""Explain: why the winner wins, why its neighbours lose, and what would change the answer.

Every sentence is computed: a neighbour is the best layout with one axis changed, a counterfactual
the best layout on a machine with one property changed, both estimated as the winner was.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from hocket.cost.terms import has_latent
from hocket.planning.forecast import LayoutForecast, layout_forecast
from hocket.planning.layouts import tensor_degrees
from hocket.planning.pins import Pins
from hocket.planning.problem import Problem
from hocket.planning.search import SearchResult, search_layouts
from hocket.spec import recompute
from hocket.spec.capabilities import TABLE
from hocket.spec.cluster import Cluster
from hocket.spec.errors import HocketError
from hocket.spec.layout import Layout
from hocket.spec.units import format_bytes, format_seconds

SHOWN = 8

SIMULATED = 50
"""Layouts that are simulated of each kind for one sentence."""

NVLINK = 450e9
"""Bytes/s per GPU and direction of the NVLink put in where there is none (4th generation)."""

WITHOUT, WITH = "PCIe instead of NVLink", "NVLink instead of PCIe"
LINKS = (WITHOUT, WITH)
"""Counterfactuals that answer whether NVLink matters."""

Neighbour = tuple[str, dict[str, Any]]


def explain_layout(
    problem: Problem,
    best: LayoutForecast,
    *,
    objective: str = "time",
    pins: Pins | None = None,
    here: bool = False,
) -> tuple[str, ...]:
    """Sentences about the best layout of a problem.

    Args:
        best: the winner. pins, here: as it was searched with.
    """
    given = dict(pins or {})
    if best.layout.offload != "none":  # nothing fits without: what is compared offloads as well
        given["offload"] = best.layout.offload
    return (
        *_winner(problem, best),
        *_losers(problem, best, objective, given, here),
        *_changes(problem, best, objective, given, here),
    )


# --- the winner ----------------------------------------------------------------------------------


def _winner(problem: Problem, best: LayoutForecast) -> Iterator[str]:
    step = best.step_seconds.median
    shares = sorted(best.parts.items(), key=lambda item: -item[1])
    parts = ", ".join(
        f"{value / step:.0%} {name}" for name, value in shares if value > 0.005 * step
    )
    yield f"{best.layout} takes {format_seconds(step)} a step: {parts}."
    largest = sorted(best.memory_by_kind.items(), key=lambda item: -item[1])[:2]
    kinds = " and ".join(f"{format_bytes(size)} {name}" for name, size in largest)
    yield (
        f"Peak memory per GPU is {format_bytes(best.memory_high)} at the 95th percentile, of "
        f"{format_bytes(problem.usable)} that a layout may fill; most of it {kinds}."
    )
    if best.context:
        way = "in a ring" if best.context == "ring" else "by all-to-alls over heads (Ulysses)"
        yield f"Over cp {best.layout.cp} keys and values travel {way}, the faster of the two."


# --- its neighbours ------------------------------------------------------------------------------


def _losers(
    problem: Problem, best: LayoutForecast, objective: str, pins: dict[str, Any], here: bool
) -> Iterator[str]:
    names: dict[Layout, list[str]] = {}  # several changes may lead to one layout
    losers: dict[Layout, tuple[float, str]] = {}
    for name, change in _neighbours(problem, best, here):
        if any(key in pins for key in change):
            continue
        try:
            found = _search(problem, objective, {**pins, **change}, here)
        except HocketError:
            continue  # no layout is legal with it
        if found.num_fitting == 0:
            assert found.least is not None
            layout, high = found.least
            losers[layout] = high / problem.usable, f"does not fit: at least {format_bytes(high)}"
        else:
            other = layout_forecast(problem, found.best, 0)
            layout = other.layout
            ratio = _value(other, objective) / _value(best, objective)
            losers[layout] = ratio - 1, _loses(problem, best, other, objective)
        names.setdefault(layout, []).append(name)
    losers.pop(best.layout, None)
    for layout, (_, sentence) in sorted(losers.items(), key=lambda item: item[1])[:SHOWN]:
        yield f"{_either(names[layout])} {sentence} ({layout})."


def _either(names: list[str]) -> str:
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + " or " + names[-1]


def _neighbours(problem: Problem, best: LayoutForecast, here: bool) -> Iterator[Neighbour]:
    """One axis changed: the next degree on either side, and every other option."""
    layout = best.layout
    frozen = {row.field: row.runs for row in TABLE} if here else {}
    for axis in ("tp", "pp", "cp"):
        now = layout.degree(axis)
        choices = tensor_degrees(problem.shape) if axis == "tp" else [now // 2, now, now * 2]
        below = [n for n in choices if 1 <= n < now][-1:]
        above = [n for n in choices if n > now][:1]
        for degree in (*below, *above):
            if degree in frozen.get(axis, (degree,)):
                yield f"{axis}{degree}", {axis: degree}
    for size in (best.microbatch // 2, best.microbatch * 2):
        if size >= 1:
            yield f"microbatches of {size}", {"microbatch": size}
    options: tuple[tuple[str, tuple[Any, ...]], ...] = (
        ("zero", (0, 1, 3)),
        ("recompute", recompute.choices(has_latent(problem.shape))),
        ("sequence_parallel", (False, True)),
        ("schedule", ("1f1b", "interleaved", "zero-bubble") if layout.pp > 1 else ()),
    )
    for field, values in options:
        for value in values:
            if value != getattr(layout, field) and value in frozen.get(field, (value,)):
                text = str(value).lower() if isinstance(value, bool) else value
                yield f"{field}={text}", {field: value}


def _again(layout: Layout) -> tuple[bool, int]:
    """A measure of how much runs again."""
    return layout.recompute == "full", recompute.code(layout.recompute)


def _loses(problem: Problem, best: LayoutForecast, other: LayoutForecast, objective: str) -> str:
    ratio = _value(other, objective) / _value(best, objective)
    what = {"time": "step time", "memory": "memory", "tokens-per-dollar": "cost"}[objective]
    if abs(ratio - 1) < 0.0005:
        return "is as good"
    if objective == "memory":
        return f"at best: {ratio - 1:+.1%} {what}"
    return f"{_reason(problem, best, other)}: {ratio - 1:+.1%} {what}"


def _reason(problem: Problem, best: LayoutForecast, other: LayoutForecast) -> str:
    """What costs the other layout most of its time, next to the best one."""
    step, against = other.step_seconds.median, best.step_seconds.median
    more = {name: other.parts[name] / step - best.parts[name] / against for name in other.parts}
    costs = {
        name: other.parts[name] * other.num_gpus - best.parts[name] * best.num_gpus
        for name in other.parts
    }
    worst = max(costs, key=lambda name: costs[name])
    domain = problem.cluster.domain
    a, b = other.layout, best.layout
    if worst == "communication inside layers" and a.tp > domain >= b.tp:
        return f"leaves the {'NVLink ' if problem.cluster.node.link.generation else ''}domain"
    if worst == "compute":
        if _again(a) > _again(b):
            return "computes activations twice"
        return "computes longer, in smaller matmuls or uneven stages"
    if worst == "other":
        return "comes close"
    before = best.parts[worst] / against
    now = f"spends {before + more[worst]:.1%} of the step on {worst}"
    return f"{now}, not {before:.1%}" if before >= 0.0005 else f"{now} and this one none"


# --- other machines ------------------------------------------------------------------------------


def _changes(
    problem: Problem, best: LayoutForecast, objective: str, pins: dict[str, Any], here: bool
) -> Iterator[str]:
    unmoved = []
    for name, changed in _counterfactuals(problem):
        try:
            found = _search(changed, objective, pins, here)
        except HocketError:
            continue
        if found.num_fitting == 0:
            yield f"With {name} nothing would fit."
            continue
        other = layout_forecast(changed, found.best, 0)
        # Tokens rather than seconds: a batch of another size takes another time.
        ratio = best.tokens_per_second_per_gpu.median / other.tokens_per_second_per_gpu.median
        same, matters = _same(other.layout, best.layout), abs(ratio - 1) >= 0.01
        if same and not matters and name not in LINKS:
            unmoved.append(name)
            continue
        layout = "the same layout" if same else f"{other.layout}"
        text = f"With {name} {layout} wins, at {ratio - 1:+.0%} time a token."
        yield about_links(name, text, matters=matters)
    if unmoved:
        yield f"It makes no difference: {', '.join(unmoved)}."


def about_links(name: str, text: str, *, matters: bool) -> str:
    """The sentence about a counterfactual; where that is another link, as an answer to whether
    NVLink matters here."""
    if name not in LINKS:
        return text
    verb = "would" if name == WITH else "does"
    verdict = "would matter" if name == WITH else "matters"
    said = f"NVLink {verdict}" if matters else f"NVLink {verb} not matter"
    return f"{said} here: {text[0].lower()}{text[1:]}"


def with_node(cluster: Cluster, **changes: Any) -> Cluster:
    """A cluster of nodes with some properties changed."""
    return dataclasses.replace(cluster, node=dataclasses.replace(cluster.node, **changes))


def other_links(cluster: Cluster) -> Iterator[tuple[str, Cluster]]:
    """One of `LINKS`, where a node has several GPUs, and the cluster with these links."""
    node, name = cluster.node, WITH
    changes: dict[str, Any] = {"kind": "nvswitch", "bandwidth": NVLINK, "generation": 4}
    if node.link.kind.startswith("nv"):
        name, changes = WITHOUT, {"kind": "pcie", "bandwidth": node.pcie, "generation": 0}
    if node.num_gpus > 1:
        link = dataclasses.replace(node.link, domain=node.num_gpus, **changes)
        yield name, with_node(cluster, link=link)


def other_memory(cluster: Cluster) -> Iterator[tuple[str, Cluster]]:
    """The cluster of GPUs with less memory, and with more."""
    gpu = cluster.node.gpu
    for name, factor in (("half the memory", 0.5), ("twice the memory", 2.0)):
        memory, usable = round(gpu.memory * factor), round(gpu.usable * factor)
        card = dataclasses.replace(gpu, memory=memory, usable=usable)
        yield name, with_node(cluster, gpu=card)


def _counterfactuals(problem: Problem) -> Iterator[tuple[str, Problem]]:
    """The problem on machines with one property changed, and with another batch."""
    cluster, machines = problem.cluster, [*other_links(problem.cluster)]
    if cluster.num_nodes > 1:
        for name, factor in (("half the network", 0.5), ("twice the network", 2.0)):
            machines.append((name, with_node(cluster, network=cluster.node.network * factor)))
    for name, changed in (*machines, *other_memory(cluster)):
        yield name, dataclasses.replace(problem, cluster=changed)
    yield (
        f"a global batch of {2 * problem.global_batch}",
        dataclasses.replace(problem, global_batch=2 * problem.global_batch),
    )


def _same(one: Layout, other: Layout) -> bool:
    """Whether layouts differ in nothing but the number of microbatches."""
    return dataclasses.replace(one, microbatches=None) == dataclasses.replace(
        other, microbatches=None
    )


def _search(problem: Problem, objective: str, pins: Pins, here: bool) -> SearchResult:
    found = search_layouts(problem, objective=objective, pins=pins, here=here, simulated=SIMULATED)
    assert found.num_fitting == 0 or np.all(found.best.high <= problem.usable)
    return found


def _value(found: LayoutForecast, objective: str) -> float:
    if objective == "memory":
        return float(found.memory_high)
    if objective == "tokens-per-dollar":
        return found.step_seconds.median * found.num_gpus
    return found.step_seconds.median
