"""Launches: kernels that a step launches, and places where the host waits for the device.

    launch      an operation on CUDA tensors that is no view and allocates more than memory; each
                launches at least one kernel (a multi-tensor operation more)
    host read   `.item()`, `.tolist()`, `bool(tensor)`, a copy to the host or from pageable host
                memory that is waited for, `nonzero` and whatever needs its result (a boolean
                mask as an index, `unique`, `repeat_interleave` by a tensor), a synchronisation

A read is answered with 1 (or True): the program goes on as if it had read that. `nonzero` is
answered with as many elements as there can be.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hocket.rehearsal.graph_collectives import GraphCollectives
from hocket.rehearsal.memory import LiveMemory
from hocket.rehearsal.shape_cache import ShapeCache
from hocket.runtime.triton.grouped_gemm import torch_has_kernel

_RESIZE: Any = torch.ops.inductor.resize_storage_bytes_.default
_NO_KERNEL = (
    "empty", "new_empty", "detach", "alias", "lift", "_reshape_alias", "resize", "set_",
    "_unsafe_view", "view", "_local_scalar_dense", "is_pinned", "_pin_memory", "record_stream",
    "sym_", "_version",
)  # fmt: skip
_NONZERO = (
    "where", "nonzero", "nonzero_numpy", "masked_select", "_unique", "_unique2", "unique_dim",
    "unique_consecutive", "repeat_interleave", "bincount",
)  # fmt: skip
_TORCH = str(Path(torch.__file__).parent)
_HERE = str(Path(__file__).parent)


class Launches:
    """What a step launches and where it waits.

    Attributes:
        kernels: operation to its number of launches.
        host_reads: (what, where) to its number.
    """

    def __init__(self) -> None:
        self.kernels: Counter[str] = Counter()
        self.host_reads: Counter[tuple[str, str]] = Counter()
        self.counting = False
        self._views: dict[Any, bool] = {}

    def wait(self, what: str) -> None:
        if self.counting:
            self.host_reads[what, where()] += 1

    def reads(self) -> list[dict[str, Any]]:
        """Rows of `what`, `where` and `count`."""
        return [
            {"what": what, "where": place, "count": count}
            for (what, place), count in self.host_reads.items()
        ]

    def generated(self, name: str) -> None:
        """A kernel that torch.compile generated ran on the device."""
        if self.counting:
            self.kernels[name] += 1

    def launched(self, func: Any) -> None:
        """An operation ran on the device."""
        if not self.counting:
            return
        free = self._views.get(func)
        if free is None:
            name = func._schema.name.partition("::")[2]
            free = self._views[func] = func.is_view or name.startswith(_NO_KERNEL)
        if not free:
            self.kernels[func._schema.name.partition("::")[2]] += 1


def where() -> str:
    """File and line of the innermost caller outside of torch and of the rehearsal."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((_TORCH, _HERE, "<")) and "/contextlib.py" not in file:
            return f"{_short(file)}:{frame.f_lineno}"
        frame = frame.f_back
    return "backward (an operation of torch)"


def _short(file: str) -> str:
    for mark in ("/site-packages/", "/src/"):
        if mark in file:
            return file.rpartition(mark)[2]
    return file


