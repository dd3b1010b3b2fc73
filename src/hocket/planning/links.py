"""Links of a layout on a cluster: what each axis moves, over which link, and what others cost.

Bytes are counted as the runtime's collectives are (`cost.communication`); seconds are those of
rings that have their links for themselves, at the share of the rate that rings reach
(`spec.link_kinds`), and on a probed machine those of the curves that the probe took. Overlap is not
taken off: this is the cost, not what a step waits.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from hocket.cost.measured_links import CROSSED, MeasuredLinks
from hocket.cost.step_problem import StepProblem
from hocket.planning.problem import Problem
from hocket.schedules.registry import stage_ranks
from hocket.spec.cluster import Cluster
from hocket.spec.layout import Layout
from hocket.spec.link_kinds import KINDS, LinkKind
from hocket.spec.links import Links, ring_share
from hocket.spec.process_groups import named_groups
from hocket.spec.run import Workload
from hocket.spec.schedule import Schedule

OTHERS = (
    "nvlink2", "nvlink2-mesh", "nvlink3", "nvlink3-mesh", "nvlink4", "nvlink4-mesh", "nvlink5",
    "nvlink5-mesh", "pcie4", "pcie5", "net100g", "net200g", "net400g",
)  # fmt: skip
"""Links that every axis is estimated on."""

MESH = 8
"""GPUs of the domain that links without a switch are spread over."""

Call = tuple[str, str, int, float]
"""(axis, operation, number of messages, bytes of all of them)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AxisLinks:
    """One axis of a layout on its links.

    Attributes:
        axis: its name. ranks: of one group.
        messages, bytes: of the busiest rank and step; what is handed to collectives and sent.
        sent: bytes that this rank's links carry each way.
        link: what it crosses. rate: bytes/s of that, per GPU and direction, shared rates divided.
        seconds: of a step there.
        on: link's name to seconds there.
    """

    axis: str
    ranks: int
    messages: int
    bytes: float
    sent: float
    link: str
    rate: float
    seconds: float
    on: dict[str, float]

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return dataclasses.asdict(self)


def cluster_links(cluster: Cluster) -> Links:
    """A cluster's links, from the pair outwards; rates are those of one end, per direction."""
    node = cluster.node
    per_node = min(node.num_gpus, cluster.num_gpus)
    tiers: list[tuple[LinkKind, int | None]] = []
    pcie = dataclasses.replace(KINDS["pcie4"], title="PCIe", name="pcie", rate=node.pcie)
    domain = min(node.link.domain, cluster.num_gpus)
    if node.link.kind.startswith("pcie"):
        tiers.append((dataclasses.replace(pcie, rate=node.link.bandwidth), per_node))
    elif node.link.kind != "none" and domain > 1:
        generation = node.link.generation
        spread = node.link.kind in ("nvlink-mesh", "full-mesh")
        base = KINDS[f"nvlink{min(generation, 5) if generation > 1 else 3}"]
        name = f"NVLink {generation}" if generation else node.link.kind
        how = {"nvswitch": ", switch", "nvlink-pairs": ", bridge"}.get(node.link.kind, ", mesh")
        found = dataclasses.replace(
            base,
            name=node.link.kind,
            title=name + how if generation else name,
            rate=node.link.bandwidth,
            share=0.9 if spread else 0.8,
            spread=spread,
        )
        tiers.append((found, domain))
    if per_node > 1 and (not tiers or (tiers[-1][1] or 0) < per_node):
        tiers.append((pcie, per_node))
    if cluster.num_gpus > (tiers[-1][1] or 1 if tiers else 1):
        each = 8 * node.network / 1e9
        network = dataclasses.replace(
            KINDS["net400g"], name="network", title=f"network {each:g} Gb/s a node",
            rate=node.network, latency=5e-6,
        )  # fmt: skip
        tiers.append((network, None))
    if not tiers:
        tiers.append((dataclasses.replace(pcie, title="none"), None))
    last, _ = tiers[-1]
    return Links(tiers=(*tiers[:-1], (last, None)), gpu=node.gpu.name, scale=1.0)


def card_of(cluster: Cluster) -> float | None:
    """Bytes/s of the network cards of one GPU; None where a cluster needs no network."""
    node = cluster.node
    if cluster.num_gpus <= cluster.domain:
        return None
    return node.network / min(node.nics, node.num_gpus)


def axis_links(problem: Problem, layout: Layout) -> list[AxisLinks]:
    """Every axis of a layout that talks, the one that costs most first.

    Args:
        layout: with its microbatches; of no more ranks than the cluster has.
    """
    links, card = cluster_links(problem.cluster), card_of(problem.cluster)
    return _axes(
        layout,
        calls_of(problem, layout),
        lambda axis, calls: seconds_on(links, layout, axis, calls, card=card),
    )


def probed_axis_links(job: StepProblem, links: MeasuredLinks, rate: float) -> list[AxisLinks]:
    """The same on a probed machine: the bytes that the runtime moves, on its own links.

    Args:
        job: the step. links: of the machine. rate: bytes/s between two ranks there.
    """
    layout = job.layout

    def crossing(axis: str, calls: list[Call]) -> tuple[float, float, str]:
        ranks = len(members(layout, axis)[0])
        seconds = 0.0
        for _, name, count, nbytes in calls:
            each = round(nbytes / count)
            one = links.collective(name, axis, each, ranks)
            seconds += count * (one.give + one.wait + one.take) if one else 0.0
        return seconds, rate, CROSSED.get(links.backend, links.backend)

    return _axes(layout, _heaviest(map(_calls, job.communication())), crossing)


