"""Measured collectives: time by message size, as the library chose its own algorithm.

    curve("all-reduce", gpu="H100-SXM-80", topology="nvswitch", num_gpus=8)(64e6)
        -> Reading(seconds=..., extrapolated=False)

Between measured sizes time is interpolated on logarithms of both. Beyond the largest it grows with
the bandwidth of the last two points, below the smallest it is the smallest one's; both are flagged.
`bytes` is the full message: the tensor of an all-reduce, the gathered output of an all-gather, the
input of a reduce-scatter, one GPU's buffer of an all-to-all.
"""

from __future__ import annotations

import bisect
import csv
import dataclasses
import functools
import math
from importlib import resources

from hocket.catalogue import hardware
from hocket.spec.cluster import Node
from hocket.spec.errors import OptionError, unknown

OPERATIONS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")


@dataclasses.dataclass(frozen=True)
class CurveReading:
    """Seconds of one collective; `extrapolated`: its size lies outside what was measured."""

    seconds: float
    extrapolated: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class CatalogueCurve:
    """One collective on one group: sizes in bytes, ascending, and seconds.

    Attributes:
        topology: kind of link inside a node (`spec.cluster.LINKS`), or `network`.
        num_gpus, num_nodes: ranks of the group and the machines they are on.
        source: where it was published.
    """

    gpu: str
    topology: str
    operation: str
    num_gpus: int
    num_nodes: int
    sizes: tuple[int, ...]
    seconds: tuple[float, ...]
    source: str

    def __call__(self, size: float) -> CurveReading:
        """The time of a message of `size` bytes."""
        sizes, seconds = self.sizes, self.seconds
        if size <= sizes[0]:
            return CurveReading(seconds[0], size < sizes[0])
        if size >= sizes[-1]:
            rate = (sizes[-1] - sizes[-2]) / max(seconds[-1] - seconds[-2], 1e-12)
            return CurveReading(seconds[-1] + (size - sizes[-1]) / rate, size > sizes[-1])
        at = bisect.bisect_right(sizes, size)
        low, high = math.log(sizes[at - 1]), math.log(sizes[at])
        share = (math.log(size) - low) / (high - low)
        low, high = math.log(seconds[at - 1]), math.log(seconds[at])
        return CurveReading(math.exp(low + share * (high - low)), False)

    def bus_bandwidth(self, size: float) -> float:
        """Bytes/s that each GPU must carry, as nccl-tests counts them: comparable between sizes."""
        share = (self.num_gpus - 1) / self.num_gpus
        factor = 2 * share if self.operation == "all-reduce" else share
        return factor * size / self(size).seconds


def curve(
    operation: str, *, gpu: str, topology: str, num_gpus: int, num_nodes: int = 1
) -> CatalogueCurve | None:
    """The measured curve of exactly this group, None where nobody published one.

    Raises:
        OptionError: an unknown operation.
    """
    if operation not in OPERATIONS:
        message, hint = unknown("collective", operation, OPERATIONS)
        raise OptionError(message, hint=hint)
    return _curves().get((gpu, topology, operation, num_gpus, num_nodes))


def curves(*, gpu: str | None = None, operation: str | None = None) -> tuple[CatalogueCurve, ...]:
    """Every measured curve, or those of one GPU or operation."""
    return tuple(
        found
        for found in _curves().values()
        if gpu in (None, found.gpu) and operation in (None, found.operation)
    )


@functools.cache
def curves_of(node: Node) -> tuple[CatalogueCurve, ...]:
    """Curves of collectives inside a node: those of its GPU on its kind of link, else of its GPU's
    family, else of the GPU on this kind of link whose rate is nearest, scaled to the node's rate.
    NVLink without a measurement, bridges and meshes, takes the curves behind a switch. What was
    measured of another GPU behind a PCIe switch is not taken to be slower than PCIe through the
    host at the same rate. Empty where this kind of link was not measured."""
    found = _nearest(node)
    if node.link.kind != "pcie-switch" or any(c.gpu == node.gpu.name for c in found):
        return found
    link = dataclasses.replace(node.link, kind="pcie")
    plain = {(c.operation, c.num_gpus): c for c in _nearest(dataclasses.replace(node, link=link))}
    return tuple(_faster(c, plain.get((c.operation, c.num_gpus))) for c in found)


def _nearest(node: Node) -> tuple[CatalogueCurve, ...]:
    """The curves of the nearest GPU on a node's kind of link, at the node's rate."""
    of_one_node = [c for c in curves() if c.num_nodes == 1]
    known = [c for c in of_one_node if c.topology == node.link.kind]
    if not known and node.link.generation:
        known = [c for c in of_one_node if c.topology == "nvswitch"]
    family = node.gpu.name.partition("-")[0]
    exact = [c for c in known if c.gpu == node.gpu.name]
    same_family = exact or [c for c in known if c.gpu.partition("-")[0] == family]
    rates = {c.gpu: _rate(hardware.cluster(f"1x{c.gpu}").node) for c in same_family or known}
    own = _rate(node)
    nearest = min(rates, key=lambda gpu: abs(math.log(rates[gpu] / own)), default="")
    used = same_family or [c for c in known if c.gpu == nearest]
    return tuple(_scaled(c, rates[c.gpu] / own) for c in used)


def _rate(node: Node) -> float:
    return node.pcie if node.link.kind == "none" else node.link.bandwidth


def _scaled(curve: CatalogueCurve, factor: float) -> CatalogueCurve:
    """What grows with the message takes `factor` times as long; the latency stays."""
    if factor == 1.0:
        return curve
    least = curve.seconds[0]
    seconds = tuple(least + (value - least) * factor for value in curve.seconds)
    return dataclasses.replace(curve, seconds=seconds)


def _faster(curve: CatalogueCurve, other: CatalogueCurve | None) -> CatalogueCurve:
    """The less of both at each size of the first."""
    if other is None:
        return curve
    pairs = zip(curve.sizes, curve.seconds, strict=True)
    least = tuple(min(seconds, other(size).seconds) for size, seconds in pairs)
    return dataclasses.replace(curve, seconds=least)


@functools.cache
def _curves() -> dict[tuple[str, str, str, int, int], CatalogueCurve]:
    data = resources.files("hocket.catalogue") / "data" / "hardware" / "collectives.csv"
    lines = (line for line in data.read_text().splitlines() if not line.startswith("#"))
    points: dict[tuple[str, str, str, int, int], list[tuple[int, float]]] = {}
    sources = {}
    for row in csv.DictReader(lines):
        key = (
            row["gpu"],
            row["topology"],
            row["operation"],
            int(row["num_gpus"]),
            int(row["num_nodes"]),
        )
        points.setdefault(key, []).append((int(row["bytes"]), float(row["microseconds"]) * 1e-6))
        sources[key] = row["source"]
    found = {}
    for key, pairs in points.items():
        if len(pairs) < 2:
            continue  # a single point says nothing about other sizes
        sizes, seconds = zip(*sorted(pairs), strict=True)
        gpu, topology, operation, num_gpus, num_nodes = key
        found[key] = CatalogueCurve(
            gpu=gpu,
            topology=topology,
            operation=operation,
            num_gpus=num_gpus,
            num_nodes=num_nodes,
            sizes=sizes,
            seconds=seconds,
            source=sources[key],
        )
    return found
