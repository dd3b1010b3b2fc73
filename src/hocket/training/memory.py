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
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hocket.spec.errors import TrainingError
from hocket.spec.units import format_bytes

_RESIZE: Any = torch.ops.inductor.resize_storage_bytes_.default


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
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


def of_replicas(rows: Iterable[Mapping[str, int]], optimizer: int) -> list[Memory]:
    """The counts of replicas in threads (`ThreadedReplicas.replica_bytes`), the master first.

    A dispatch mode sees one thread only, so replicas count for themselves. The optimizer's state
    is the master's.
    """
    return [
        Memory(
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
    ) -> None:
        """Storages of the `known` tensors are not counted. A tensor that takes the count beyond
        `limit` raises `full(bytes)`."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.limit, self.full = limit, full
        self.bytes = 0
        self.peak = 0
        self._alive: dict[int, Any] = {}
        self._sizes: dict[int, int] = {}
        self._counted: dict[int, int] = {}
        for tensor in known:
            if tensor is not None:
                self._watch(tensor, counted=False)

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
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

    def _watch(self, tensor: Tensor, counted: bool = True) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._alive:
            return
        self._alive[key] = weakref.finalize(storage, self._gone, key)
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
        self.bytes += nbytes
        self.peak = max(self.peak, self.bytes)
        if self.limit is not None and self.bytes > self.limit:
            raise self.full(self.bytes)

    def _gone(self, key: int) -> None:
        self._alive.pop(key, None)
        self._sizes.pop(key)
        self.bytes -= self._counted.pop(key)

    def close(self) -> None:
        """Let go of what is still watched."""
        for watched in list(self._alive.values()):  # collecting garbage may end some meanwhile
            watched.detach()
        self._alive.clear()
        self._counted.clear()


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
        self._found: Memory | None = None

    @property
    def memory(self) -> Memory:
        """What was counted; what is known without counting before that."""
        return self._found or self._standing(0)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count within the block, which runs one step.

        Raises TrainingError where the rank holds more than its limit, at that very moment.
        """
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            yield
            peak = torch.cuda.max_memory_allocated(self._device)
            standing = self._standing(0).total
            self._found = self._standing(max(0, peak - standing))
            return
        gradients = [p.grad for p in self._parameters]
        before = storage_bytes(gradients)
        standing = self._standing(0).total
        left = None if self.limit is None else self.limit - standing
        known = [*self._parameters, *gradients, *self._optimizer_tensors()]
        live = LiveBytes(known, left, lambda more: self._full(standing + more))
        eager = torch.compiler.set_stance("force_eager") if self._compiled else nullcontext()
        with eager, live:
            yield
        live.close()
        # Gradients that this step made were counted among the rest, and are not of it.
        made = storage_bytes(p.grad for p in self._parameters) - before
        self._found = self._standing(max(0, live.peak - max(0, made)))

    def require(self, held: int) -> None:
        """Raise TrainingError where `held` bytes are more than the rank may hold."""
        if self.limit is not None and held > self.limit:
            raise self._full(held)

    def _full(self, held: int) -> TrainingError:
        assert self.limit is not None
        return TrainingError(
            f"{format_bytes(held)} of tensors, and --memory-per-rank allows "
            f"{format_bytes(self.limit)}",
            hint="more ranks: a layout with a larger pp or tp",
        )

    def _standing(self, activations: int) -> Memory:
        gradients = [p.grad for p in self._parameters]
        optimizer = list(self._optimizer_tensors())
        everything = (*self._parameters, *gradients, *optimizer)
        return Memory(
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
