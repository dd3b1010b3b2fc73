"""Mesh: the ranks of a layout as axes, each with its process group.

    axis       ranks that differ in      used for
    tp         tp                        tensor parallelism
    dp         dp                        gradients of replicas
    pp         pp                        activations between stages
    cp         cp                        context parallelism
    model      tp, cp and pp             one replica: the gradient's norm
    world      all                       the loss, barriers
    pp_back    pp                        messages to earlier stages
    embedding  first and last stage      gradients of tied embeddings (after `prepare`)
    tp_copies  n neighbours along tp     key/value heads held n times (after `prepare`)

Only axes with several ranks own a group, and axes over the same ranks share one: groups cost
threads and start-up time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import torch
import torch.distributed as dist

from hocket.runtime.record import Recorder
from hocket.spec.errors import LayoutError
from hocket.spec.layout import AXES, Layout

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


class Mesh:
    """One rank's view of a layout.

    Create it on every rank after `dist.init_process_group`; groups are made in the same order
    everywhere.

    Raises:
        LayoutError: the world does not have the layout's number of ranks.
    """

    def __init__(
        self,
        layout: Layout,
        rank: int = 0,
        device: torch.device | str = "cpu",
        recorder: Recorder | None = None,
    ) -> None:
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        if layout.world_size != world_size:
            raise LayoutError(
                f"layout {layout.axes_text()} needs {layout.world_size} ranks, "
                f"the world has {world_size}"
            )
        self.layout = layout
        self.rank = rank
        self.world_size = world_size
        self.device = torch.device(device)
        self.recorder = recorder or Recorder(rank, self.device)
        self.coordinate = layout.coordinate(rank)
        self._groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
        if world_size > 1:
            self._groups[tuple(range(world_size))] = dist.group.WORLD
        self._axes: dict[str, Axis] = {}
        for name in AXES:
            # The replicas of a threads layout live in one process: its dp is no axis of ranks.
            degree = 1 if layout.data_parallel == "threads" else layout.degree(name)
            self._add(name, layout.groups(name) if degree > 1 else [])
        self._add("world", [tuple(range(world_size))])
        self._add("model", self._model_groups())
        self._add("shard", layout.shard_groups())
        self._add("replicas", layout.replica_groups())
        self._axes["pp_back"] = self._back(self._axes["pp"])

    @classmethod
    def single(cls, device: torch.device | str = "cpu", recorder: Recorder | None = None) -> Mesh:
        """One rank on its own, whether or not torch.distributed runs."""
        mesh = cls.__new__(cls)
        mesh.layout, mesh.rank, mesh.world_size = Layout(), 0, 1
        mesh.device = torch.device(device)
        mesh.recorder = recorder or Recorder(0, mesh.device)
        mesh.coordinate = mesh.layout.coordinate(0)
        mesh._groups = {}
        names = (*AXES, "world", "model", "shard", "replicas", "pp_back")
        mesh._axes = {name: Axis(name) for name in names}
        return mesh

    def axis(self, name: str) -> Axis:
        """The axis `name` as seen from this rank."""
        assert name in self._axes, f"{name} is not among {sorted(self._axes)}; prepare() it first"
        return self._axes[name]

    def copies(self, count: int) -> Axis:
        """The `count` neighbours along tp that hold the same key/value heads."""
        return self.axis("tp") if count == self.axis("tp").size else self.axis(f"tp_copies{count}")

    def prepare(self, copies: Iterable[int] = (), tie: bool | tuple[int, int] = False) -> None:
        """Create the axes that only some models need. Call on every rank with equal arguments.

        Args:
            copies: how often key/value heads are held, each dividing tp.
            tie: whether first and last stage share parameters; a pair names the pp indices that
                hold them, True is the first and the last index.
        """
        tp = self.layout.tp
        for count in sorted(set(copies) - {1, tp}):
            assert tp % count == 0, (count, tp)
            rows = self.layout.groups("tp")
            self._add(
                f"tp_copies{count}",
                [row[i : i + count] for row in rows for i in range(0, tp, count)],
            )
        if tie is not False:
            first, last = (0, self.layout.pp - 1) if tie is True else tie
            rows = self.layout.groups("pp") if first != last else []
            self._add("embedding", [tuple(sorted((row[first], row[last]))) for row in rows])
            if rows and self.layout.pp > 2 and not _met_by_all():
                _UNEVEN.append(dist.group.WORLD)

    def _back(self, pp: Axis) -> Axis:
        """The pipeline's ranks once more. NCCL runs the messages of a pair in one queue, where a
        send would wait behind a receive of the other direction: there it has its own group."""
        if pp.group is None or dist.get_backend() != "nccl":
            return pp
        for row in self.layout.groups("pp"):
            group = dist.new_group(list(row))
            if self.rank in row:
                pp = dataclasses.replace(pp, group=group)
        return pp

    def _model_groups(self) -> list[tuple[int, ...]]:
        if self.layout.data_parallel == "threads":
            return [(0,)]
        ranks: dict[int, list[int]] = {}
        for rank in range(self.world_size):
            ranks.setdefault(self.layout.coordinate(rank)["dp"], []).append(rank)
        return [tuple(row) for row in ranks.values()]

    def _add(self, name: str, rows: list[tuple[int, ...]]) -> None:
        if name in self._axes:
            return
        self._axes[name] = Axis(name, ranks=(self.rank,))
        for row in rows:
            group = self._group(row)
            if self.rank in row:
                self._axes[name] = Axis(name, len(row), row.index(self.rank), row, group)

    def _group(self, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        if len(ranks) < 2:
            return None
        if ranks not in self._groups:
            # NCCL may split a communicator, in which every rank must take part. Elsewhere only
            # the members meet, which is quicker than a meeting of all for every group. torch
            # then names a group by how many a rank has made before, which must be as many on
            # each: every axis deals all ranks out, but the stages between the first and the last
            # have no part in `embedding`. What another mesh makes after it, all ranks make.
            local = not _met_by_all()
            if local and self.rank not in ranks:
                return None
            self._groups[ranks] = dist.new_group(list(ranks), use_local_synchronization=local)
        return self._groups[ranks]


def _met_by_all() -> bool:
    """Whether every rank of the world has to take part when a group of some is made."""
    return dist.get_backend() == "nccl" or any(world is dist.group.WORLD for world in _UNEVEN)
