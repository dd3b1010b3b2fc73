"""Cores: the attention function of a module, reached so that it can run by itself again.

transformers' attention modules ask `AttentionInterface.get_interface` for their core (a fused
kernel, or the family's own code written out) and call it with query, key and value. Here that
answer looks at the module first: one with an attribute `recompute_core` has its core called
through it, and `runtime.recompute` gives it one. A family that computes its attention in place
asks for no core, which is found by watching its proxy model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import transformers
from torch import nn

Core = Callable[..., Any]

_watching: list[list[nn.Module]] = []


@contextmanager
def watched() -> Iterator[list[nn.Module]]:
    """Within, the modules whose core runs are noted, in order."""
    look_at_modules()
    seen: list[nn.Module] = []
    _watching.append(seen)
    try:
        yield seen
    finally:
        _watching.pop()


def look_at_modules() -> None:
    """Have attention functions look at their modules, once in a process: before a model is built,
    as its plan may have been found in another process."""
    interface: Any = transformers.AttentionInterface
    asked = interface.get_interface
    if hasattr(asked, "looks_at_modules"):
        return

    @functools.wraps(asked)
    def get_interface(self: Any, attn_implementation: str, default: Core) -> Core:
        return _through(asked(self, attn_implementation, default))

    get_interface.looks_at_modules = True  # type: ignore[attr-defined]
    interface.get_interface = get_interface


def _through(core: Core) -> Core:
    def attention(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        for seen in _watching:
            seen.append(module)
        again = getattr(module, "recompute_core", None)
        if again is None:
            return core(module, *args, **kwargs)
        return again(core, module, *args, **kwargs)

    return attention
