"""Plan: the answer to how a model is split over a cluster, or why it cannot be."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from hocket.catalogue.hardware import cluster as find_cluster
from hocket.catalogue.hardware import node as catalogued
from hocket.catalogue.hardware import node_names
from hocket.planning.fit import HEADROOM
from hocket.planning.forecast import LayoutForecast, layout_forecast
from hocket.planning.goodput import Goodput
from hocket.planning.layouts import layout_at, row
from hocket.planning.pins import Pins, pins_text
from hocket.planning.placement import moved, placed_forecast, ranked_when_placed
from hocket.planning.problem import OWN, Problem
from hocket.planning.search import (
    EXTRA,
    Scored,
    SearchResult,
    estimate_layouts,
    score,
    search_layouts,
    simulate_all,
)
from hocket.planning.tools.emit import TOOLS, tool_reasons
from hocket.spec import renamed
from hocket.spec.cluster import Cluster
from hocket.spec.errors import LayoutError, OptionError
from hocket.spec.layout import OFFLOAD, Layout, divisors
from hocket.spec.precision import default_grad_dtype
from hocket.spec.timeline import Timeline
from hocket.spec.units import format_bytes

BEYOND = 3
"""Better layouts that this hocket cannot run today, shown next to those that it can."""

PLACED = 10
"""Kinds of layouts whose orders of axes are tried before they are ranked, for any `top` below."""

IDENTICAL = ("dp", "pp", "cp", "tp", "ep", "schedule", "zero", "recompute", "sequence_parallel")
"""Layouts equal in these are of one kind: they differ in microbatches, virtual stages and shard."""

LARGEST = 1 << 14
"""Nodes looked at for the smallest cluster that fits."""

LORA_RANK = 16
"""Rank of the adapters that a hint offers."""
SHORTEST = 128
"""Tokens of the shortest sequence that is proposed instead."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """The best layouts of one model on one cluster.

    Attributes:
        model, cluster: names. objective: what they are sorted by.
        seq_len, global_batch, precision: of the step. grad_dtype: of its gradients; empty on CPU
            cores.
        layouts: best first; by default those that this hocket can run today.
        unsupported_layouts: better ones that it cannot, best first; none where `layouts` holds all
        kinds. num_legal, num_fitting: layouts looked at, and of them those that fit in memory.
        explanation: sentences, where asked for.
        notes: what a reader should know.
        machine: the CPU cores that were measured, in words, and empty on GPUs; where it is not,
            figures are those of a run's forecast, without ranges.
        lora_rank, lora_targets, quantize_base: of adapters that are trained instead of the model;
            None: it is.
        optimizer: as asked for.
        stack: software whose constants estimate it, where it was named: its version and years.
        goodput: of the first layout, on machines that fail; None on CPU cores.
        problem: what was asked, on GPUs; not in the JSON form.
    """

    model: str
    cluster: str
    objective: str
    seq_len: int
    global_batch: int
    precision: str
    layouts: tuple[LayoutForecast, ...]
    unsupported_layouts: tuple[LayoutForecast, ...] = ()
    num_legal: int = 0
    num_fitting: int = 0
    explanation: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    machine: str = ""
    lora_rank: int | None = None
    lora_targets: str | None = None
    quantize_base: str | None = None
    optimizer: str | None = None
    stack: str = ""
    grad_dtype: str = ""
    goodput: Goodput | None = None
    problem: Problem | None = dataclasses.field(default=None, repr=False, compare=False)

    def __getattr__(self, name: str) -> Any:
        return getattr(self, renamed.attribute("TrainingPlan", name, renamed.PLAN))

    @property
    def best(self) -> LayoutForecast:
        """The first of `layouts`; of `unsupported_layouts` where nothing that runs here fits."""
        return (*self.layouts, *self.unsupported_layouts)[0]

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        names = [f.name for f in dataclasses.fields(self) if f.name != "problem"]
        data = {name: getattr(self, name) for name in names}
        for name in ("layouts", "unsupported_layouts"):
            data[name] = [one.to_json() for one in data[name]]
        data["goodput"] = None if self.goodput is None else self.goodput.to_json()
        return data


def best_layouts(
    problem: Problem,
    *,
    objective: str = "time",
    top: int = 10,
    pins: Pins | None = None,
    everything: bool = False,
) -> TrainingPlan:
    """The best layouts of a problem.

    Args:
        objective: `time`, `tokens-per-dollar` or `memory`.
        top: how many.
        pins: axis to the only value that it may have.
        everything: rank what this hocket cannot run today together with what it can.

    Raises:
        OptionError: an unknown objective, or a batch that nothing divides.
        LayoutError: nothing fits; with what is missing and the smallest cluster that fits.
    """
    if top < 1:
        raise OptionError(f"top is {top}; it must be at least 1", hint="--top 10")
    found = search_layouts(
        problem, objective=objective, pins=pins, extra=None if everything else EXTRA
    )
    notes = []
    if found.num_fitting == 0:
        offloaded = _offloaded(problem, objective, pins)
        if offloaded is None:
            raise _impossible(problem, found, pins)
        found = offloaded
        notes += _in_host_memory(problem, found, pins)
    if found.num_gpus < problem.cluster.num_gpus:
        notes.append(
            f"No layout with a global batch of {problem.global_batch} uses all "
            f"{problem.cluster.num_gpus} GPUs; these use at most {found.num_gpus}."
        )
    found = dataclasses.replace(found, best=_placed(problem, found.best, objective, top))
    distinct = _distinct(found.best)
    runs = found.best.here & problem.trains(found.best.layouts)
    here = distinct[runs[distinct]]
    chosen = _different(found.best, distinct if everything else here, top)
    beyond: list[tuple[int, int]] = []
    if not everything:
        before = here[0] if len(here) else len(found.best)
        others = distinct[~np.isin(distinct, here)]
        others = _runnable(problem, found.best, others[others < before])
        beyond = _different(found.best, others, BEYOND if len(here) else top)
    if not len(here) and not everything:
        notes += _nothing_here(problem, pins, objective)
    notes += _borrowed(problem)
    if objective == "tokens-per-dollar" and problem.cluster.node.gpu.price is None:
        name = problem.cluster.node.gpu.name
        notes.append(f"No price was read for {name}: layouts are ranked by tokens per GPU hour.")
    return TrainingPlan(
        **_asked(problem, objective),
        layouts=tuple(_row(problem, found.best, i, num_similar=n) for i, n in chosen),
        unsupported_layouts=tuple(_row(problem, found.best, i, num_similar=n) for i, n in beyond),
        num_legal=found.num_legal,
        num_fitting=found.num_fitting,
        notes=tuple(notes),
    )


def _placed(problem: Problem, best: Scored, objective: str, top: int) -> Scored:
    """The rows ranked again, those that may be shown with their axes in the best order."""
    distinct = _distinct(best)
    runs = (best.here & problem.trains(best.layouts))[distinct]
    kinds = [_different(best, rows, max(top, PLACED)) for rows in (distinct[runs], distinct[~runs])]
    return ranked_when_placed(problem, best, [i for rows in kinds for i, _ in rows], objective)


def _row(problem: Problem, scored: Scored, index: int, num_similar: int) -> LayoutForecast:
    return _with_tools(
        problem,
        placed_forecast(problem, layout_forecast(problem, scored, index, num_similar=num_similar)),
    )


def _runnable(problem: Problem, best: Scored, rows: np.ndarray) -> np.ndarray:
    """Of some rows those that some software runs; where none runs any, all of them."""
    at = best.layouts.take(rows)
    able = np.zeros(len(rows), dtype=bool)
    for tool in TOOLS.values():
        able |= tool.limits.allowed(at, problem.facts)
    return rows[able] if able.any() else rows


def _with_tools(problem: Problem, found: LayoutForecast) -> LayoutForecast:
    """With the software that runs it, where this hocket does not."""
    if found.runs_here:
        return found
    able = [name for name, tool in TOOLS.items() if not tool_reasons(tool.limits, problem, found)]
    return dataclasses.replace(found, tools=tuple(able))


def timeline_of(problem: Problem, layout: Layout) -> Timeline | None:
    """The pipeline of a layout as it is simulated, some microbatches of it; None without one."""
    if layout.pp == 1:
        return None
    only = row(layout, problem.shape, problem.seq_len, problem.global_batch)
    return problem.timeline(layout, estimate_layouts(problem, only).times)


def plan_one(problem: Problem, layout: Layout) -> TrainingPlan:
    """One given layout, estimated, whether it fits or not.

    Raises:
        LayoutError: it does not fit the model, the batch, or the number of GPUs.
    """
    if layout.world_size > problem.cluster.num_gpus:
        raise LayoutError(
            f"the layout {layout.axes_text()} needs {layout.world_size} GPUs; "
            f"{problem.cluster.name} has {problem.cluster.num_gpus}",
            hint=f"--cluster {layout.world_size}x{problem.cluster.node.gpu.name}",
        )
    only = row(layout, problem.shape, problem.seq_len, problem.global_batch)
    problem = dataclasses.replace(problem, division=layout.pipeline_split)
    problem.cut(layout)  # refuses layers that do not add up
    scored = simulate_all(problem, estimate_layouts(problem, only))
    found = layout_forecast(problem, scored, 0)
    kept = {name: getattr(layout, name) for name in ("pipeline_split", "data_parallel", "offload")}
    whole = dataclasses.replace(found.layout, **kept)
    found = moved(problem, dataclasses.replace(found, layout=whole), layout.order)
    found = _with_tools(problem, found)
    notes = []
    notes += _borrowed(problem)
    if layout.data_parallel == "threads":
        notes.append("Threads of one process are estimated as processes, one per GPU.")
    if found.host_memory:
        notes.append(_of_hosts(problem, found.host_memory))
    if not found.fits_host:
        notes.append("It does not fit the hosts.")
    if not found.fits and found.memory > problem.cluster.node.gpu.usable:
        notes.append(
            f"It does not fit: {format_bytes(found.memory)} are expected, of "
            f"{format_bytes(problem.cluster.node.gpu.usable)} that a process can have."
        )
    elif found.tight:
        usable = format_bytes(problem.cluster.node.gpu.usable)
        notes.append(
            f"Tight: {format_bytes(found.memory)} expected and {format_bytes(found.memory_high)} "
            f"at the 95th percentile; proposals leave {HEADROOM:.0%} of {usable} free."
        )
    return TrainingPlan(
        **_asked(problem, "time"),
        layouts=(found,),
        num_legal=1,
        num_fitting=int(found.fits),
        notes=tuple(notes),
    )


def smallest_cluster(
    problem: Problem, pins: Pins | None = None, *, here: bool = False
) -> Cluster | None:
    """The fewest nodes of the same kind that some layout fits on; None if none was found.

    Where a part of one catalogued node was asked for, larger parts of it come first, then nodes.
    """

    def fits(nodes: int) -> bool:
        size = nodes * cluster.node.num_gpus
        # Nothing holds less than one sequence at a time without stages that take turns.
        asked = {"microbatch": 1, "schedule": "1f1b", **(pins or {})}
        found = problem.legal(size, pins=asked, here=here)
        return bool(problem.proposable(found).any())

    for cluster in _parts(problem.cluster):
        if fits(1):
            return cluster
    most = 1
    while not fits(most):
        most *= 2
        if most > LARGEST:
            return None
    for nodes in range(most // 2 + 1, most):
        if fits(nodes):
            most = nodes
            break
    name = f"{most}x{cluster.node.num_gpus}x{cluster.node.gpu.name}"
    name += "".join(cluster.name.rpartition("@")[1:]) if "@" in cluster.name else ""
    return dataclasses.replace(cluster, num_nodes=most, name=name)


def _parts(cluster: Cluster) -> list[Cluster]:
    """The cluster itself; where it is a part of one catalogued node, larger parts and the node."""
    node = cluster.node
    if cluster.num_nodes > 1 or node.name not in node_names():
        return [cluster]
    most = catalogued(node.name, node.gpu).num_gpus
    sizes = [n for n in divisors(most) if n > node.num_gpus]
    at = f"x{node.gpu.name}@{node.name}"
    return [cluster, *(find_cluster(f"1x{n}{at}") for n in sizes)]


def _borrowed(problem: Problem) -> list[str]:
    """What a reader should know of constants that were measured elsewhere."""
    if problem.borrowed is None:
        return []
    return [
        f"No training measurements support {problem.cluster.node.gpu.name}: it is "
        f"estimated from its "
        f"data sheet with the constants of {problem.borrowed}, which the ranges do not cover."
    ]


def _distinct(best: Scored) -> np.ndarray:
    """Rows without those that are another one with cp and dp exchanged, at the same price."""
    at = best.layouts
    kept: dict[tuple[float, ...], int] = {}
    names = [name for name in IDENTICAL if name not in ("dp", "cp")]
    for i in range(len(best)):
        split = [float(getattr(at, n)[i]) for n in (*names, "virtual", "lighter", "microbatches")]
        numbers = (float(f"{best.seconds[i]:.4g}"), float(f"{best.high[i]:.4g}"))
        kept.setdefault((*split, *numbers), i)
    return np.array(list(kept.values()), dtype=int)


def _different(best: Scored, rows: np.ndarray, top: int) -> list[tuple[int, int]]:
    """The best row of each kind with how many more there are; `top` in all, filled up with further
    ones of the same kinds where there are not as many kinds."""
    kinds: dict[tuple[float, ...], list[int]] = {}
    for i in rows.tolist():
        kinds.setdefault(tuple(float(getattr(best.layouts, n)[i]) for n in IDENTICAL), []).append(i)
    shown = [members[0] for members in kinds.values()][:top]
    rest = sorted(i for members in kinds.values() for i in members[1:])
    shown = sorted([*shown, *rest[: top - len(shown)]])
    left = {members[0]: len([i for i in members if i not in shown]) for members in kinds.values()}
    return [(i, left.get(i, 0)) for i in shown]


def _nothing_here(problem: Problem, pins: Pins | None, objective: str) -> list[str]:
    """What to do where layouts fit, but none that this hocket can run today."""
    why = problem.refused()
    if why is not None:
        return [f"Not run by this version ({why}); other software runs it:"]
    asked = pins_text(pins)
    notes = ["No layout that this version runs fits" + (f" with {asked}." if asked else ".")]
    if pins:
        try:
            free = search_layouts(problem, objective=objective, here=True)
        except OptionError:
            free = None
        if free is not None and free.num_fitting:
            layout = layout_at(free.best.layouts, 0)
            return [*notes, f"Without the pins it runs as {layout}."]
    elsewhere = smallest_cluster(problem, pins, here=True)
    if elsewhere is not None and elsewhere.num_gpus > problem.cluster.num_gpus:
        notes.append(f"It would on --cluster {elsewhere.name}.")
    shorter = _shorter(problem, pins)
    if shorter is not None:
        notes.append(f"On {problem.cluster.name} it would with --seq-len {shorter}.")
    notes.append("What fits is below; --emit prints it as flags of a tool that runs it.")
    return notes


def _shorter(problem: Problem, pins: Pins | None) -> int | None:
    """The longest half, quarter ... of the sequence that what runs here fits with."""
    length = problem.seq_len // 2
    while length >= SHORTEST:
        smaller = dataclasses.replace(problem, seq_len=length)
        asked = {"microbatch": 1, **(pins or {})}
        found = smaller.legal(problem.cluster.num_gpus, pins=asked, here=True)
        if smaller.proposable(found).any():
            return length
        length //= 2
    return None


def _fits_adapters(problem: Problem, pins: Pins | None) -> bool:
    """Whether the training of adapters of a frozen model fits, where all of it does not."""
    from hocket.cost.adapters import adapted

    if problem.shape.num_trained != problem.shape.num_parameters:
        return False
    smaller = dataclasses.replace(problem, shape=adapted(problem.shape, LORA_RANK))
    return _fits(smaller, pins)


def _offloaded(problem: Problem, objective: str, pins: Pins | None) -> SearchResult | None:
    """The best that fits with state or activations in the host's memory, as this hocket offloads
    them. None: nothing, or other software's layouts are asked for."""
    if problem.stack != OWN or "offload" in (pins or {}):
        return None
    fitting = []
    for kind in OFFLOAD[1:]:
        try:
            asked = {**(pins or {}), "offload": kind}
            found = search_layouts(problem, objective=objective, pins=asked, here=True)
        except OptionError:  # pinned to a ZeRO stage or recompute that it cannot have
            continue
        if found.num_fitting:
            fitting.append(found)
    return min(fitting, key=lambda found: float(score(found.best, objective)[0]), default=None)


