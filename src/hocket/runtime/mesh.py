"""Mesh: the ranks of a layout as axes, each with its process group.

Which axes a layout has, and what each is used for, is in `spec.process_groups`. Only axes with
several ranks own a group, and axes over the same ranks share one: a group costs threads on CPU, and
device memory and start-up time under NCCL.

Where the world's group is bound to a device, the groups of an axis are made by one split of its
communicator, in which all ranks take part. Elsewhere each group is made by itself.
"""

from __future__ import annotations

import dataclasses
import datetime
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from hocket.runtime.interpreter_exit import settle_at_exit
from hocket.runtime.record import Recorder
from hocket.spec.errors import LayoutError
from hocket.spec.layout import AXES, Layout
from hocket.spec.process_groups import (
    AxisGroups,
    axis_groups,
    copies_axis,
    data_axis,
    groups_of_rank,
    model_groups,
    node_groups,
)

_UNEVEN: list[object] = []
"""The worlds of this process in which some ranks have made more groups than others."""


@dataclasses.dataclass(eq=False)
class Axis:
    """The ranks this rank shares one axis with.

    Attributes:
        name: of the axis, as it is recorded.
        size: number of ranks.
        index: this rank's place among them.
        ranks: their global ranks, by index.
        group: their process group; None if this rank is alone.
    """

    name: str
    size: int = 1
    index: int = 0
    ranks: tuple[int, ...] = (0,)
    group: dist.ProcessGroup | None = None

    def __deepcopy__(self, memo: dict[int, object]) -> Axis:
        return self  # a copied module talks to the same ranks


GroupFactory = Callable[[Sequence[tuple[int, ...]], int, str], Any]
"""(disjoint rows of ranks, this rank, name of the axis) to the group of this rank's row."""


def require_world_size(layout: Layout) -> None:
    """Raises LayoutError where the default process group has another number of ranks."""
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    if layout.world_size == world_size:
        return
    hint = None
    if not dist.is_initialized() and os.environ.get("WORLD_SIZE") == str(layout.world_size):
        hint = "torch.distributed.init_process_group() first"
    raise LayoutError(
        f"layout {layout.axes_text()} needs {layout.world_size} ranks, the world has {world_size}",
        hint=hint,
    )


class Mesh:
    """One rank's view of a layout.

    Create it on every rank after `dist.init_process_group`; groups are made in the same order
    everywhere.

    Args:
        layout: the whole job's.
        rank: this one.
        device: of its tensors.
        recorder: of its collectives; None: a new one.
        group_factory: makes the groups of one axis, the world's among them, instead of
            torch.distributed: for a rank without a world, whose collectives move nothing.

    Raises:
        LayoutError: the world does not have the layout's number of ranks.
    """

    def __init__(
        self,
        layout: Layout,
        rank: int = 0,
        device: torch.device | str = "cpu",
        recorder: Recorder | None = None,
        group_factory: GroupFactory | None = None,
    ) -> None:
        world_size = layout.world_size
        if group_factory is None:
            require_world_size(layout)
        self.layout = layout
        self.rank = rank
        self.world_size = world_size
        self.device = torch.device(device)
        self.recorder = recorder or Recorder(rank, self.device)
        self.coordinate = layout.coordinate(rank)
        self._groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
        if world_size > 1 and group_factory is None:
            self._groups[tuple(range(world_size))] = dist.group.WORLD
        self._meets = group_factory is None
        if dist.is_initialized() and "gloo" in dist.get_backend():
            settle_at_exit()
        self._group_factory = group_factory or make_groups
        self._axes: dict[str, Axis] = {}
        self._made: list[AxisGroups] = []
        for axis in axis_groups(layout):
            self._add(axis.name, axis.rows)

    @classmethod
    def single(cls, device: torch.device | str = "cpu", recorder: Recorder | None = None) -> Mesh:
        """One rank on its own, whether or not torch.distributed runs."""
        mesh = cls.__new__(cls)
        mesh.layout, mesh.rank, mesh.world_size = Layout(), 0, 1
        mesh.device = torch.device(device)
        mesh.recorder = recorder or Recorder(0, mesh.device)
        mesh.coordinate = mesh.layout.coordinate(0)
        mesh._groups, mesh._made = {}, []
        mesh._group_factory, mesh._meets = make_groups, False
        names = (*AXES, "data", "world", "model", "shard", "replicas", "expert", "expert_data")
        mesh._axes = {name: Axis(name) for name in names}
        return mesh

    def axis(self, name: str) -> Axis:
        """The axis `name` as seen from this rank."""
        assert name in self._axes, f"{name} is not among {sorted(self._axes)}; prepare() it first"
        return self._axes[name]

    @property
    def data(self) -> Axis:
        """The ranks over which gradients of dense parameters are summed: dp, and cp."""
        return self.axis(data_axis(self.layout))

    def copies(self, count: int) -> Axis:
        """The `count` neighbours along tp that hold the same key/value heads."""
        return self.axis(copies_axis(count, self.axis("tp").size))

    def prepare_nodes(self, ranks_per_node: int) -> bool:
        """Create the axes of experts in two levels. Call on every rank with equal arguments.

        Returns:
            Whether there are any: see `spec.process_groups.node_groups`.
        """
        rows = node_groups(self.layout, ranks_per_node)
        for name, groups in rows:
            self._add(name, groups)
        return bool(rows)

    def prepare(self, copies: Iterable[int] = (), tie: bool | tuple[int, int] = False) -> None:
        """Create the axes that only some models need. Call on every rank with equal arguments.

        Args:
            copies: how often key/value heads are held, each dividing tp.
            tie: whether first and last stage share parameters; a pair names the pp indices that
                hold them, True is the first and the last index.
        """
        ends = (0, self.layout.pp - 1) if tie is True else tie or None
        for name, rows in model_groups(self.layout, copies=copies, tie=ends):
            self._add(name, rows)
            uneven = name == "embedding" and rows and self.layout.pp > 2
            if uneven and self._meets and not _met_by_all():
                _UNEVEN.append(dist.group.WORLD)

    def process_groups(self) -> dict[tuple[int, ...], list[str]]:
        """The groups that this rank is in, by their ranks, and the axes that share each.

        Under NCCL each is one communicator.
        """
        return groups_of_rank(self._made, self.rank)

    def position(self) -> dict[str, tuple[list[int], int]]:
        """By axis its ranks, and how many collectives this rank has enqueued on it since the
        recorder was cleared: equal on all of them where they stand at the same call. Messages to
        one rank are not counted. May be called from another thread."""
        counts = self.recorder.enqueued()
        return {
            axis.name: (list(axis.ranks), counts.get(axis.name, 0))
            for axis in list(self._axes.values())
            if axis.group is not None
        }

    def _add(self, name: str, rows: Sequence[tuple[int, ...]]) -> None:
        if name in self._axes:
            return
        rows = [row for row in rows if len(row) > 1]
        self._made.append(AxisGroups(name, tuple(rows)))
        new = [row for row in rows if row not in self._groups]
        if new:
            mine = self._group_factory(new, self.rank, name)
            self._groups |= {row: mine if self.rank in row else None for row in new}
        self._axes[name] = Axis(name, ranks=(self.rank,))
        for row in rows:
            if self.rank in row:
                group = self._groups[row]
                self._axes[name] = Axis(name, len(row), row.index(self.rank), row, group)


