"""Stream order: whether work on several CUDA streams touches memory in an order that is safe.

    stream      each has a clock; an event is a copy of it, and who waits for it knows as much
    access      an operation reads or writes a storage at a time of its stream's clock
    conflict    two accesses, one of them a write, of which neither stream knows the other's
    freed       memory goes back to the stream that it was allocated on; an access of another stream
                that this one does not know may still run when the memory is given out again

A happens-before check with vector clocks (Mattern 1989), as race detectors of threads make it. The
host is a stream too: what it writes is there for all it enqueues later, and what a device writes is
there for the host once it has waited. An asynchronous collective runs on a stream of its group,
behind the stream that called it; `wait` on its work is an event. So a pinned buffer that is filled
again too early, a collective that is never waited for, and a parameter freed under a gather are
found without a device. It sees the operations of one rank, under a FakeTensorMode or on CPU
tensors.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hocket.rehearsal.launches import where

Clock = dict[Any, int]

HOST = "host"
COMPUTE = "compute stream"

_RESIZE: Any = torch.ops.inductor.resize_storage_bytes_.default
_ALLOCATES = (
    "empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided",
)  # fmt: skip
_READS_FIRST = frozenset({"all-gather", "all-to-all", "send", "barrier"})
"""Collectives whose first tensor is their input, and the rest what they write."""
_READS_LAST = frozenset({"reduce-scatter"})


class _Stream:
    """A stream by its name, in the place of `torch.cuda.Stream`."""

    def __init__(self, order: StreamOrder, name: str) -> None:
        self.order, self.name = order, name
        self.cuda_stream = 0

    def wait_event(self, event: _Event) -> None:
        self.order._join(self.name, event.clock)

    def wait_stream(self, other: _Stream) -> None:
        self.order._join(self.name, self.order._clock(other.name))

    def record_event(self, event: Any = None) -> Any:
        event = event or _Event(self.order)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.order.on_wait("Stream.synchronize")
        self.order._join(HOST, self.order._clock(self.name))

    def query(self) -> bool:
        return False

    def __enter__(self) -> _Stream:
        self.order._entered().append(self.name)
        return self

    def __exit__(self, *error: Any) -> None:
        self.order._entered().pop()


class _Event:
    """A copy of a stream's clock, in the place of `torch.cuda.Event`."""

    def __init__(self, order: StreamOrder) -> None:
        self.order = order
        self.clock: Clock = {}

    def record(self, stream: _Stream | None = None) -> None:
        self.clock = dict(self.order._clock(stream.name if stream else self.order.current))

    def wait(self, stream: _Stream | None = None) -> None:
        self.order._join(stream.name if stream else self.order.current, self.clock)

    def synchronize(self) -> None:
        self.order.on_wait("Event.synchronize")
        self.order._join(HOST, self.clock)

    def query(self) -> bool:
        return False

    def elapsed_time(self, other: Any) -> float:
        return 0.0


class _Memory:
    """What was done to one storage since it has its memory."""

    def __init__(self, home: Any, write: tuple[Any, int, str]) -> None:
        self.home = home
        self.write = write
        self.reads: dict[Any, tuple[int, str]] = {}


