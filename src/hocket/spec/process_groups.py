"""ProcessGroups: the groups of ranks that a layout communicates in, in the order they are made.

    axis       ranks that differ in      used for
    world      all                       the loss, barriers
    dp         dp                        gradients of replicas
    pp         pp                        activations between stages
    cp         cp                        keys and values of a split sequence
    data       dp and cp                 gradients, where sequences are split; else they go over dp
    tp         tp                        tensor parallelism
    model      tp, cp and pp             one replica: the gradient's norm; without ZeRO
    shard      dp and cp                 one copy of the ZeRO state
    replicas   dp                        equal shards of a ZeRO state (hybrid sharding)
    expert     the experts they hold     all-to-all of tokens (ep)
    expert_node, expert_rail            the same in two levels: inside a node, and across nodes
    expert_data nothing of the experts   gradients and ZeRO state of the experts' copies (ep, etp)
    tp_copiesN N neighbours along tp     key/value heads held N times
    embedding  first and last stage      gradients of tied embeddings

The runtime's mesh, the planner, the simulator and the reports read this one list. Axes over equal
ranks share a group. Each group is one NCCL communicator on each of its ranks, which holds device
memory for channels and buffers and takes part in start-up, so none is made that the layout does not
use. With ep or etp the ranks of each stage are dealt twice, once for all else and once for the
experts; dp2.tp2.ep2.etp1, where rank 0 and 1 hold all experts together and rank 2 and 3 copies:

    rank           0   1   2   3
    dp . tp       0.0 0.1 1.0 1.1
    experts        0   1   0   1      expert 0-1, 2-3; expert_data 0-2, 1-3; expert_tp of one rank
    of etp = tp    0   0   1   1      dp2.tp2.ep2: expert 0-2, 1-3; slices 0 1 0 1 over tp

The norm then goes over the world, and there is no group `model`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from hocket.spec.layout import AXES, Layout

Ranks = tuple[int, ...]

DATA_AXES = ("dp", "data", "shard", "replicas", "expert_data")
"""Axes whose collectives run alongside compute: gradients and values of data ranks."""

_COPIES = "tp_copies"


def data_axis(layout: Layout) -> str:
    """The axis that gradients of dense parameters are summed over: dp, and cp where there is one.
    Both ways each rank has tokens of its own."""
    return "data" if layout.cp > 1 else "dp"


def copies_axis(count: int, tp: int) -> str:
    """The axis over the `count` neighbours along tp that hold the same key/value heads."""
    return "tp" if count == tp else f"{_COPIES}{count}"


def num_copies(axis: str, tp: int) -> int:
    """The inverse of `copies_axis`."""
    return tp if axis == "tp" else int(axis.removeprefix(_COPIES))


def named_groups(
    layout: Layout, axis: str, *, tie: tuple[int, int] | None = None
) -> tuple[Ranks, ...]:
    """The groups of one axis by its name; none where it has no two ranks.

    Args:
        tie: the pp indices whose stages share a parameter; None: the first and the last.

    Raises:
        KeyError: no layout has an axis of that name.
    """
    tie = tie or (0, layout.pp - 1)
    copies = (num_copies(axis, layout.tp),) if axis.startswith(_COPIES) else ()
    axes = {one.name: one.rows for one in axis_groups(layout, copies=copies, tie=tie)}
    if axis == "model":  # under ZeRO no group of its own, and what a replica is all the same
        return tuple(row for row in _replicas(layout) if len(row) > 1)
    return axes[axis]


@dataclasses.dataclass(frozen=True)
class AxisGroups:
    """One axis: disjoint groups of at least two ranks each; none where nothing is split.

    Attributes:
        name: of the axis.
        rows: the ranks of each group, ascending.
    """

    name: str
    rows: tuple[Ranks, ...]


def axis_groups(
    layout: Layout, *, copies: Iterable[int] = (), tie: tuple[int, int] | None = None
) -> tuple[AxisGroups, ...]:
    """Every axis that a layout communicates along, in the order in which groups are made.

    Args:
        layout: the whole job's.
        copies: how often key/value heads are held, each a divisor of tp.
        tie: the pp indices whose stages share a parameter, if any do.
    """
    size = layout.world_size
    found = [("world", [tuple(range(size))])]
    for name in AXES:
        # The replicas of a threads layout live in one process: its dp is not an axis of ranks.
        degree = 1 if layout.data_parallel == "threads" else layout.degree(name)
        found.append((name, layout.groups(name) if degree > 1 else []))
    found.append(("data", layout.data_groups() if layout.cp > 1 else []))
    if (not layout.zero or layout.data_degree == 1) and not layout.splits_experts:
        found.append(("model", _replicas(layout)))
    found.append(("shard", layout.shard_groups()))
    found.append(("replicas", layout.replica_groups()))
    for name in ("expert", "expert_data"):
        found.append((name, layout.expert_groups(name) if layout.splits_experts else []))
    found += model_groups(layout, copies=copies, tie=tie)
    return tuple(
        AxisGroups(name, tuple(row for row in rows if len(row) > 1)) for name, rows in found
    )


def model_groups(
    layout: Layout, *, copies: Iterable[int] = (), tie: tuple[int, int] | None = None
) -> list[tuple[str, list[Ranks]]]:
    """The axes that only some models need: of copied key/value heads and of tied embeddings."""
    found = []
    for count in sorted(set(copies) - {1, layout.tp}):
        assert layout.tp % count == 0, (count, layout.tp)
        rows = layout.groups("tp")
        parts = [row[i : i + count] for row in rows for i in range(0, layout.tp, count)]
        found.append((copies_axis(count, layout.tp), parts))
    if tie is not None:
        first, last = tie
        rows = layout.groups("pp") if first != last else []
        ends = sorted(tuple(sorted((row[first], row[last]))) for row in rows)
        found.append(("embedding", ends))
    return found


def node_groups(layout: Layout, ranks_per_node: int) -> list[tuple[str, list[Ranks]]]:
    """The groups of `expert` as nodes: `expert_node`, the ranks of one node, and `expert_rail`, the
    ranks of equal place in each. Nodes hold consecutive ranks.

        dp8.ep8, nodes of 4    expert 0-7; expert_node 0-3, 4-7; expert_rail 0-4, 1-5, 2-6, 3-7

    Empty where a group lies in one node, has one rank a node, or unequal numbers of them.

    Args:
        layout: the whole job's.
        ranks_per_node: ranks of a node.
    """
    inside: list[Ranks] = []
    across: list[Ranks] = []
    for row in layout.expert_groups("expert") if layout.ep > 1 else ():
        nodes: dict[int, list[int]] = {}
        for rank in row:
            nodes.setdefault(rank // ranks_per_node, []).append(rank)
        sizes = {len(ranks) for ranks in nodes.values()}
        if len(nodes) < 2 or len(sizes) > 1 or sizes == {1}:
            return []
        inside += [tuple(ranks) for ranks in nodes.values()]
        across += list(zip(*nodes.values(), strict=True))
    return [("expert_node", inside), ("expert_rail", across)] if inside else []


def groups_of_rank(axes: Iterable[AxisGroups], rank: int) -> dict[Ranks, list[str]]:
    """The groups that one rank is in, by their ranks, and the axes that share each."""
    found: dict[Ranks, list[str]] = {}
    for axis in axes:
        for row in axis.rows:
            if rank in row:
                found.setdefault(row, []).append(axis.name)
    return found


def _replicas(layout: Layout) -> list[Ranks]:
    if layout.data_parallel == "threads":
        return []
    ranks: dict[int, list[int]] = {}
    for rank in range(layout.world_size):
        ranks.setdefault(layout.coordinate(rank)["dp"], []).append(rank)
    return [tuple(row) for row in ranks.values()]