def members(layout: Layout, axis: str) -> list[tuple[int, ...]]:
    """The groups of ranks of an axis that messages run among."""
    rows = named_groups(layout, axis)
    if axis == "pp":
        return [pair for row in rows for pair in itertools.pairwise(row)]
    return list(rows)


def seconds_on(
    links: Links, layout: Layout, axis: str, calls: list[Call], *, card: float | None = None
) -> tuple[float, float, str]:
    """(seconds of a step, bytes/s of one end, link crossed) of an axis; the slowest group's.

    `card`: bytes/s of the network for each rank of a host, where the outermost links are one.
    Groups that leave a host at the same time have a share of its cards each, and a group has no
    more of them than its ranks there.
    """
    world, worst = layout.world_size, (0.0, 0.0, "")
    rows = members(layout, axis)
    outermost = len(links.tiers) - 1
    host = links.unit(outermost)
    load: dict[int, int] = {}
    for row in rows:
        for there in {rank // host for rank in row}:
            load[there] = load.get(there, 0) + 1
    for row in rows:
        seconds = rate = 0.0
        tier = links.tier(row)
        for _, operation, count, nbytes in calls:
            flow = links.traffic(operation, nbytes, row, world)
            rate = flow.rate
            if card is not None and tier == outermost:
                hosts = [rank // host for rank in row]
                local = min(hosts.count(there) for there in hosts)
                # Messages between stages take turns with computing; only collectives coincide.
                turns = operation in ("send", "receive")
                crowd = 1 if turns else max(load[there] for there in hosts)
                rate = min(rate / crowd, card * local * links.tiers[tier][0].share)
            seconds += count * flow.latency + flow.volume / rate
        if seconds >= worst[0]:
            worst = seconds, rate, links.tiers[tier][0].title
    return worst


def alternative(name: str, ranks: int) -> Links:
    """One kind of link for a group of `ranks`; without a switch, inside a domain of `MESH`."""
    link = KINDS[name]
    if link.spread:
        share = min(1.0, (ranks - 1) / (MESH - 1))
        link = dataclasses.replace(link, rate=link.rate * share, spread=False)
    return Links(tiers=((link, None),), scale=1.0)


def _axes(
    layout: Layout,
    by_axis: dict[str, list[Call]],
    crossing: Callable[[str, list[Call]], tuple[float, float, str]],
) -> list[AxisLinks]:
    """Each axis by its seconds. `crossing`: as `seconds_on`, of an axis and its collectives."""
    found = []
    for axis, calls in by_axis.items():
        ranks = len(members(layout, axis)[0])
        seconds, rate, link = crossing(axis, calls)
        others = ((name, alternative(name, ranks)) for name in OTHERS)
        found.append(
            AxisLinks(
                axis=axis,
                ranks=ranks,
                messages=sum(count for _, _, count, _ in calls),
                bytes=sum(nbytes for *_, nbytes in calls),
                sent=sum(ring_share(op, ranks) * nbytes for _, op, _, nbytes in calls),
                link=link,
                rate=rate,
                seconds=seconds,
                on={name: seconds_on(one, layout, axis, calls)[0] for name, one in others},
            )
        )
    return sorted(found, key=lambda each: -each.seconds)


def calls_of(problem: Problem, layout: Layout) -> dict[str, list[Call]]:
    """Axis to its collectives on the rank that has most of them; the order changes none."""
    width = problem.state_bytes
    job = StepProblem(
        shape=problem.shape,
        layout=dataclasses.replace(layout, pipeline_split=problem.cut(layout)),
        workload=Workload(seq_len=problem.seq_len, global_batch=problem.global_batch),
        # Of the schedule only the stages of each rank matter here.
        schedule=Schedule(
            name=layout.schedule,
            num_microbatches=layout.microbatches or 1,
            stage_ranks=stage_ranks(layout),
            ranks=(),
        ),
        element_bytes=width.element,
        gradient_bytes=width.gradient,
        cuda=True,
    )
    # Inside the line of context ranks: such a rank sends most.
    ranks = (layout.rank({"pp": stage, "cp": layout.cp // 2}) for stage in range(layout.pp))
    return _heaviest(map(_calls, job.communication(ranks)))


def _calls(rows: Iterable[Mapping[str, Any]]) -> list[Call]:
    return [(row["axis"], row["name"], row["count"], float(row["bytes"])) for row in rows]


def _heaviest(ranks: Iterable[Iterable[Call]]) -> dict[str, list[Call]]:
    """Axis to its collectives on the rank that hands over most bytes."""
    found: dict[str, list[Call]] = {}
    for each in ranks:
        mine: dict[str, list[Call]] = {}
        for call in each:
            if call[1] != "receive":
                mine.setdefault(call[0], []).append(call)
        for axis, calls in mine.items():
            if sum(c[3] for c in calls) > sum(c[3] for c in found.get(axis, [])):
                found[axis] = calls
    return found