def _in_host_memory(problem: Problem, found: SearchResult, pins: Pins | None) -> list[str]:
    """That nothing fits without offload, what it takes of the hosts, and what would do without."""
    at = found.best.layouts.take(np.arange(1))
    what = {
        "optimizer": "the optimizer's state",
        "params": "parameters and optimizer state",
        "activations": "what layers save for backward",
    }
    kinds = OFFLOAD[int(at.offload[0])].split("+")
    kept = " and ".join(what[kind] for kind in kinds)
    notes = [
        f"Nothing fits with everything on the GPUs; these keep {kept} in the hosts' memory.",
        _of_hosts(problem, round(float(problem.host_memory(at)[0]))),
    ]
    if problem.limits:  # of other software, whose flags have neither
        return notes
    replace = dataclasses.replace
    ways = {"--optimizer adamw_8bit": replace(problem, optimizer="adamw_8bit")}
    if problem.precision == "bf16":
        ways = {"--grad-dtype bf16": replace(problem, grad_dtype="bf16"), **ways}
    enough = [flag for flag, narrower in ways.items() if _fits(narrower, pins)]
    if enough:
        notes.append(f"With {' or '.join(enough)} everything fits on the GPUs.")
    return notes


def _of_hosts(problem: Problem, held: int) -> str:
    """What that which is offloaded takes of a node's memory, and what its time is estimated by."""
    node = problem.cluster.node
    has = f" of {format_bytes(node.host_memory)}" if node.host_memory else ""
    rate = "" if node.host_bandwidth else ", the host's memory taken as two channels for each GPU"
    return (
        f"The hosts' memory: {format_bytes(held)}{has} a node. The time that offload takes is "
        f"estimated from data sheets{rate}; no GPU node was measured."
    )