class StepObserver(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active inside a FakeTensorMode: counts memory and launches, and answers host reads."""

    def __init__(
        self, memory: LiveMemory, launches: Launches, shapes: ShapeCache,
        collectives: GraphCollectives,
    ) -> None:  # fmt: skip
        super().__init__()  # type: ignore[no-untyped-call]
        self.memory = memory
        self.collectives = collectives
        self.launches = launches
        self.shapes = shapes
        self._composites: dict[Any, bool] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """That code is compiled within: what is compiled is not observed, what it runs is."""
        return True

    def _composite(self, func: Any) -> bool:
        """Whether an operation is composed of others, which are what launches and reads. Autograd
        takes it apart before it comes here; inference mode, in which servers run, does not."""
        found = self._composites.get(func)
        if found is None:
            found = self._composites[func] = (
                func.namespace == "aten"
                and torch._C._dispatch_has_kernel_for_dispatch_key(
                    func.name(), "CompositeImplicitAutograd"
                )
            )
        return found

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        handler = _ANSWERS.get(func._schema.name)
        if handler is None and torch.is_inference_mode_enabled() and self._composite(func):
            with self:
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        if handler is not None:
            answered, out = handler(self.launches, func, args, kwargs)
            if not answered:
                out = self.shapes.call(func, args, kwargs)
        else:
            out = self.shapes.call(func, args, kwargs)
        if func.namespace == "_c10d_functional":
            self.collectives.ran(func, args, kwargs, out)
            return out
        memory = self.memory
        if func is _RESIZE:
            memory.resized(args[0])
        elif isinstance(out, Tensor):
            memory.made(out)
            if out.is_cuda:
                self.launches.launched(func)
        else:
            cuda = False
            for leaf in tree_leaves(out):
                if isinstance(leaf, Tensor):
                    memory.made(leaf)
                    cuda = cuda or leaf.is_cuda
            if cuda or (out is None and _on_cuda(args)):
                self.launches.launched(func)
        return out


def _on_cuda(args: Any) -> bool:
    return any(isinstance(leaf, Tensor) and leaf.is_cuda for leaf in tree_leaves(args))


def _scalar(launches: Launches, func: Any, args: Any, kwargs: Any) -> tuple[bool, Any]:
    tensor = args[0]
    if not tensor.is_cuda:
        return False, None
    launches.wait("item")
    if tensor.dtype == torch.bool:
        return True, True
    return True, 1.0 if tensor.is_floating_point() else 1


def _nonzero(launches: Launches, func: Any, args: Any, kwargs: Any) -> tuple[bool, Any]:
    tensor = args[0]
    if not tensor.is_cuda:
        return False, None
    name = func._schema.name.partition("::")[2]
    if name == "where" and len(args) > 1:  # a choice, not the places of what is true
        return False, None
    if name == "repeat_interleave":
        counted = kwargs.get("output_size") is not None
        if counted or "self_int" in func._overloadname:  # by one number for all: nothing is read
            return False, None
    launches.wait(name)
    if name in ("nonzero", "nonzero_numpy", "where"):
        found = tensor.new_empty((tensor.numel(), max(tensor.dim(), 1)), dtype=torch.int64)
        return True, found if name == "nonzero" else list(found.unbind(1))
    if name == "masked_select":
        return True, tensor.new_empty(max(tensor.numel(), args[1].numel()))
    return False, None


def _masked_index(launches: Launches, func: Any, args: Any, kwargs: Any) -> tuple[bool, Any]:
    indices = args[1]
    masks = [i for i in indices if i is not None and i.dtype in (torch.bool, torch.uint8)]
    if not args[0].is_cuda or not masks:
        return False, None
    launches.wait("index by a boolean mask")
    if "put" in func._schema.name:
        return False, None
    numbers: list[Any] = []
    for index in indices:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            found = index.new_empty(index.numel(), dtype=torch.int64)
            numbers += [found] * index.dim()
        else:
            numbers.append(index)
    return True, func(args[0], numbers, **kwargs)


def _copy(launches: Launches, func: Any, args: Any, kwargs: Any) -> tuple[bool, Any]:
    if func._schema.name == "aten::copy_":
        target, source = args[0].device.type, args[1].device.type
        late = kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
    else:
        device = kwargs.get("device")
        source = args[0].device.type
        target = source if device is None else torch.device(device).type
        late = kwargs.get("non_blocking", False)
    if "cuda" in (source, target) and source != target and not late:
        launches.wait("copy to the host" if target == "cpu" else "copy from the host")
    return False, None


def _equal(launches: Launches, func: Any, args: Any, kwargs: Any) -> tuple[bool, Any]:
    if not args[0].is_cuda:
        return False, None
    name = func._schema.name.partition("::")[2]
    launches.wait("item" if name == "is_nonzero" else name)  # which is one, taken apart or not
    return True, True


def _grouped(launches: Launches, func: Any, args: Any, kwargs: Any) -> tuple[bool, Any]:
    """Matmuls of experts for which torch has no kernel: the host reads the experts' offsets and
    multiplies one by one, as transformers does without torch's."""
    if args[0].is_cuda:
        capability = torch.cuda.get_device_capability(args[0].device)
        if "fallback" in func._schema.name or not torch_has_kernel(args[0].dtype, capability):
            launches.wait("grouped_mm without a kernel")
    return False, None


def _into_given(launches: Launches, func: Any, args: Any, kwargs: Any) -> tuple[bool, Any]:
    """A matmul in 8 bits written to a tensor that is given, as compiled layers write it: torch
    knows the shapes of the call that makes its own alone."""
    return "out" in kwargs, kwargs.get("out")


_ANSWERS: dict[str, Any] = {
    "aten::_local_scalar_dense": _scalar,
    "aten::item": _scalar,
    "aten::is_nonzero": _equal,
    "aten::equal": _equal,
    "aten::_grouped_mm": _grouped,
    "aten::_scaled_mm": _into_given,
    "transformers::grouped_mm_fallback": _grouped,
    "transformers::grouped_mm_fallback_backward": _grouped,
    "aten::index": _masked_index,
    "aten::index_put": _masked_index,
    "aten::index_put_": _masked_index,
    "aten::_index_put_impl_": _masked_index,
    "aten::_to_copy": _copy,
    "aten::copy_": _copy,
    **{f"aten::{name}": _nonzero for name in _NONZERO},
}