class StreamOrder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active, checks the order of every operation on storages.

    Args:
        on_wait: called with the name of each call that makes the host wait for a stream.

    Attributes:
        conflicts: a line for each pair of places that touch memory in no safe order.
    """

    def __init__(self, on_wait: Callable[[str], None] = lambda name: None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.on_wait = on_wait
        self.conflicts: dict[str, int] = {}
        self._clocks: dict[Any, Clock] = {}
        self._memory: dict[int, _Memory] = {}
        self._watched: dict[int, Any] = {}
        self._local = threading.local()
        self._streams = 0

    # --- streams -------------------------------------------------------------------------------

    @property
    def current(self) -> str:
        """The stream that operations of this thread go to."""
        return str(self._entered()[-1])

    def _entered(self) -> list[str]:
        if not hasattr(self._local, "entered"):
            self._local.entered = [COMPUTE]
        return self._local.entered

    def _clock(self, stream: Any) -> Clock:
        return self._clocks.setdefault(stream, {})

    def _join(self, stream: Any, other: Clock) -> None:
        mine = self._clock(stream)
        for name, moment in other.items():
            if moment > mine.get(name, 0):
                mine[name] = moment

    def _tick(self, stream: Any) -> int:
        clock = self._clock(stream)
        clock[stream] = clock.get(stream, 0) + 1
        return clock[stream]

    def _enqueue(self, stream: Any) -> int:
        """The moment of one more operation of a stream, which knows what the host has done."""
        self._join(stream, self._clock(HOST))
        return self._tick(stream)

    @contextmanager
    def installed(self) -> Iterator[StreamOrder]:
        """Within, streams and events of `torch.cuda` are those of this check, which is active."""
        cuda: Any = torch.cuda
        compute = _Stream(self, COMPUTE)

        def stream(device: Any = None, priority: int = 0, **more: Any) -> _Stream:
            self._streams += 1
            return _Stream(self, f"stream {self._streams}")

        def current(device: Any = None) -> _Stream:
            return compute if self.current == COMPUTE else _Stream(self, self.current)

        answers: dict[str, Callable[..., Any]] = {
            "Stream": stream,
            "Event": lambda *args, **kwargs: _Event(self),
            "current_stream": current,
            "default_stream": lambda device=None: compute,
            "stream": lambda given: given,
            "synchronize": lambda device=None: compute.synchronize(),
        }
        before = {name: getattr(cuda, name) for name in answers}
        for name, answer in answers.items():
            setattr(cuda, name, answer)
        try:
            with self:
                yield self
        finally:
            for name, value in before.items():
                setattr(cuda, name, value)

    # --- collectives ---------------------------------------------------------------------------

    def collective(
        self, name: str, group: Any, tensors: Sequence[Tensor], late: bool
    ) -> Callable[[], None] | None:
        """A collective or message was enqueued.

        Args:
            name: as the recorder names it.
            group: whose stream it runs on, if `late`; else it runs on the current stream.
            tensors: as `process_group` notes them.

        Returns:
            What its work's `wait` calls; None where there is no work.
        """
        stream: Any = self.current
        if late:
            caller, stream = stream, ("collectives of group", group)
            self._join(stream, self._clock(caller))
        moment = self._enqueue(stream)
        read = {0} if name in _READS_FIRST else set()
        read |= {len(tensors) - 1} if name in _READS_LAST else set()
        for index, tensor in enumerate(tensors):
            self._touch(tensor, stream, moment, writes=index not in read, place=where())
        if not late:
            return None
        clock = dict(self._clock(stream))
        return lambda: self._join(self.current, clock)

    # --- operations ----------------------------------------------------------------------------

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func is _RESIZE:
            self._resized(args[0])
            return out
        if func.is_view or _asks(func):
            return out
        inputs = _given(func, args, kwargs)
        outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        devices = {tensor.device.type for tensor, _ in inputs}
        devices |= {tensor.device.type for tensor in outputs}
        if not devices or devices == {"meta"}:
            return out
        on_device = "cuda" in devices
        stream = self.current if on_device else HOST
        place = where()
        for tensor in outputs:
            self._known(tensor, stream if tensor.is_cuda else HOST, place)
        if func._schema.name.partition("::")[2] in _ALLOCATES:
            return out
        moment = self._enqueue(stream) if on_device else self._tick(HOST)
        written = {id(tensor) for tensor, writes in inputs if writes}
        for tensor, writes in inputs:
            self._touch(tensor, stream, moment, writes=writes, place=place)
        for tensor in outputs:
            if id(tensor) not in written:
                self._touch(tensor, stream, moment, writes=True, place=place)
        read = on_device and func._schema.name == "aten::_local_scalar_dense"
        if read or (devices >= {"cpu", "cuda"} and not _late(func, args, kwargs)):
            self._join(HOST, self._clock(stream))
        return out

    def _touch(self, tensor: Tensor, stream: Any, moment: int, *, writes: bool, place: str) -> None:
        memory = self._known(tensor, stream if tensor.is_cuda else HOST, place)
        clock = self._clock(stream)
        by, when, there = memory.write
        if clock.get(by, 0) < when:
            verb = "writes" if writes else "reads"
            self._conflict(f"{stream} {verb} at {place} what {by} may still write at {there}")
        if writes:
            for by, (when, there) in memory.reads.items():
                if clock.get(by, 0) < when:
                    self._conflict(
                        f"{stream} writes at {place} what {by} may still read at {there}"
                    )
            memory.write = (stream, moment, place)
            memory.reads = {}
        else:
            memory.reads[stream] = (moment, place)

    # --- memory --------------------------------------------------------------------------------

    def _known(self, tensor: Tensor, stream: Any, place: str) -> _Memory:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._memory:
            # Memory that is given out is that of earlier work of this stream: a write of it.
            moment = self._clock(stream).get(stream, 0)
            self._memory[key] = _Memory(stream, (stream, moment, f"{place} (allocated)"))
            self._watched[key] = weakref.finalize(storage, self._freed, key)
            self._watched[key].atexit = False
        return self._memory[key]

    def _resized(self, tensor: Tensor) -> None:
        key = tensor.untyped_storage()._cdata
        stream = self.current if tensor.is_cuda else HOST
        if tensor.untyped_storage().nbytes() == 0:
            if key in self._memory:
                self._check_free(self._memory[key], where())
            return
        self._known(tensor, stream, where())
        moment = self._clock(stream).get(stream, 0)
        self._memory[key] = _Memory(stream, (stream, moment, f"{where()} (allocated)"))

    def _freed(self, key: int) -> None:
        del self._watched[key]
        self._check_free(self._memory.pop(key), "the end of its last reference")

    def _check_free(self, memory: _Memory, place: str) -> None:
        if memory.home == HOST:
            return  # the allocator of pinned memory waits for copies under way by itself
        clock = self._clock(memory.home)
        uses = [memory.write, *((by, *read) for by, read in memory.reads.items())]
        for by, when, there in uses:
            if by != HOST and clock.get(by, 0) < when:
                self._conflict(f"freed at {place}: {by} may still use it at {there}")

    def _conflict(self, text: str) -> None:
        self.conflicts[text] = self.conflicts.get(text, 0) + 1

    def close(self) -> None:
        """Stop watching storages."""
        for each in list(self._watched.values()):
            each.detach()
        self._watched.clear()
        self._memory.clear()


def _asks(func: Any) -> bool:
    """Whether an operation asks for a size, a layout or a device, and touches no elements."""
    namespace, _, name = func._schema.name.partition("::")
    return namespace == "prim" or name.startswith(("sym_", "is_", "size", "stride", "numel", "dim"))


def _given(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[Tensor, bool]]:
    """The tensors given to an operation, and whether it writes them."""
    found = []
    for number, argument in enumerate(func._schema.arguments):
        value = args[number] if number < len(args) else kwargs.get(argument.name)
        writes = argument.alias_info is not None and argument.alias_info.is_write
        found += [(leaf, writes) for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    return found


def _late(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a copy between host and device is not waited for."""
    if func._schema.name == "aten::copy_" and len(args) > 2:
        return bool(args[2])
    return bool(kwargs.get("non_blocking", False))
