"""Offload: what layers save for backward, kept in host memory from their forward to their backward.

    compute   forward of layer 1 | forward of layer 2 | ...  | backward of 2     | backward of 1
    copies            saved of 1 -> host ...............       saved of 1 <- host

A tensor that several operations save (the input of query, key and value) is copied once each way.
Parameters stay where they are, and so does what is small: a copy has a cost of its own. Copies run
on a stream of their own (Rajbhandari et al. 2021, ZeRO-Infinity, section 5.1). A layer's saved
tensors are freed when the next layer's forward is queued, behind a wait of the compute stream for
their copies; and are copied back while the layer above runs backward, into memory that the compute
stream allocates. Buffers come from a pool with a limit; what it cannot take stays on the device.

Not executed on a GPU yet; its order of streams is checked by `rehearsal.streams`.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from hocket.runtime.copy_stream import Copied, CopyStream
from hocket.runtime.pinned import PinnedPool
from hocket.spec.capabilities import OFFLOADED_BYTES


class _Pass:
    """One layer's forward of one microbatch: what it saved, and the layer that ran before it."""

    def __init__(self, before: _Pass | None) -> None:
        self.before = before
        self.saved: list[weakref.ref[_OnHost]] = []
        self.fetched = False
        self.copied: Copied | None = None


@dataclasses.dataclass(eq=False)
class _OnHost:
    """A saved tensor's copy in host memory.

    Attributes:
        value: there, a view of `buffer`.
        device: of the tensor.
        layer: the forward that saved it.
        here: the tensor on its device: until its copy is waited for, and again for backward.
        pool: where the buffer comes from and goes back to.
    """

    value: Tensor
    buffer: Tensor
    device: torch.device
    layer: _Pass
    here: Tensor | None
    pool: PinnedPool

    def __del__(self) -> None:
        if self.device.type == "cuda":  # its reader has a copy, ordered before the next write
            self.pool.give(self.buffer)
        else:  # its reader was given the buffer itself, and may hold it longer
            self.pool.release(self.buffer)


