"""Sums: those of tensor ranks on one machine, by a kernel, through the memory that they share.

A decoding layer sums two small tensors over its ranks. Through the process group such a sum costs
more than 0.1 ms, nearly all of it calls of Python and waking a rank that fell asleep; the kernel
looks for the others a moment before it sleeps, and adds what they left in their slots. Larger ones,
and those of ranks that share no memory, are the group's as before.

A rank that waits looks around as the group does: it takes along what other groups left unfinished,
and raises when a rank it waits for is dead or later than the group allows.
"""

from __future__ import annotations

import ctypes
import time
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from hocket.runtime.collectives import all_reduce
from hocket.runtime.mesh import Axis
from hocket.runtime.native.kernels import CpuKernels, kernels_take
from hocket.runtime.record import Recorder
from hocket.runtime.tensor_parallel.embedding import VocabParallelEmbedding
from hocket.runtime.tensor_parallel.layers import RowParallelLinear

if TYPE_CHECKING:
    from hocket.runtime.shm import ShmProcessGroup

_LOOKS = 2000
"""At a rank that has not come, before sleeping: some 50 us, what falling asleep and being woken
costs. None where ranks outnumber cores: looking is stealing."""
_NAP = 200_000_000
_SHORT_NAP = 2_000_000
"""Nanoseconds of sleep before looking around; where another group has more to do."""
_MISSED = 0.15
"""Seconds of waiting after which it is asked whether the others live."""
_GIVEN_UP = 1

_Late = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)


class _Sums(ctypes.Structure):
    """As `Sums` in `layer.c`."""

    _fields_: ClassVar[list[tuple[str, Any]]] = [
        ("slots", ctypes.c_void_p),
        ("announced", ctypes.c_void_p),
        ("ranks", ctypes.c_int64),
        ("rank", ctypes.c_int64),
        ("room", ctypes.c_int64),
        ("looks", ctypes.c_int64),
        ("nap", ctypes.c_int64),
        ("late", _Late),
    ]


class Sums:
    """The sums of this rank over a tensor axis; all of its ranks make the same calls, in one order.

    Attributes:
        address: of what the kernel knows.
        room: entries that a sum may have.
    """

    def __init__(
        self, axis: Axis, recorder: Recorder, kernels: CpuKernels, group: ShmProcessGroup
    ) -> None:
        from hocket.runtime.shm import waiting
        from hocket.runtime.shm.segment import PART

        self.axis, self.recorder, self.kernels = axis, recorder, kernels
        self.room = PART // 4
        self._group, self._waiting = group, waiting
        segment = group.segment
        self._segment = segment
        self._announced = segment.base + segment.announced
        self._late = _Late(self._look_around)
        self._error: Exception | None = None
        self._since: float | None = None
        self._known = _Sums(
            segment.base + segment.parts,
            self._announced,
            axis.size,
            axis.index,
            self.room,
            0 if waiting.crowded() else _LOOKS,
            _NAP,
            self._late,
        )
        self.address = ctypes.addressof(self._known)

    @staticmethod
    def of(axis: Axis, recorder: Recorder, kernels: CpuKernels) -> Sums | None:
        """None where the axis's ranks share no memory, or where there is one rank."""
        if axis.group is None or axis.group.name() != "shm":
            return None
        group: Any = axis.group
        return Sums(axis, recorder, kernels, group)

    def __call__(self, x: Tensor, added: Tensor | None = None) -> Tensor:
        """`x` summed over the ranks, plus `added` of its shape. `x` may be overwritten.

        Raises:
            PeerLost: a rank died, or did not come within the group's time-out.
            Mismatch: another rank sums something of another size.
        """
        if not self.takes(x) or (added is not None and not added.is_contiguous()):
            all_reduce(x, self.axis, self.recorder)
            return x if added is None else added + x
        start = self.recorder.mark()
        self.begin(1, x.numel())
        ended = self.kernels.sum(self.address, x, added)
        self.end(ended)
        self.recorder.add(
            start, "communication", "all-reduce", f"all-reduce {self.axis.name}",
            axis=self.axis.name, bytes=4 * x.numel(),
        )  # fmt: skip
        return x

    def takes(self, x: Tensor) -> bool:
        """Whether the kernel sums tensors of this kind and size: on all ranks or on none."""
        return x.numel() <= self.room and kernels_take(x) and x.is_contiguous()

    def begin(self, count: int, entries: int) -> None:
        """Before the kernel sums so often so many entries."""
        for _ in range(count):
            self.recorder.count("all-reduce", self.axis.name, 4 * entries)
        self._known.nap = _SHORT_NAP if self._waiting.UNFINISHED else _NAP
        self._since = None

    def end(self, ended: int) -> None:
        """After it. Raises as `__call__`."""
        if not ended:
            return
        if self._error is not None:
            raise self._error
        from hocket.runtime.shm import Mismatch

        assert ended != _GIVEN_UP
        raise Mismatch(f"ranks of the group {self.axis.ranks} sum tensors of different sizes")

    def _look_around(self, index: int) -> int:
        """Called by the kernel in a sum, between two sleeps: nanoseconds of the next, or -1."""
        try:
            self._missed(index)
            others = list(self._waiting.UNFINISHED)
            for group in others:
                group.go_on()
        except Exception as error:  # cannot pass through the kernel: `end` raises it
            self._error = error
            return -1
        return _SHORT_NAP if others else _NAP

    def _missed(self, index: int) -> None:
        from hocket.runtime.shm import PeerLost, PeerTimeout

        now = time.monotonic()
        if self._since is None:
            self._since = now
        waited = now - self._since
        peers = self._segment.peers
        if waited <= _MISSED or peers is None:
            return
        who, me = self.axis.ranks[index], self.axis.ranks[self.axis.index]
        what = f"a sum of the group {self.axis.ranks}"
        if peers.dead([index]):
            pid = peers.pids[index]
            raise PeerLost(
                f"rank {who} (process {pid}) died; rank {me} was waiting for it in {what}"
            )
        if waited > self._group.timeout:
            raise PeerTimeout(
                f"rank {me} waited {waited:.1f} s in {what}; did not come: rank {who} "
                f"({peers.describe(index)})"
            )


@torch.inference_mode()
def use_sums(module: nn.Module, sums: Sums) -> int:
    """Have the layers of a module that are split over the axis sum by the kernel; how many."""
    found = 0
    for child in module.modules():
        if isinstance(child, RowParallelLinear | VocabParallelEmbedding):
            child.summed = sums
            found += 1
    return found
