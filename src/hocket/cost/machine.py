"""Machine: what pricing needs of a cluster, as numbers.

Bytes and seconds; bandwidths per direction. Measured collectives come as curves, given from
outside: this package knows numbers, not catalogues.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Protocol

import numpy as np

from hocket.cost.terms import Floats
from hocket.spec.cluster import Cluster
from hocket.spec.errors import OptionError, unknown

HOST_OF_A_GPU = 51.2e9
"""Bytes/s of host memory for each GPU where a node's is not known: two channels of DDR4-3200, what
the catalogue's nodes of A100 have."""


class MeasuredCurve(Protocol):
    """One collective on one group: sizes in bytes, ascending, and seconds."""

    @property
    def operation(self) -> str: ...
    @property
    def num_gpus(self) -> int: ...
    @property
    def num_nodes(self) -> int: ...
    @property
    def sizes(self) -> tuple[int, ...]: ...
    @property
    def seconds(self) -> tuple[float, ...]: ...


@dataclasses.dataclass(frozen=True)
class CurveSet:
    """Measured collectives inside one node: (operation, ranks) to logarithms of both."""

    points: dict[tuple[str, int], tuple[Floats, Floats]] = dataclasses.field(default_factory=dict)

    def ranks(self, operation: str) -> list[int]:
        """Group sizes that were measured, ascending."""
        return sorted(n for name, n in self.points if name == operation)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClusterNumbers:
    """A cluster in numbers, [r] each (one, or one for each row of a table).

    Attributes:
        flops: dense rate in the precision that is trained in, operations/s.
        bandwidth: of device memory. link: per GPU to all peers of its domain together.
        domain: GPUs that reach each other without the network; per_node: GPUs of one node.
        network: of all network cards of a node together.
        bridge: GPUs that the link joins: 2 for bridged pairs, else the domain; beyond: per GPU
            between such groups of one domain (PCIe).
        memory: bytes that a process can have. gpus: of the whole cluster.
        pcie: between a GPU and its host, per direction. host: of the host's memory.
        which: the curve set of each row.
    """

    flops: Floats
    sms: Floats
    bandwidth: Floats
    link: Floats
    domain: Floats
    per_node: Floats
    network: Floats
    bridge: Floats
    beyond: Floats
    memory: Floats
    gpus: Floats
    pcie: Floats
    host: Floats
    which: Floats
    curves: tuple[CurveSet, ...]


def machine(
    cluster: Cluster, precision: str = "bf16", curves: Iterable[MeasuredCurve] = ()
) -> ClusterNumbers:
    """The numbers of one cluster. Raises OptionError where the GPU lacks the precision."""
    node = cluster.node
    if precision not in node.gpu.flops:
        message, hint = unknown("precision", precision, node.gpu.flops)
        raise OptionError(f"{node.gpu.name}: {message}", hint=hint)
    points = {
        (c.operation, c.num_gpus): (
            np.log(np.array(c.sizes, dtype=np.float64)),
            np.log(np.array(c.seconds, dtype=np.float64)),
        )
        for c in curves
        if c.num_nodes == 1
    }

    link = node.pcie if node.link.kind == "none" else node.link.bandwidth

    def one(value: float) -> Floats:
        return np.array([float(value)])

    return ClusterNumbers(
        flops=one(node.gpu.flops[precision]),
        sms=one(node.gpu.sms or 100),
        bandwidth=one(node.gpu.bandwidth),
        link=one(link),
        domain=one(cluster.domain),
        per_node=one(min(node.num_gpus, cluster.num_gpus)),
        network=one(node.network or 1.0),  # a machine without a card: nothing crosses it
        bridge=one(2 if node.link.kind == "nvlink-pairs" else cluster.domain),
        beyond=one(node.pcie if node.link.kind == "nvlink-pairs" else link),
        memory=one(node.gpu.usable),
        gpus=one(cluster.num_gpus),
        pcie=one(node.pcie),
        host=one(node.host_bandwidth or node.num_gpus * HOST_OF_A_GPU),
        which=one(0),
        curves=(CurveSet(points),),
    )


def stack_machines(machines: list[ClusterNumbers]) -> ClusterNumbers:
    """One row for each machine; curve sets that are the same object are kept once."""
    sets: list[CurveSet] = []
    which = []
    for m in machines:
        found = next((i for i, s in enumerate(sets) if s is m.curves[0]), None)
        if found is None:
            sets.append(m.curves[0])
            found = len(sets) - 1
        which.append(float(found))
    names = [
        f.name for f in dataclasses.fields(ClusterNumbers) if f.name not in ("which", "curves")
    ]
    values = {name: np.concatenate([getattr(m, name) for m in machines]) for name in names}
    return ClusterNumbers(**values, which=np.array(which), curves=tuple(sets))
