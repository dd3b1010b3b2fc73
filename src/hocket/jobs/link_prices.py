"""The job behind `hocket plan --links`: a layout's axes on a cluster's links, and on others."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Any

from hocket.spec.errors import LayoutError
from hocket.spec.layout import Layout
from hocket.spec.link_kinds import KINDS
from hocket.spec.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from hocket.jobs import machine_plan
    from hocket.planning.links import AxisLinks
    from hocket.planning.pool import Pool
    from hocket.spec.cluster import Cluster


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinkPrices:
    """What `hocket plan --links` found.

    Attributes:
        model, cluster, layout: as asked; the layout with its microbatches.
        seq_len, global_batch: of the step.
        step_seconds: of the whole step, as `hocket plan` prices it.
        axes: those that talk, the one that costs most first.
        pool: the memory of a domain of links; None where all ranks share one. link: what joins it.
        memory: bytes that are shared where there is no pool, else 0.
        bridged, unbridged: cards of the catalogue for desktops with NVLink, and without any.
    """

    model: str
    cluster: str
    layout: str
    seq_len: int
    global_batch: int
    step_seconds: float
    axes: tuple[AxisLinks, ...]
    pool: Pool | None
    link: str
    bridged: tuple[str, ...] = ()
    unbridged: tuple[str, ...] = ()
    memory: int = 0

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values; every link with its rate per direction and its marketed figure."""
        from hocket.planning.links import OTHERS

        kinds = {name: KINDS[name] for name in OTHERS}
        return {
            **dataclasses.asdict(self),
            "links": {
                name: {"rate": k.rate, "share": k.share, "marketed": k.marketed, "source": k.source}
                for name, k in kinds.items()
            },
        }


def links(
    model: str | os.PathLike[str],
    *,
    cluster: str,
    layout: str | Layout,
    seq_len: int,
    global_batch: int | None = None,
    precision: str | None = None,
) -> LinkPrices:
    """What each axis of a layout costs on the links it crosses, and would cost on others.

    Args:
        model: a name of the catalogue, a Hugging Face directory, or a run folder.
        cluster: as for `hocket plan`.
        global_batch: None: as of `hocket plan`.
        layout: `dp2.tp8`; its order of axes decides which links each axis crosses.
        precision: None: bf16, on CPU cores fp32.

    Raises:
        HocketError: an unknown name, or a layout that fits neither model, batch nor cluster.
    """
    from hocket.catalogue import hardware
    from hocket.jobs import machine, machine_plan
    from hocket.jobs.planner_problem import model_shape, planned_global_batch, training_problem
    from hocket.planning.links import axis_links, cluster_links
    from hocket.planning.plan import plan_one
    from hocket.planning.pool import pool

    where = machine.named_cluster(cluster)
    one = layout if isinstance(layout, Layout) else Layout.parse(layout)
    if one.data_parallel == "threads":
        raise LayoutError("threads of one process cross no link", hint="--layout dp2")
    global_batch = global_batch or planned_global_batch(where, seq_len, one)
    cards = [hardware.gpu(name) for name in hardware.gpu_names() if name.startswith("RTX")]
    bridged = tuple(card.name for card in cards if card.nvlink)
    unbridged = tuple(card.name for card in cards if not card.nvlink)
    if where.is_cpu:
        asked = machine_plan.problem(
            os.fspath(model), where, seq_len=seq_len, global_batch=global_batch,
            precision=precision, layout=one,
        )  # fmt: skip
        return dataclasses.replace(_on_cores(asked, where), bridged=bridged, unbridged=unbridged)
    problem = training_problem(
        model_shape(os.fspath(model)),
        where,
        seq_len=seq_len,
        global_batch=global_batch,
        precision=precision,
    )
    estimated = plan_one(problem, one).best
    one = estimated.layout
    own = cluster_links(problem.cluster)
    return LinkPrices(
        model=problem.shape.name,
        cluster=problem.cluster.name,
        layout=str(one),
        seq_len=seq_len,
        global_batch=global_batch,
        step_seconds=estimated.step_seconds.median,
        axes=tuple(axis_links(problem, one)),
        pool=pool(problem, one.microbatches or 1),
        link=own.tiers[0][0].title if problem.cluster.domain > 1 else "no links",
        bridged=bridged,
        unbridged=unbridged,
    )


