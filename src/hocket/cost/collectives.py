"""Collectives: seconds of one collective of a group of ranks, on the links that it crosses.

inside a domain      measured curves by size and group (NCCL), else the faster of two protocols,
                     each latency + volume / bandwidth
over the network     every ring crosses each node's boundary, so

    T = max( volume / (network x ranks of the group in a node / ranks of the node x efficiency),
             the part inside the node )  +  hop x steps(n)

since the groups that share a node share its network cards. Volume is per rank: 2 (n-1)/n of the
message for an all-reduce, (n-1)/n for an all-gather, a reduce-scatter and an all-to-all. steps(n)
is n for a ring of up to 512 ranks, and beyond that grows with log2(n), as trees (all-reduce) and
PAT (all-gather, reduce-scatter; NCCL 2.23) do. An all-reduce takes the steps of a reduce-scatter
and of an all-gather: on four nodes of eight B200, 2 x 32 hops of 5.4 us are 0.35 ms, where
nccl-tests measured 0.36 to 0.38 ms for messages of 0.25 to 2 MB. In an all-to-all every rank sends
through its own share of the cards what other nodes shall have:

    T = max( (n - ranks inside)/n x message / (network / ranks of the node x efficiency), inside )
"""

from __future__ import annotations

import numpy as np

from hocket.cost.constants import Platform
from hocket.cost.machine import ClusterNumbers, CurveSet
from hocket.cost.terms import Floats

ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER = "all-reduce", "all-gather", "reduce-scatter"
ALL_TO_ALL = "all-to-all"

PROTOCOLS = ((8e-6, 0.42), (20e-6, 0.78))
"""Seconds of one step inside a node where none was measured, and the share of a link's nominal rate
that is reached: for small messages and for large ones. Eight GPUs, nccl-tests: A100 23 us and 0.42,
69 us and 0.72; H100 17 us and 0.44; B200 27 us and 0.40, 101 us and 0.84."""

NETWORK_LATENCY = 30e-6
"""Seconds of a collective over the network, next to its steps; of an all-reduce 1.5 times that."""

RING_RANKS = 512
"""Ranks beyond which no ring is used."""


def inside(
    operation: str,
    size: Floats,
    ranks: Floats,
    machine: ClusterNumbers,
    stride: Floats | float = 1.0,
) -> Floats:
    """Seconds of one collective of `size` bytes among `ranks` GPUs of one domain, `stride` apart.

    A group that reaches beyond a bridged pair goes over PCIe all the way, as its ring does.
    """
    joined = (ranks - 1) * stride + 1 <= machine.bridge
    link = np.where(joined, machine.link, machine.beyond)
    size, ranks, which, link, joined = np.broadcast_arrays(size, ranks, machine.which, link, joined)
    out = np.zeros(size.shape)
    for index, curves in enumerate(machine.curves):
        rows = (which == index) & (ranks > 1)
        sources = _sources(operation, curves)
        other = rows & ~joined if sources else rows
        if other.any():
            moved = _volume(operation, ranks[other]) * size[other] / link[other]
            steps = np.log2(ranks[other])
            both = [latency * steps + moved / share for latency, share in PROTOCOLS]
            out[other] = np.minimum(*both)
        rows = rows & joined
        for source, times in sources:
            below, measured = 1, curves.ranks(source)
            for n in measured:
                last = n == measured[-1]
                at = rows & (ranks > below) & ((ranks <= n) | last)
                if at.any():
                    scale = times * ((ranks[at] - 1) / ranks[at]) / ((n - 1) / n)
                    points = curves.points[source, n]
                    out[at] += _curve(*points, size[at], _latency(ranks[at])) * scale
                below = n
    return out


def _sources(operation: str, curves: CurveSet) -> tuple[tuple[str, float], ...]:
    """Measured collectives that one is made of, and how often: itself, or where it was not measured
    an all-reduce's halves, or those of an all-reduce. Empty: neither was."""
    if curves.ranks(operation):
        return ((operation, 1.0),)
    halves = (REDUCE_SCATTER, ALL_GATHER)
    if operation in halves and curves.ranks(ALL_REDUCE):
        return ((ALL_REDUCE, 0.5),)
    if operation == ALL_REDUCE and all(curves.ranks(half) for half in halves):
        return tuple((half, 1.0) for half in halves)
    return ()


def _latency(ranks: Floats) -> Floats:
    """Seconds of a small message inside a node."""
    found: Floats = PROTOCOLS[0][0] * np.log2(ranks)
    return found


def group(
    operation: str,
    size: Floats,
    degree: Floats,
    stride: Floats,
    platform: Platform,
) -> Floats:
    """Seconds of one collective among `degree` ranks that lie `stride` ranks apart."""
    machine, constants = platform.machine, platform.constants
    local = np.clip(machine.domain // stride, 1, degree)
    crosses = degree * stride > machine.domain
    within = inside(operation, size, np.where(crosses, local, degree), machine, stride)
    rate = machine.network * np.minimum(local, machine.per_node) / machine.per_node
    phases = 2.0 if operation == ALL_REDUCE else 1.0
    latency = NETWORK_LATENCY * (1 + phases) / 2 + constants.hop * phases * _steps(degree)
    volume = _volume(operation, degree) * size
    if operation == ALL_TO_ALL:
        volume = (degree - local) / degree * size
        rate = machine.network / machine.per_node
    network = np.maximum(volume / (rate * constants.network), within) + latency
    return np.where(degree > 1, np.where(crosses, network, within), 0.0)


def point_to_point(size: Floats, stride: Floats, platform: Platform) -> Floats:
    """Seconds to send `size` bytes to the rank `stride` ranks away; all ranks of a node do."""
    machine, constants = platform.machine, platform.constants
    within = inside(ALL_GATHER, 2 * size, np.full_like(size, 2.0), machine, stride)
    share = machine.network / machine.per_node * constants.network
    return np.where(stride >= machine.domain, size / share + 20e-6, within)


def _volume(operation: str, ranks: Floats) -> Floats:
    return (2.0 if operation == ALL_REDUCE else 1.0) * (ranks - 1) / ranks


def _steps(ranks: Floats) -> Floats:
    """Messages that follow each other from the first rank to the last."""
    trees = RING_RANKS * np.log2(np.maximum(ranks, 2.0)) / np.log2(RING_RANKS)
    return np.where(ranks <= RING_RANKS, ranks, trees)


def _curve(sizes: Floats, seconds: Floats, size: Floats, latency: Floats) -> Floats:
    """Between logarithms; beyond the largest measured size time grows with size, and below the
    smallest what it takes beyond `latency` shrinks with it."""
    at = np.log(np.maximum(size, 1.0))
    found = np.exp(np.interp(at, sizes, seconds) + np.maximum(at - sizes[-1], 0.0))
    floor = np.minimum(latency, found)
    smaller: Floats = floor + (found - floor) * np.exp(np.minimum(at - sizes[0], 0.0))
    return smaller