def _fits(problem: Problem, pins: Pins | None) -> bool:
    """Whether a layout of all GPUs that this hocket runs fits."""
    found = problem.legal(problem.cluster.num_gpus, pins=pins or {}, here=True)
    return bool(problem.proposable(found).any())


def _impossible(problem: Problem, found: SearchResult, pins: Pins | None) -> LayoutError:
    assert found.least is not None
    layout, high = found.least
    only = row(layout, problem.shape, problem.seq_len, problem.global_batch)
    held = layout_forecast(problem, estimate_layouts(problem, only), 0).memory_by_kind
    kinds = ", ".join(f"{name} {format_bytes(size)}" for name, size in held.items())
    asked = f", {pins_text(pins)}" if pins else ""
    message = (
        f"{problem.shape.name} does not fit {problem.cluster.name} in any of {found.num_legal:,} "
        f"layouts (sequences of {problem.seq_len}, global batch {problem.global_batch}{asked}): "
        f"the smallest peak memory per GPU is {format_bytes(high)} at the 95th percentile, of "
        f"{format_bytes(problem.usable)} that it may ({HEADROOM:.0%} stay free); "
        f"{format_bytes(high - problem.usable)} are missing. That is {layout}: {kinds}."
    )
    smallest = smallest_cluster(problem, pins)
    if smallest is None:
        return LayoutError(message, hint="a GPU with more memory, or a shorter --seq-len")
    runnable = smallest_cluster(problem, pins, here=True)
    text = f"--cluster {smallest.name} is the smallest that fits"
    if runnable is not None and runnable != smallest:
        text += f"; {runnable.name} with what this version runs"
    if problem.stack == OWN and "offload" not in (pins or {}):
        there = smallest_cluster(problem, {**(pins or {}), "offload": "optimizer"}, here=True)
        if there is not None and there.num_gpus < smallest.num_gpus:
            text += f"; {there.name} with the optimizer's state in the hosts' memory"
    if _fits_adapters(problem, pins):
        text += f"; {problem.cluster.name} holds LoRA adapters: --lora-rank {LORA_RANK}"
    return LayoutError(message, hint=text)


def _asked(problem: Problem, objective: str) -> dict[str, Any]:
    return {
        "model": problem.shape.name,
        "cluster": problem.cluster.name,
        "objective": objective,
        "seq_len": problem.seq_len,
        "global_batch": problem.global_batch,
        "precision": problem.precision,
        "problem": problem,
        "grad_dtype": problem.grad_dtype or default_grad_dtype(problem.precision),
    }
