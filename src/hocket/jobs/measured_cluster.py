"""What was measured on a machine as a Cluster of one node.

On CPU a device is a core with its share of the memory. On CUDA a GPU is the catalogue's where it is
known, so that its rates are dense peaks as elsewhere; the measurements are stored with it.
"""

from __future__ import annotations

import contextlib
import dataclasses

from hocket.spec.cluster import Cluster, Gpu, Link, Node
from hocket.spec.errors import OptionError
from hocket.spec.measured import DevicePair, MachineMeasurements, MeasuredDevice


def measured_cluster(measured: MachineMeasurements) -> Cluster:
    """The machine as a cluster.

    Raises:
        OptionError: so little was measured that nothing can be estimated.
    """
    host = measured.host
    if measured.device == "cuda" and measured.devices:
        return _cuda(measured)
    gpu = Gpu(
        name=f"{host.cpu} core",
        flops=_rates(measured),
        memory=host.memory // host.cores,
        usable=host.memory // host.cores,
        bandwidth=_memory_rate(measured),
        sms=1,
        l2=next((size for size in reversed(host.caches) if size), 0),
        source="hocket probe",
    )
    sends = [c for c in measured.curves if c.operation == "send" and c.ranks == c.world == 2]
    rate = sends[0].lines[-1].rate if sends else gpu.bandwidth / 2
    node = Node(
        gpu=gpu,
        num_gpus=host.cores,
        link=Link(kind="shared-memory", bandwidth=rate, domain=host.cores),
        pcie=0.0,
        network=host.network,
        nics=1,
        host_memory=host.memory,
        name="",
        source=f"hocket probe, {measured.date}",
    )
    return Cluster(name=host.name, num_nodes=1, node=node, measured=measured)


def _cuda(measured: MachineMeasurements) -> Cluster:
    from hocket.catalogue import hardware

    first = measured.devices[0]
    known: tuple[str, ...]
    try:
        gpu = hardware.gpu(first.name)
        known = (f"{gpu.name}: rates of its data sheet, its price",)
        gpu = dataclasses.replace(gpu, usable=min(gpu.usable, first.memory or gpu.usable))
    except OptionError:
        known = ()
        gpu = Gpu(
            name=first.name,
            flops=_rates(measured),
            memory=first.memory,
            usable=first.memory,
            bandwidth=_memory_rate(measured),
            nvlink=first.nvlink,
            source="hocket probe",
        )
    link = link_of(measured)
    if not measured.host.network:
        known += ("the network cards: unknown, their rate is 0",)
    node = Node(
        gpu=gpu,
        num_gpus=len(measured.devices),
        link=link,
        pcie=first.pcie_rate or 31.5e9,
        network=measured.host.network,
        nics=max(1, len({nic for device in measured.devices for nic in device.nics})),
        host_memory=measured.host.memory,
        source=f"hocket probe, {measured.date}",
    )
    if not first.pcie_rate:
        known += ("PCIe: 31.5 GB/s each way, 16 lanes of generation 4",)
    if len({device.name for device in measured.devices}) > 1:
        known += (f"unequal GPUs: all are taken as {first.name}",)
    pairs = tuple(_expected(pair, measured) for pair in measured.pairs)
    if pairs != measured.pairs:
        known += ("pairs in brackets: what their links carry as they are sold",)
    measured = dataclasses.replace(measured, pairs=pairs, catalogue=(*measured.catalogue, *known))
    return Cluster(name=measured.host.name, num_nodes=1, node=node, measured=measured)


_LINK_RATE = {1: 20e9, 2: 25e9, 3: 25e9, 4: 25e9, 5: 50e9, 6: 100e9}
"""Bytes/s each way of one NVLink by generation, of GPUs that the catalogue does not know."""


def _link_rate(device: MeasuredDevice) -> float:
    """Bytes/s each way of one of its links: those of gaming cards are narrower."""
    from hocket.catalogue import hardware

    with contextlib.suppress(OptionError):
        return hardware.nvlink_rate(device.name) or 0.0
    return _LINK_RATE.get(device.nvlink, 0.0)


def _expected(pair: DevicePair, measured: MachineMeasurements) -> DevicePair:
    """The pair with the rate of its links as they are sold, where none was measured."""
    if pair.measured or pair.rate:
        return pair
    one, other = measured.devices[pair.first], measured.devices[pair.second]
    rate = pair.links * _link_rate(one) or min(one.pcie_rate, other.pcie_rate)
    return dataclasses.replace(pair, rate=rate)


def link_of(measured: MachineMeasurements) -> Link:
    """The kind of link that NVML's facts amount to, with the rate of all links of a GPU."""
    devices, pairs = measured.devices, measured.pairs
    first, count = devices[0], len(devices)
    rate = min((d.links for d in devices), default=0) * _link_rate(first)
    joined = [pair for pair in pairs if pair.links]
    if joined and rate:
        if all(device.switch for device in devices):
            kind, domain = "nvswitch", count
        elif len(joined) == len(pairs):
            kind, domain = ("nvlink-pairs" if count == 2 else "nvlink-mesh"), count
        elif all(sum(d.index in (p.first, p.second) for p in joined) <= 1 for d in devices):
            kind, domain = "nvlink-pairs", 2
        else:
            kind, domain = "nvlink-mesh", count
        return Link(kind=kind, bandwidth=rate, domain=domain, generation=first.nvlink)
    if count == 1:
        return Link(kind="none", bandwidth=0.0, domain=1)
    switched = all(pair.path in ("PIX", "PXB") for pair in pairs) and bool(pairs)
    pcie = min((d.pcie_rate for d in devices if d.pcie_rate), default=31.5e9)
    return Link(kind="pcie-switch" if switched else "pcie", bandwidth=pcie, domain=count)


def _rates(measured: MachineMeasurements) -> dict[str, float]:
    """The best rate of a product by precision."""
    found: dict[str, float] = {}
    for one in measured.products:
        found[one.dtype] = max(_rounded(one.rate), found.get(one.dtype, 0.0))
    if not found:
        raise OptionError(
            "no matmul was measured, so nothing can be estimated here",
            hint="hocket probe",
        )
    return found


def _memory_rate(measured: MachineMeasurements) -> float:
    """Bytes/s of the largest stream, in no cache."""
    if not measured.streams:
        raise OptionError("no memory rate was measured", hint="hocket probe")
    return _rounded(max(measured.streams, key=lambda one: one.bytes).rate)


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