class SavedOnHost:
    """Keeps the saved tensors of one stage's layers in host memory.

    Args:
        parameters: what is never moved.
        least: bytes below which a tensor stays.
        limit: bytes of host memory at most. None: as `PinnedPool`.
        host: move from CPU tensors as well, to a copy in host memory like themselves; for tests.

    Attributes:
        bytes: moved to the host so far.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        *,
        least: int = OFFLOADED_BYTES,
        limit: int | None = None,
        host: bool = False,
    ) -> None:
        self._parameters = list(parameters)
        self.least = least
        self.host = host
        self.bytes = 0
        device = next((p.device for p in self._parameters), torch.device("cpu"))
        self._pool = PinnedPool(limit, pin=device.type == "cuda")
        self._stream = CopyStream(device)
        self._layer = _Pass(None)
        self._leaving: list[tuple[Tensor, weakref.ref[_OnHost]]] = []
        self._left: tuple[Copied | None, list[tuple[Tensor, weakref.ref[_OnHost]]]] = (None, [])
        self._copies: weakref.WeakValueDictionary[tuple[Any, ...], _OnHost] = (
            weakref.WeakValueDictionary()
        )
        self._sources: dict[tuple[Any, ...], weakref.ref[Any]] = {}

    # --- forward -------------------------------------------------------------------------------

    def begin_layer(self, first: bool) -> None:
        """A layer's forward begins; `first`: of a microbatch."""
        self._layer = _Pass(None if first else self._layer)

    def end_layer(self) -> None:
        """It is queued. The layer before it gives up its device memory."""
        self._let_go()
        self._left = (self._stream.copied(), self._leaving)
        self._leaving = []

    def _let_go(self) -> None:
        """Let the compute stream wait for the copies of the layer before, free their sources."""
        copied, before = self._left
        if copied is not None:
            copied.wait()
        for _, kept in before:
            found = kept()
            if found is not None and not found.layer.fetched:
                found.here = None
        self._left = (None, [])

    def pack(self, tensor: Tensor) -> Tensor | _OnHost:
        """What is kept instead of a tensor."""
        storage = tensor.untyped_storage()
        size = tensor.numel() * tensor.element_size()
        if size < self.least or not (tensor.is_cuda or self.host) or self._stays(tensor):
            return tensor
        key = (
            storage._cdata, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(),
            tensor.dtype, tensor._version,
        )  # fmt: skip
        known, source = self._copies.get(key), self._sources.get(key)
        # An address is given again once its owner is gone: only a living storage is the same one.
        if known is not None and source is not None and source() is not None:
            return known
        buffer = self._pool.take(size)
        if buffer is None:  # the pool has reached its limit
            return tensor
        tensor = tensor.detach()
        copy = buffer[:size].view(tensor.dtype).as_strided(tensor.shape, _dense(tensor))
        with self._stream.behind_current():
            copy.copy_(tensor, non_blocking=tensor.is_cuda)
        self.bytes += size
        found = _OnHost(copy, buffer, tensor.device, self._layer, None, self._pool)
        if tensor.is_cuda:
            found.here = tensor
            self._leaving.append((tensor, weakref.ref(found)))
        self._layer.saved.append(weakref.ref(found))
        self._copies[key] = found
        self._sources[key] = weakref.ref(storage, lambda _: self._sources.pop(key, None))
        return found

    # --- backward ------------------------------------------------------------------------------

    def unpack(self, kept: Tensor | _OnHost) -> Tensor:
        """The tensor, on its device again."""
        if isinstance(kept, Tensor):
            return kept
        if kept.device.type == "cpu":
            return kept.value
        layer = kept.layer
        if layer is not self._layer and self._left[1]:
            self._let_go()  # backward has left the last layer: its copies had that long
        self._fetch(layer)
        if layer.copied is not None:
            layer.copied.wait()
            layer.copied = None
        if layer.before is not None:
            self._fetch(layer.before)  # during this layer's backward
        assert kept.here is not None
        return kept.here

    def _fetch(self, layer: _Pass) -> None:
        """Begin to copy back what a layer saved, if that was not done."""
        if layer.fetched:
            return
        layer.fetched = True
        away = [found for each in layer.saved if (found := each()) is not None]
        away = [found for found in away if found.here is None]
        for found in away:
            # Allocated by the stream that will read it: nothing else decides when it is freed.
            found.here = torch.empty_strided(
                found.value.shape, found.value.stride(),
                dtype=found.value.dtype, device=found.device,
            )  # fmt: skip
        if away:
            with self._stream.behind_current():
                for found in away:
                    assert found.here is not None
                    found.here.copy_(found.value, non_blocking=True)
            layer.copied = self._stream.copied()

    def _stays(self, tensor: Tensor) -> bool:
        mine = tensor.untyped_storage()._cdata
        return any(p.untyped_storage()._cdata == mine for p in self._parameters)


def _dense(tensor: Tensor) -> tuple[int, ...]:
    """Strides of the same order without holes: a slice brings its own elements alone."""
    given = tensor.stride()
    order = sorted(range(tensor.ndim), key=lambda d: -given[d])
    strides, step = [0] * tensor.ndim, 1
    for dim in reversed(order):
        strides[dim] = step
        step *= tensor.shape[dim]
    return tuple(strides)


class OffloadedLayer:
    """Stands for the `forward` of one layer.

    Attributes:
        inner: the layer's own forward.
        saved: where what it saves is kept.
        first: whether it is the first of its stage.
    """

    def __init__(self, inner: Callable[..., Any], saved: SavedOnHost, first: bool = False) -> None:
        self.inner = inner
        self.saved = saved
        self.first = first
        self.__wrapped__ = inner  # signatures are read off it

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.inner(*args, **kwargs)
        self.saved.begin_layer(self.first)
        with saved_tensors_hooks(self.saved.pack, self.saved.unpack):
            out = self.inner(*args, **kwargs)
        self.saved.end_layer()
        return out


def offload_activations(layers: Iterable[nn.Module], saved: SavedOnHost) -> None:
    """Let layers keep in host memory what they save for backward."""
    for number, layer in enumerate(layers):
        layer.forward = OffloadedLayer(layer.forward, saved, first=number == 0)
