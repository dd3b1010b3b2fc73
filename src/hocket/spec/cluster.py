"""Cluster: the devices and the links between them.

All bandwidths are bytes per second per direction. (NVLink is marketed as the sum of both
directions, PCIe per direction.) Memory is in bytes, prices in US dollars per GPU and hour.

    Cluster = num_nodes x Node ; Node = num_gpus x Gpu + links inside + network cards
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpu:
    """One kind of device.

    Attributes:
        flops: dense rate by precision (`bf16`, `fp16`, `fp8`, `fp4`, `fp32`), operations/s.
        memory: bytes on the card; `usable`: what a process can really have.
        bandwidth: of its memory, bytes/s.
        sms: streaming multiprocessors (waves of tiles); 0 if unknown.
    """

    name: str
    flops: dict[str, float]
    memory: int
    usable: int
    bandwidth: float
    sms: int = 0
    l2: int = 0
    nvlink: int = 0
    price: float | None = None
    price_source: str = ""
    source: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Link:
    """How the GPUs of a node reach each other.

    Attributes:
        kind: `nvswitch`, `nvlink-mesh` (hybrid cube), `nvlink-pairs` (bridges), `full-mesh`,
            `pcie-switch`, `pcie` (through the host), `none`.
        bandwidth: per GPU and direction, to all peers together.
        domain: GPUs that reach each other over it.
    """

    kind: str
    bandwidth: float
    domain: int
    generation: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Node:
    """One machine: its GPUs, the links inside, PCIe beneath, and its network cards."""

    gpu: Gpu
    num_gpus: int
    link: Link
    pcie: float
    network: float
    nics: int
    host_memory: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """Equal nodes on one network. `name` is what a user typed: `2x8xH100-SXM`."""

    name: str
    num_nodes: int
    node: Node
    measured: str | None = None

    @property
    def num_gpus(self) -> int:
        return self.num_nodes * self.node.num_gpus