def make_groups(
    rows: Sequence[tuple[int, ...]], rank: int, name: str, backend: str | None = None
) -> dist.ProcessGroup | None:
    """The process group of this rank's row among disjoint rows of ranks; None in none of them.

    Every rank of the world calls it, with equal arguments and in one order. A world that is bound
    to a device is split: one collective call, however many rows there are.

    Args:
        rows: ascending ranks of each group.
        rank: this rank.
        name: what the groups are for, as torch's own messages show it.
        backend: as `dist.new_group` takes it; None: the world's.
    """
    assert all(list(row) == sorted(row) for row in rows), rows
    timeout = _timeout()
    if backend in (None, dist.get_backend()) and _splits():
        return dist.split_group(
            split_ranks=[list(row) for row in rows], timeout=timeout, group_desc=name
        )
    mine = None
    # NCCL may split a communicator for each, in which every rank must take part. Elsewhere only
    # the members meet, which is quicker than a meeting of all for every group. torch names a group
    # by how many a rank has made before, which must be as many on each: every axis deals all ranks
    # out, but the stages between the first and the last have no part in `embedding`. That group is
    # made by all ranks, as torch 2.14 counts; so is what follows it, as torch 2.13 counts.
    local = not _met_by_all() and sum(map(len, rows)) == dist.get_world_size()
    for row in rows:
        if rank in row or not local:
            group = dist.new_group(
                list(row),
                timeout=timeout,
                backend=backend,
                use_local_synchronization=local,
                group_desc=name,
            )
            mine = group if rank in row else mine
    return mine


def _splits() -> bool:
    """Whether the world's communicator can be split: it exists (a group that is bound to a device
    makes its own at once), and its backend knows how."""
    world = dist.group.WORLD
    device = None if world is None else world.bound_device_id
    if world is None or device is None:
        return False
    return bool(world._get_backend(device).supports_splitting)


def _timeout() -> datetime.timedelta | None:
    """The world's: torch gives a new group its own default, which may end it before."""
    world: Any = dist.group.WORLD
    try:
        found = world._get_backend(world.bound_device_id or torch.device("cpu")).options._timeout
    except (AttributeError, RuntimeError):
        return None
    return found if isinstance(found, datetime.timedelta) else None


def _met_by_all() -> bool:
    """Whether every rank of the world has to take part when a group of some is made."""
    return dist.get_backend() == "nccl" or any(world is dist.group.WORLD for world in _UNEVEN)
