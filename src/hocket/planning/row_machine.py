"""The machine of a published run, from the words that its row has for GPU and network."""

from __future__ import annotations

import dataclasses
import functools
import re

from hocket.catalogue import hardware
from hocket.catalogue.curves import curves_of
from hocket.cost.machine import ClusterNumbers, CurveSet, machine
from hocket.spec.cluster import Cluster
from hocket.spec.errors import OptionError

HOST_COPIES = 0.5
"""Of a card's rate, where it cannot read the GPU's memory: every message crosses host memory."""


@functools.cache
def _hardware(gpu: str, network: float | None, gpus: int, per_node: int) -> Cluster:
    name = re.sub(r"\(.*?\)|\bNVL\d+\b", "", gpu).strip()
    name = re.sub(r"\bA800\b", "A100", name)
    if re.fullmatch(r"(A100|H100)-(40|80)", name):
        name = f"{name}-SXM"
    name = name.replace(" ", "-")
    try:
        device = hardware.gpu(name)
    except OptionError:  # other memory sizes are printed: usable ones
        device = hardware.gpu(re.sub(r"-\d+\b", "", name))
    nodes = [hardware.node(kind, device) for kind in _kinds_of(device.name)]
    fitting = [n for n in nodes if n.num_gpus >= per_node] or nodes
    node = dataclasses.replace(fitting[0], num_gpus=per_node)
    if network is not None:
        node = dataclasses.replace(node, network=network)
    count = max(1, -(-gpus // per_node))
    return Cluster(name=f"{count}x{per_node}x{device.name}", num_nodes=count, node=node)


def _kinds_of(device: str) -> list[str]:
    found = []
    for kind in hardware.node_names():
        try:
            hardware.node(kind, hardware.gpu(device))
        except OptionError:
            continue
        found.append(kind)
    return found


def row_cluster(gpu: str, network: str, *, gpus: int, per_node: int) -> Cluster:
    """The cluster of a row, of so many GPUs.

    Args:
        gpu, network: as the row names them: `A100-80 SXM`, `4x Omni-Path 100Gb/s per node`.

    Raises:
        OptionError: an unknown GPU.
    """
    return _hardware(gpu, _network(network, per_node), gpus, per_node)


def _network(text: str, gpus: int) -> float | None:
    """Bytes/s of a node of so many GPUs from `4x Omni-Path 100Gb/s per node`, `InfiniBand
    8x400Gb/s` or `400 Gb/s per GPU`; None where no rate is said, or not of how many cards."""
    rate = re.search(r"(\d+)\s*Gb/s", text)
    if rate is None:
        return None
    stated = re.search(r"\b(\d+)x", text)
    cards = float(stated[1]) if stated else 1.0
    if re.search(r"per (gpu|accelerator)", text, re.I):
        cards = float(gpus)
    elif not stated and not re.search(r"(per|a) node", text, re.I):
        return None  # a card's: nodes have as many as they are sold with
    through_host = HOST_COPIES if re.search(r"omni.?path", text, re.I) else 1.0
    return float(rate[1]) * cards * through_host * 1e9 / 8


@functools.cache
def _curves(gpu: str, kind: str, precision: str) -> CurveSet:
    node = hardware.node(kind, hardware.gpu(gpu))
    cluster = Cluster(name=gpu, num_nodes=1, node=node)
    return machine(cluster, precision, curves_of(node)).curves[0]


def row_machine_numbers(cluster: Cluster, precision: str) -> ClusterNumbers:
    """Numbers of a row's cluster, with the collectives that were measured on its GPUs."""
    numbers, node = machine(cluster, precision), cluster.node
    return dataclasses.replace(numbers, curves=(_curves(node.gpu.name, node.name, precision),))
