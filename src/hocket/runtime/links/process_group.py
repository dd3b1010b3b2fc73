"""LinkedProcessGroup: a process group whose collectives take as long as given links would.

It wraps another group, which moves the data and computes the results; nothing but time is added.
A collective ends when the wrapped one has, and not before its bytes have run over the links since
its last rank came; a message not before its bytes have run since it was sent. Asynchronous calls
return at once and wait in `wait`, so what is computed meanwhile hides them, as on the links
themselves.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import Tensor

from hocket.runtime.host_group import HostProcessGroup, HostWork
from hocket.runtime.links.wire import Wire
from hocket.spec.links import ELEMENT


def gpu_bytes(tensors: Any) -> int:
    """Bytes that tensors (nested in sequences) would have on the GPU that is emulated."""
    if isinstance(tensors, Tensor):
        each = ELEMENT if tensors.is_floating_point() else tensors.element_size()
        return tensors.numel() * each
    return sum(gpu_bytes(tensor) for tensor in tensors)


class LinkedWork(HostWork):
    """Something under way: the wrapped work, and its flow on the links."""

    def __init__(self, work: Any, wire: Wire, slot: int, sequence: int) -> None:
        super().__init__()
        self._work, self._wire, self._slot, self._sequence = work, wire, slot, sequence

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        if timeout is None or timeout.total_seconds() <= 0:
            self._work.wait()
        else:
            self._work.wait(timeout)
        self._wire.wait(self._slot, self._sequence)
        return True

    def is_completed(self) -> bool:
        if not self._work.is_completed():
            return False
        return self._wire.through(self._slot, self._sequence)

    def result(self) -> Any:
        return self._work.result()

    def get_future(self) -> Any:
        self.wait()
        return self._work.get_future()


class LinkedProcessGroup(HostProcessGroup):
    """One rank's end of a group on links.

    Args:
        inner: the group that does the work.
        wire: the links of the job.
        number: of this group on the wire.
        ranks: the group's ranks in the world.
        active: asked before each operation whether the links are emulated; every rank of the
            group must answer the same.
    """

    backend_name = "links"

    def __init__(
        self,
        inner: Any,
        wire: Wire,
        number: int,
        ranks: Iterable[int],
        active: Callable[[], bool],
    ) -> None:
        self._ranks = tuple(ranks)
        index = self._ranks.index(wire.rank)
        super().__init__(index, len(self._ranks))
        self._inner, self._wire, self._number, self._active = inner, wire, number, active
        self._index = index
        self._sequence = 0
        self._sent: dict[int, int] = {}
        self._received: dict[int, int] = {}

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        if hasattr(self._inner, "set_timeout"):
            self._inner.set_timeout(timeout)

    def shutdown(self) -> None:
        self._inner.shutdown()

    abort = shutdown

    # -- collectives

    def _on_links(self, operation: str, tensors: Any, run: Callable[[], Any], root: int) -> Any:
        """Begin a collective; `root`: the group's index of the rank whose coming starts it, or
        -1 for all."""
        if not self._active():
            return run()
        self._sequence += 1
        slot = self._wire.collective(self._number, self._sequence)
        nbytes = gpu_bytes(tensors)
        links, world = self._wire.links, self._wire.world_size
        traffic = links.traffic(operation, nbytes, self._ranks, world)
        if root < 0:
            self._wire.arrive(slot, self._sequence, traffic, len(self._ranks))
        elif root == self._index:
            self._wire.arrive(slot, self._sequence, traffic)
        return LinkedWork(run(), self._wire, slot, self._sequence)

    def _call(self, name: str, older: str, *args: Any) -> Any:
        """A method of the wrapped group under the name that torch 2.13 or its forerunners use."""
        method = getattr(self._inner, name, None) or getattr(self._inner, older)
        return method(*(arg for arg in args if arg is not None))

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        run = partial(self._call, "allreduce", "", tensors, opts)
        return self._on_links("all-reduce", tensors, run, -1)

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: Any, opts: Any) -> Any:
        run = partial(self._inner.broadcast, tensors, opts)
        return self._on_links("broadcast", tensors, run, opts.rootRank)

    def reduce(self, tensors: Any, opts: Any) -> Any:
        run = partial(self._inner.reduce, tensors, opts)
        return self._on_links("reduce", tensors, run, -1)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        run = partial(self._call, "allgather", "", outputs, inputs, opts)
        return self._on_links("all-gather", outputs, run, -1)

    def all_gather_single(self, output: Tensor, piece: Tensor, opts: Any = None) -> Any:
        run = partial(self._call, "all_gather_single", "_allgather_base", output, piece, opts)
        return self._on_links("all-gather", output, run, -1)

    _allgather_base = all_gather_single

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        run = partial(self._inner.gather, outputs, inputs, opts)
        whole = [inputs[0]] * len(self._ranks)
        return self._on_links("gather", whole, run, -1)

    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        run = partial(self._inner.scatter, outputs, inputs, opts)
        whole = [outputs[0]] * len(self._ranks)
        return self._on_links("scatter", whole, run, opts.rootRank)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        run = partial(self._inner.reduce_scatter, outputs, inputs, opts)
        return self._on_links("reduce-scatter", inputs, run, -1)

    def reduce_scatter_single(self, output: Tensor, whole: Tensor, opts: Any) -> Any:
        run = partial(
            self._call, "reduce_scatter_single", "_reduce_scatter_base", output, whole, opts
        )
        return self._on_links("reduce-scatter", whole, run, -1)

    _reduce_scatter_base = reduce_scatter_single

    def all_to_all_single(
        self,
        output: Tensor,
        whole: Tensor,
        out_sizes: Any = (),
        in_sizes: Any = (),
        opts: Any = None,
    ) -> Any:
        run = partial(
            self._call,
            "all_to_all_single",
            "alltoall_base",
            output,
            whole,
            out_sizes,
            in_sizes,
            opts,
        )
        return self._on_links("all-to-all", whole, run, -1)

    alltoall_base = all_to_all_single

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        run = partial(self._call, "alltoall", "", outputs, inputs, opts)
        return self._on_links("all-to-all", inputs, run, -1)

    def barrier(self, opts: Any = None) -> Any:
        return self._on_links("barrier", (), partial(self._call, "barrier", "", opts), -1)

    # -- messages

    def send(self, tensors: Any, target: int, tag: int) -> Any:
        if not self._active():
            return self._inner.send(tensors, target, tag)
        pair = self._wire.rank, self._ranks[target]
        number = self._sent[target] = self._sent.get(target, 0) + 1
        slot = self._wire.message(*pair, number)
        links, world = self._wire.links, self._wire.world_size
        traffic = links.traffic("send", gpu_bytes(tensors), pair, world)
        self._wire.arrive(slot, number, traffic)
        return LinkedWork(self._inner.send(tensors, target, tag), self._wire, slot, number)

    def recv(self, tensors: Any, source: int, tag: int) -> Any:
        work = self._inner.recv(tensors, source, tag)
        if not self._active():
            return work
        number = self._received[source] = self._received.get(source, 0) + 1
        slot = self._wire.message(self._ranks[source], self._wire.rank, number)
        return LinkedWork(work, self._wire, slot, number)

    def recv_anysource(self, tensors: Any, tag: int) -> Any:
        # Whose message it will be is not known when it is posted: it costs what the wrapped
        # group's costs.
        return self._inner.recv_anysource(tensors, tag)