def _on_cores(asked: machine_plan.MachinePlanRequest, where: Cluster) -> LinkPrices:
    """The same on CPU cores that were measured."""
    from hocket.cost.measured_links import CROSSED
    from hocket.planning.links import probed_axis_links
    from hocket.planning.machine_forecast import machine_forecast, rates_of, step_problem

    shape, one, workload = asked.shape, asked.layout, asked.spec.workload
    job = step_problem(shape, one, workload)
    forecast, _ = machine_forecast(job, asked.machine)
    _, ways = rates_of(job, asked.machine)
    return LinkPrices(
        model=shape.name,
        cluster=where.name,
        layout=str(one),
        seq_len=workload.seq_len,
        global_batch=workload.global_batch,
        step_seconds=forecast.step_seconds,
        axes=tuple(probed_axis_links(job, ways, where.node.link.bandwidth)),
        pool=None,
        link=CROSSED.get(ways.backend, ways.backend),
        memory=where.node.host_memory,
    )


def link_prices_text(found: LinkPrices) -> str:
    """All of it for a terminal."""
    from hocket.planning.links import MESH, OTHERS
    from hocket.reporting.table import table_text

    lines = [
        f"{found.model} as {found.layout} on {found.cluster}: sequences of {found.seq_len:,}, "
        f"global batch {found.global_batch:,}",
        "",
    ]
    if not found.axes:
        lines += ["A single rank does not communicate.", ""]
    else:
        rows = [
            (
                one.axis,
                one.ranks,
                one.messages,
                format_bytes(one.sent),
                one.link,
                _rate(one.rate),
                format_seconds(one.seconds),
                f"{one.seconds / found.step_seconds:.1%}",
            )
            for one in found.axes
        ]
        heads = ("axis", "ranks", "calls", "sent per step", "crosses", "each way", "costs", "step")
        lines += [table_text(heads, rows), ""]
        lines += [
            f"The predicted step takes {format_seconds(found.step_seconds)}; communication costs "
            "may be hidden behind computing.",
            "",
        ]
    axes = [one for one in found.axes if one.seconds >= 1e-4 * found.step_seconds]
    columns = ("link", "each way", "marketed as", *(f"{one.axis} on it" for one in axes))
    others: list[tuple[str, ...]] = [
        (
            KINDS[name].title,
            f"{KINDS[name].rate / 1e9:g} GB/s",
            KINDS[name].marketed,
            *(format_seconds(one.on[name]) for one in axes),
        )
        for name in OTHERS
    ]
    ratio = KINDS["nvlink3"].rate / KINDS["pcie4"].rate
    lines += [
        table_text(columns, others),
        "",
        "Rates are bytes per second per direction; seconds are at the fraction of them that rings",
        "reach (NVLink 80%, PCIe 88%, networks 73%). Without a switch a GPU's links are spread",
        f"over {MESH - 1} peers, and a group of n has n - 1 of them. NVLink is marketed as the",
        f"sum of both directions: NVLink 3 is {ratio:.1f} times PCIe 4.0 x16, not 37 "
        f"(600 compared with",
        "the 16 of a PCIe 4.0 x8 slot).",
        "",
        found.pool.words(found.link) if found.pool else _shared(found),
        f"Desktop and workstation cards with NVLink: {', '.join(found.bridged)}; "
        f"without: {', '.join(found.unbridged)}.",
    ]
    return "\n".join(lines)


def _shared(found: LinkPrices) -> str:
    return (
        f"The cores share one memory of {format_bytes(found.memory)}: splitting a model over "
        "them does not make more memory available."
    )


def _rate(rate: float) -> str:
    return f"{rate / 1e9:.3g} GB/s"
