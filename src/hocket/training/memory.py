"""Memory: counted tensor bytes of one rank, by what they are for.

    parameters   storages of the parameters          gradients    theirs, bucketed or not
    optimizer    moments and masters                 activations  the most of everything else that
                                                                  lives at once in one step

On CPU a dispatch mode sees every tensor that a step makes and counts its storage while it lives:
the process's own total would count torch's code and cannot tell threads apart. Counting slows a
step down and is done in one step only. On CUDA the allocator knows its peak.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from hocket.spec.errors import RankMemoryError
from hocket.spec.units import format_bytes

_RESIZE: Any = torch.ops.inductor.resize_storage_bytes_.default
_DEVICE: Any = torch.ops.prim.device.default


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryBytes:
    """Counted bytes of one rank, on its device; `host`: what is offloaded from a GPU. On a CPU the
    host's memory is the device's, and what is offloaded counts by what it is for."""

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    host: int = 0

    @property
    def total(self) -> int:
        """Bytes of the device at the worst moment."""
        return self.parameters + self.gradients + self.optimizer + self.activations

    def to_json(self) -> dict[str, int]:
        """The four counts and their total, and the host's if there is any."""
        counts = dataclasses.asdict(self)
        host = counts.pop("host")
        return {**counts, "total": self.total, **({"host": host} if host else {})}


