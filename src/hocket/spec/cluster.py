"""Cluster: the devices and the links between them.

All bandwidths are bytes per second per direction. (NVLink is marketed as the sum of both
directions, PCIe per direction.) Memory is in bytes, prices in US dollars per GPU and hour.

    Cluster = num_nodes x Node ; Node = num_gpus x Gpu + links inside + network cards
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from hocket.spec.measured import MachineMeasurements

LINKS = (
    "nvswitch",
    "nvlink-mesh",
    "nvlink-pairs",
    "full-mesh",
    "torus",
    "pcie-switch",
    "pcie",
    "shared-memory",
    "none",
)
"""Ways GPUs of one domain reach each other, from the fastest to the slowest kind; ranks on CPU
reach each other by `shared-memory`."""

PRECISIONS = ("bf16", "fp16", "fp8", "fp4", "fp32", "tf32")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpu:
    """One kind of device.

    Attributes:
        flops: dense matrix rate by precision (`PRECISIONS`), operations/s; a precision that is
            absent is not supported.
        memory: bytes on the card, as marketed; `usable`: what the driver gives to processes.
        bandwidth: of its memory, bytes/s.
        sms: streaming multiprocessors (waves of tiles); 0 if unknown.
        l2: bytes of last-level cache; 0 if unknown.
        nvlink: generation of its NVLink, 0 without.
        price: median on-demand dollars per hour, None where none was read; `price_source` says
            of how many quotes and when they were read.
        aliases: other names it goes by.
    """

    name: str
    flops: Mapping[str, float]
    memory: int
    usable: int
    bandwidth: float
    sms: int = 0
    l2: int = 0
    nvlink: int = 0
    price: float | None = None
    price_source: str = ""
    source: str = ""
    vendor: str = ""
    aliases: tuple[str, ...] = ()

    def __hash__(self) -> int:
        return hash((self.name, self.memory, self.bandwidth))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Link:
    """How the GPUs of a node reach each other.

    Attributes:
        kind: one of `LINKS`: `nvswitch` (any pair at full rate; several groups communicate at once
            keep it), `nvlink-mesh` (hybrid cube mesh, 1 or 2 links per neighbour, no switch),
            `nvlink-pairs` (bridges, PCIe beyond the pair), `full-mesh` (a link to each peer),
            `torus`, `pcie-switch`, `pcie` (through the host), `shared-memory` (CPU), `none`.
        bandwidth: bytes/s per GPU and direction, to all peers of the domain together.
        domain: GPUs that reach each other over it: 2 for bridged pairs; more than a node's GPUs
            where a switch spans machines (72 for NVL72).
        generation: of NVLink; 0 for anything else.
    """

    kind: str
    bandwidth: float
    domain: int
    generation: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Node:
    """One machine: its GPUs, the links inside, PCIe beneath, and its network cards.

    Attributes:
        pcie: bytes/s per GPU and direction.
        network: bytes/s per direction of ALL its network cards together.
        nics: how many cards those are; ranks of a node share them.
        host_memory: bytes; 0 if unknown. host_bandwidth: bytes/s of it, of all sockets together; 0
            if unknown.
        name: the entry of the catalogue it was read from, empty for one of one's own.
    """

    gpu: Gpu
    num_gpus: int
    link: Link
    pcie: float
    network: float
    nics: int
    host_memory: int = 0
    host_bandwidth: float = 0.0
    name: str = ""
    source: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """Equal nodes on one network.

    Attributes:
        name: text that reads back to an equal cluster: `2x8xH100-SXM-80`, `4x8xH100-SXM-80@aws-p5`,
            or the name given in a file of one's own.
        measured: what was measured on this very machine, if anything was.
    """

    name: str
    num_nodes: int
    node: Node
    measured: MachineMeasurements | None = None

    @property
    def num_gpus(self) -> int:
        return self.num_nodes * self.node.num_gpus

    @property
    def is_cpu(self) -> bool:
        """Whether its devices are ranks on CPU cores, of which there may be more than cores."""
        return self.node.link.kind == "shared-memory"

    def with_ranks(self, num_ranks: int) -> Cluster:
        """A CPU machine as so many devices: ranks beyond its cores share them, and its memory.

        `measured.host.cores` still says how many cores there are.
        """
        assert self.is_cpu, self.name
        assert num_ranks >= 1
        node, now = self.node, self.node.num_gpus
        if num_ranks == now:
            return self
        gpu = dataclasses.replace(
            node.gpu,
            memory=node.gpu.memory * now // num_ranks,
            usable=node.gpu.usable * now // num_ranks,
        )
        link = dataclasses.replace(node.link, domain=num_ranks)
        node = dataclasses.replace(node, gpu=gpu, num_gpus=num_ranks, link=link)
        return dataclasses.replace(self, node=node)

    def with_gpus(self, count: int) -> Cluster:
        """At most `count` of its GPUs, on as few equal nodes as hold them, each with its share of
        the network cards and of host memory; itself where it has no more. The name stays."""
        assert count >= 1
        if count >= self.num_gpus:
            return self
        node, now = self.node, self.node.num_gpus
        num_nodes = -(-count // now)
        each = count // num_nodes
        nics = max(1, node.nics * each // now)
        node = dataclasses.replace(
            node,
            num_gpus=each,
            nics=nics,
            network=node.network * nics / max(1, node.nics),
            host_memory=node.host_memory * each // now,
            host_bandwidth=node.host_bandwidth * each / now,
        )
        return dataclasses.replace(self, num_nodes=num_nodes, node=node)

    @property
    def domain(self) -> int:
        """GPUs of this cluster that reach each other without the network."""
        link = self.node.link
        return min(max(link.domain, self.node.num_gpus), self.num_gpus)
