"""Collectives inside compiled graphs, which run none of our code: noted when the graph runs.

They are torch's functional collectives (`runtime.collectives.traced_all_reduce` and the like). Each
is enqueued by the process group that it names, and counted as `runtime.collectives` counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from hocket.rehearsal.process_group import Group
from hocket.runtime.record import Recorder

_NAMES = {
    "all_reduce": "all-reduce",
    "all_gather_into_tensor": "all-gather",
    "reduce_scatter_tensor": "reduce-scatter",
}


class GraphCollectives:
    """What graphs communicate.

    Attributes:
        recorder: whose phase the collectives belong to; None: nothing is counted.
    """

    def __init__(self) -> None:
        self.recorder: Recorder | None = None
        self._under_way: dict[int, Any] = {}
        self._counted: list[tuple[str, str, str, int]] = []  # name, label, phase, bytes

    def clear(self) -> None:
        self._counted.clear()

    def ran(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        """An operation of `torch.ops._c10d_functional` returned `out`."""
        name = func._schema.name.partition("::")[2].removesuffix("_").removesuffix("_out")
        if name == "wait_tensor":
            work = self._under_way.pop(_storage(args[0]), None)
            if work is not None:
                work.wait()
            return
        registry: Any = dist.distributed_c10d
        group = registry._resolve_process_group(_group_name(args, kwargs))
        assert isinstance(group, Group), group
        collective, given = _NAMES[name], args[0]
        tensors = {"all-gather": [given, out], "reduce-scatter": [out, given]}
        self._under_way[_storage(out)] = group._note(collective, tensors.get(collective, [out]))
        if self.recorder is not None:
            most = max(out.numel(), given.numel()) * out.element_size()
            self._counted.append((collective, group._label, self.recorder.phase, most))

    def count(self, axes: Mapping[str, Sequence[str]]) -> None:
        """Add what was counted to the recorder. `axes`: of each group's label."""
        assert self.recorder is not None
        recorder = self.recorder
        before = recorder.phase
        for name, label, phase, nbytes in self._counted:
            names, recorder.phase = axes[label], phase
            recorder.count(name, "tp" if "tp" in names else names[0], nbytes)
        recorder.phase = before


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _group_name(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    if "group_name" in kwargs:
        return str(kwargs["group_name"])
    return str(next(value for value in reversed(args) if isinstance(value, str)))
