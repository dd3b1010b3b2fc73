"""A CUDA graph's stand-in on CPU tensors: operations are recorded, and replayed into their outputs.

As in a real capture, nothing may read a value; a replay reads and writes the addresses that the
capture did, and runs no Python of the model. So a tensor that moved, an index that was baked in and
a step that looks at the device are seen.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_READS = ("_local_scalar_dense", "item", "nonzero", "is_nonzero", "masked_select", "equal")


class _Graph(TorchDispatchMode):
    """Records what runs within; `replay` runs it again."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, list[Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        if name in _READS:
            raise RuntimeError(f"aten.{name} reads the device")
        out = func(*args, **(kwargs or {}))
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        self.calls.append((func, args, kwargs or {}, made))
        return out

    def replay(self) -> None:
        for func, args, kwargs, made in self.calls:
            again = func(*args, **kwargs)
            found = [leaf for leaf in tree_leaves(again) if isinstance(leaf, torch.Tensor)]
            for before, now in zip(made, found, strict=True):
                if before.data_ptr() != now.data_ptr():
                    before.copy_(now)


class Recorder:
    """Stands for `graphs.CudaDevice`.

    Attributes:
        order: rows of the captures, in their order. warmed: runs before them.
    """

    def __init__(self) -> None:
        self.order: list[int] = []
        self.warmed = 0
        self.failures = 0

    def begin(self) -> Any:
        return object()

    @contextlib.contextmanager
    def warm(self) -> Iterator[None]:
        self.warmed += 1
        yield

    @contextlib.contextmanager
    def capture(self, pool: Any) -> Iterator[Any]:
        assert self.warmed == len(self.order) + 1, "each size is warmed up before it is captured"
        graph = _Graph()
        with graph:
            yield graph
        shapes = [made[0].shape[0] for _, _, _, made in graph.calls if made and made[0].dim() == 1]
        self.order.append(shapes[0])

    def failed(self) -> None:
        self.failures += 1


@pytest.fixture
def reference_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference as one operator, as kernels are: a recording does not see into it."""
    from hocket.runtime.triton import paged_attention_cases

    reference = paged_attention_cases.paged_attention_reference

    def attend(q: Any, keys: Any, values: Any, tables: Any, used: Any, begins: Any, most: int,
               **options: Any) -> Any:  # fmt: skip
        given = (options["scale"], options["window"], options["softcap"], options["sinks"])
        return torch.ops.hocket_tests.paged_reference(
            q, keys, values, tables, used, begins, most, *given
        )

    _define(reference)
    # A CPU runner of this process may have put a kernel in C into the family's module, for good.
    monkeypatch.setattr("hocket.serving.engine.fused.kernels_take", lambda *tensors: False)
    monkeypatch.setattr(paged_attention_cases, "paged_attention_reference", attend)


_library: Any = None


def _define(reference: Any) -> None:
    global _library
    if _library is not None:
        return
    _library = torch.library.Library("hocket_tests", "FRAGMENT")
    _library.define(
        "paged_reference(Tensor q, Tensor keys, Tensor values, Tensor tables, Tensor used, "
        "Tensor begins, int most, float scale, int? window, float? softcap, Tensor? sinks) "
        "-> Tensor"
    )

    def run(q: Any, keys: Any, values: Any, tables: Any, used: Any, begins: Any, most: int,
            scale: float, window: Any, softcap: Any, sinks: Any) -> Any:  # fmt: skip
        return reference(
            q, keys, values, tables, used, begins, most, scale=scale, window=window,
            softcap=softcap, sinks=sinks,
        ).to(q.dtype)  # fmt: skip

    _library.impl("paged_reference", run, "CPU")
