"""In fp64: a model that is checked in double precision computes in it throughout.

Families compute norms, softmax and recurrent scans in fp32, whatever the dtype of the model. In a
check in fp64 that brings back the rounding which it is to leave out: where decays are strong, the
gradient of a scan by them is a small difference of large sums, and its rounding in fp32 depends on
where chunks begin. Here what asks for fp32 of a tensor in fp64 gets fp64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_MATMULS = (torch.matmul, Tensor.matmul, Tensor.__matmul__)


class _Wide(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, Tensor) and first.dtype == torch.float64:
            if func is Tensor.float:
                return first
            if func in _MATMULS:  # by what never was in fp64, positions of a rotary embedding
                args = tuple(a.double() if isinstance(a, Tensor) else a for a in args)
            args = tuple(torch.float64 if a is torch.float32 else a for a in args)
            kwargs = {k: torch.float64 if v is torch.float32 else v for k, v in kwargs.items()}
        return func(*args, **kwargs)


def stay_in_fp64(model: nn.Module) -> None:
    """Let every forward of a model's modules stay in fp64, also where a layer is run again in
    backward."""
    for module in model.modules():
        module.register_forward_pre_hook(_enter, prepend=True)
        module.register_forward_hook(_leave, always_call=True)


_RUNNING: list[_Wide] = []


def _enter(module: nn.Module, args: Any) -> None:
    _RUNNING.append(_Wide())
    _RUNNING[-1].__enter__()  # type: ignore[no-untyped-call]


def _leave(module: nn.Module, args: Any, output: Any) -> None:
    _RUNNING.pop().__exit__(None, None, None)  # type: ignore[no-untyped-call]
