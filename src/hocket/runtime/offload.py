"""Offload: what layers save for backward, kept in host memory from their forward to their backward.

    forward of a layer     saved tensors -> pinned host memory, once each
    forward of the next    the device's copies are let go
    backward of a layer    saved tensors <- host memory, as backward asks for them

A tensor that several operations save (the input of query, key and value) travels once. Parameters
stay where they are, and so does what is small: a copy has a price of its own. Copies run in the
order of the device's own work, so that nothing is read before it is there (Rajbhandari et al.
2021, ZeRO-Infinity, section 5.1, without its overlap).
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

LEAST_BYTES = 1 << 16
"""Smaller tensors stay on the device."""


@dataclasses.dataclass(eq=False)
class _OnHost:
    """A saved tensor's copy in host memory."""

    value: Tensor
    device: torch.device


class SavedOnHost:
    """Keeps the saved tensors of one stage's layers in host memory.

    Args:
        parameters: what is never moved.
        least: bytes below which a tensor stays.
        host: move from CPU tensors as well, to a copy in host memory like themselves; for tests.

    Attributes:
        bytes: moved to the host so far.
    """

    def __init__(
        self, parameters: Iterable[Tensor], *, least: int = LEAST_BYTES, host: bool = False
    ) -> None:
        self._parameters = list(parameters)
        self.least = least
        self.host = host
        self.bytes = 0
        self._copies: weakref.WeakValueDictionary[tuple[Any, ...], _OnHost] = (
            weakref.WeakValueDictionary()
        )
        self._sources: dict[tuple[Any, ...], weakref.ref[Any]] = {}

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
        # An address is given anew once its owner is gone: only a living storage is the same one.
        if known is not None and source is not None and source() is not None:
            return known
        copy = torch.empty_strided(
            tensor.shape, _dense(tensor), dtype=tensor.dtype, pin_memory=tensor.is_cuda
        )
        copy.copy_(tensor.detach(), non_blocking=tensor.is_cuda)
        self.bytes += size
        found = self._copies[key] = _OnHost(copy, tensor.device)
        self._sources[key] = weakref.ref(storage, lambda _: self._sources.pop(key, None))
        return found

    def unpack(self, kept: Tensor | _OnHost) -> Tensor:
        """The tensor, on its device again."""
        if isinstance(kept, Tensor):
            return kept
        if kept.device.type == "cpu":
            return kept.value
        return kept.value.to(kept.device, non_blocking=True)

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
    """

    def __init__(self, inner: Callable[..., Any], saved: SavedOnHost) -> None:
        self.inner = inner
        self.saved = saved
        self.__wrapped__ = inner  # signatures are read off it

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.inner(*args, **kwargs)
        with saved_tensors_hooks(self.saved.pack, self.saved.unpack):
            return self.inner(*args, **kwargs)


def offload_activations(layers: Iterable[nn.Module], saved: SavedOnHost) -> None:
    """Let layers keep in host memory what they save for backward."""
    for layer in layers:
        layer.forward = OffloadedLayer(layer.forward, saved)
