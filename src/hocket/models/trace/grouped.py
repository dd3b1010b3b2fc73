"""Products of experts on fake tensors, in any type.

torch tells the sizes of a grouped product in bf16 alone (2.13: `_meta_grouped_mm_common`), and runs
it on CPU in fp32 as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class GroupedProducts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active, inside a FakeTensorMode, grouped matmuls report the type they are in.

    Modes that are entered later see the product alone.
    """

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is not torch.ops.aten._grouped_mm.default or args[0].dtype == torch.bfloat16:
            return func(*args, **(kwargs or {}))
        result = func(*map(_in_bf16, args), **{k: _in_bf16(v) for k, v in (kwargs or {}).items()})
        return result.to(args[0].dtype)


def _in_bf16(value: Any) -> Any:
    floating = isinstance(value, Tensor) and value.is_floating_point()
    return value.to(torch.bfloat16) if floating else value
