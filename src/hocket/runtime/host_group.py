"""What torch asks of any work and of any process group that is written in Python, on the CPU."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

# torch's own declarations of these two do not fit what it calls on a group written in Python.
_Work: Any = dist._Work  # type: ignore[attr-defined]
_ProcessGroup: Any = dist.ProcessGroup


class HostWork(_Work):
    """Something under way, which `wait` of the subclass completes."""

    def synchronize(self) -> None:
        self.wait()

    def is_success(self) -> bool:
        return bool(self.is_completed())

    def exception(self) -> None:
        return None


class HostProcessGroup(_ProcessGroup):
    """A group with a name and a description that torch sets.

    Attributes:
        backend_name: of the backend, which subclasses give.
    """

    backend_name: str

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._name, self._desc = "", ""

    def getBackendName(self) -> str:
        return self.backend_name

    name = getBackendName

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    _set_group_name = setGroupName
    group_name = property(getGroupName)

    def getGroupDesc(self) -> str:
        return self._desc

    def setGroupDesc(self, desc: str) -> None:
        self._desc = desc

    _set_group_desc = setGroupDesc
    group_desc = property(getGroupDesc)

    @property
    def _device_types(self) -> list[torch.device]:
        """None while torch makes the group: a flight recorder that it attached to one with devices
        (from 2.15 on) would ask for a backend in C++, which a group in Python has not."""
        made = self in dist.distributed_c10d._world.pg_map
        return [torch.device("cpu")] if made else []
