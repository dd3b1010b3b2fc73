"""Absent: what a parameter is while its values lie in shares (ZeRO-3).

A tensor whose storage is empty has its shape, and ends the process when it is read. So a parameter
changes its class with its memory: what it is may be asked at any time, what it holds raises. That
costs one assignment; the step reads no absent parameter, and meets none of this.

Autograd's own reads do not come by here: what it saved of a parameter is gathered by the hooks of
`ShardedBlocks`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from hocket.spec.errors import ModelError

NAME = "absent_name"
"""Attribute of a parameter that can be absent: its name."""

_VALUES = frozenset({"data", "T", "mT", "H", "mH", "real", "imag"})
"""Attributes that lead to values; all others say what a tensor is, or hold its gradient."""

_ASKS = frozenset(
    {
        Tensor.numel, Tensor.nelement, Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.stride,
        Tensor.storage_offset, Tensor.element_size, Tensor.get_device, Tensor.is_contiguous,
        Tensor.is_floating_point, Tensor.is_complex, Tensor.untyped_storage, Tensor.register_hook,
        Tensor.register_post_accumulate_grad_hook, Tensor.requires_grad_, Tensor.is_pinned,
        torch.empty_like, torch.zeros_like, torch.ones_like, torch.full_like, torch.numel,
        torch.is_floating_point, torch.is_complex, Tensor.new_empty, Tensor.new_zeros,
    }
)  # fmt: skip
"""Calls that read no values."""


class Absent(nn.Parameter):
    """A parameter without values.

    Raises:
        ModelError: it is read or written, by whatever goes through torch's functions.
    """

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        attribute = getattr(getattr(func, "__self__", None), "__name__", None)
        if func in _ASKS or (
            func.__name__ in ("__get__", "__set__", "__delete__") and attribute not in _VALUES
        ):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        found = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, cls))
        raise ModelError(
            f"{getattr(found, NAME)} is read where it is not gathered: under ZeRO-3 its values are "
            "sharded over the data ranks, except while its own module runs",
            hint="on every rank parallel.unshard() before reading and parallel.reshard() after it, "
            "or zero=2 in the layout",
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return (
            f"Parameter {getattr(self, NAME)} of shape {list(self.shape)}, {self.dtype}: not "
            "gathered (ZeRO-3)"
        )


def leave(parameters: Iterable[nn.Parameter]) -> None:
    """Their values are gone; what has a class of its own keeps it."""
    for parameter in parameters:
        if type(parameter) is nn.Parameter:
            parameter.__class__ = Absent


def come_back(parameters: Iterable[nn.Parameter]) -> None:
    """Their values are there again."""
    for parameter in parameters:
        if type(parameter) is Absent:
            parameter.__class__ = nn.Parameter  # type: ignore[assignment]