def storage_bytes(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of the storages behind some tensors, each storage once."""
    found = {}
    for tensor in tensors:
        if tensor is not None:
            storage = tensor.untyped_storage()
            found[storage._cdata] = storage.nbytes()
    return sum(found.values())


def of_replicas(rows: Iterable[Mapping[str, int]], optimizer: int) -> list[MemoryBytes]:
    """The counts of replicas in threads (`ThreadedReplicas.replica_bytes`), the master first.

    A dispatch mode sees one thread only, so replicas count for themselves. The optimizer's state
    is the master's.
    """
    return [
        MemoryBytes(
            parameters=row["parameters"],
            gradients=row["gradients"],
            optimizer=optimizer if index == 0 else 0,
            activations=row["total"] - row["parameters"] - row["gradients"],
        )
        for index, row in enumerate(rows)
    ]


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active, the bytes of the storages that operations make, as long as they live.

    Attributes:
        bytes: alive now.
        peak: the most that were alive at once.
    """

    def __init__(
        self,
        known: Iterable[Tensor | None] = (),
        limit: int | None = None,
        full: Callable[[int], Exception] = MemoryError,
        live: Iterable[Tensor | None] = (),
    ) -> None:
        """Storages of the `known` tensors are not counted, those of the `live` ones from the start.
        A tensor that takes the count beyond `limit` raises `full(bytes)`."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.limit, self.full = limit, full
        self.peak = 0
        self._bytes = 0
        self._alive: dict[int, Any] = {}
        self._sizes: dict[int, int] = {}
        self._counted: dict[int, int] = {}
        # A thread of Gloo may be the last that holds a storage: what is gone is taken off the
        # count by the thread that counts.
        self._gone: deque[int] = deque()
        for tensors, counted in ((known, False), (live, True)):
            for tensor in tensors:
                if tensor is not None:
                    self._watch(tensor, counted=counted)

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            # Most calls of a step on fake tensors: answered before the modes below are asked.
            return FakeTensor.__torch_dispatch__(func, types, args)
        if getattr(func, "namespace", "") == "c10d" and _waited_for(func, args):
            return _apart(func, args, kwargs or {})
        out = func(*args, **(kwargs or {}))
        if func is _RESIZE:
            self._resized(args[0])
        elif isinstance(out, Tensor):
            self._watch(out)
        else:
            for leaf in tree_leaves(out):
                if isinstance(leaf, Tensor):
                    self._watch(leaf)
        return out

    @property
    def bytes(self) -> int:
        """Alive now."""
        self._settle()
        return self._bytes

    def _settle(self) -> None:
        while self._gone:
            key = self._gone.popleft()
            del self._alive[key], self._sizes[key]
            self._bytes -= self._counted.pop(key)

    def _watch(self, tensor: Tensor, counted: bool = True) -> None:
        self._settle()  # before a new storage is known by the address of one that is gone
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._alive:
            return
        self._alive[key] = weakref.finalize(storage, self._gone.append, key)
        self._alive[key].atexit = False
        self._sizes[key] = storage.nbytes()
        self._counted[key] = 0
        if counted:
            self._more(key, storage.nbytes())

    def _resized(self, tensor: Tensor) -> None:
        """A storage was given memory, or gave it back (parameters gathered for use)."""
        self._watch(tensor)
        storage = tensor.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes()
        more, self._sizes[key] = nbytes - self._sizes[key], nbytes
        self._more(key, more)

    def _more(self, key: int, nbytes: int) -> None:
        self._counted[key] += nbytes
        self._bytes += nbytes
        held = self.bytes  # less what is gone
        self.peak = max(self.peak, held)
        if self.limit is not None and held > self.limit:
            raise self.full(held)

    def close(self) -> None:
        """Release what is still watched."""
        self._settle()
        for watched in list(self._alive.values()):  # collecting garbage may end some meanwhile
            watched.detach()
        self._alive.clear()
        self._counted.clear()


def _waited_for(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether an operation of torch.distributed is waited for where it is called."""
    names = [each.name for each in func._schema.arguments]
    if "async_op" not in names:  # a message to one rank
        return False
    at = names.index("async_op")
    return len(args) > at and not args[at]


def _apart(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A collective over copies that are not counted, and its end.

    A thread of Gloo ends a wait before it releases what it was given, and sometimes long before:
    buffers would be counted with the next, or not, as the cores are busy.
    """
    copies: list[tuple[Tensor, Tensor]] = []

    def copied(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        copies.append((leaf, leaf.clone()))
        return copies[-1][1]

    out = func(*tree_map(copied, args), **kwargs)
    work = out[-1] if isinstance(out, tuple) else out
    torch._C._distributed_c10d.Work.unbox(work).wait()
    for tensor, copy in copies:
        tensor.copy_(copy)
    return out


class MemoryCount:
    """Counts the memory of one rank over one step.

    Args:
        parameters: this rank's parameters.
        optimizer_tensors: gives the optimizer's state, which must exist when counting begins.
        device: of the rank.
        compiled: blocks are compiled: on CPU they run uncompiled while they are counted, since
            what a compiled one makes is not seen.
        limit: bytes that the rank may hold. None: what there is.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        optimizer_tensors: Callable[[], Iterable[Tensor]],
        device: torch.device,
        *,
        compiled: bool = False,
        limit: int | None = None,
    ) -> None:
        self._compiled = compiled
        self.limit = limit
        self._parameters = list(parameters)
        self._optimizer_tensors = optimizer_tensors
        self._device = device
        self._found: MemoryBytes | None = None

    @property
    def memory(self) -> MemoryBytes:
        """What was counted; what is known without counting before that."""
        return self._found or self._standing(0)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count within the block, which runs one step.

        Raises RankMemoryError where the rank holds more than its limit, at that very moment.
        """
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            yield
            peak = torch.cuda.max_memory_allocated(self._device)
            standing = self._standing(0).total
            self._found = self._standing(max(0, peak - standing))
            return
        before = self._standing(0)
        # Gradients of the step before are live until this one frees them.
        others = before.total - before.gradients
        left = None if self.limit is None else self.limit - others
        live = LiveBytes(
            [*self._parameters, *self._optimizer_tensors()],
            left,
            lambda more: self._full(others + more),
            live=(p.grad for p in self._parameters),
        )
        eager = torch.compiler.set_stance("force_eager") if self._compiled else nullcontext()
        with eager, live:
            yield
        live.close()
        # Gradients were counted among the rest, and are not of it.
        left_behind = storage_bytes(p.grad for p in self._parameters)
        self._found = self._standing(max(0, live.peak - left_behind))

    def require(self, held: int) -> None:
        """Raise RankMemoryError where `held` bytes are more than the rank may hold."""
        if self.limit is not None and held > self.limit:
            raise self._full(held)

    def _full(self, held: int) -> RankMemoryError:
        assert self.limit is not None
        return RankMemoryError(
            f"{format_bytes(held)} of tensors, and --memory-per-rank allows "
            f"{format_bytes(self.limit)}",
            hint="more ranks: a layout with a larger pp or tp",
        )

    def _standing(self, activations: int) -> MemoryBytes:
        gradients = [p.grad for p in self._parameters]
        optimizer = list(self._optimizer_tensors())
        everything = (*self._parameters, *gradients, *optimizer)
        return MemoryBytes(
            parameters=storage_bytes(self._here(self._parameters)),
            gradients=storage_bytes(self._here(gradients)),
            optimizer=storage_bytes(self._here(optimizer)),
            activations=activations,
            host=storage_bytes(t for t in everything if t is not None and not self._lies_here(t)),
        )

    def _here(self, tensors: Iterable[Tensor | None]) -> Iterator[Tensor]:
        return (t for t in tensors if t is not None and self._lies_here(t))

    def _lies_here(self, tensor: Tensor) -> bool:
        return tensor.device.type == self._device.type
