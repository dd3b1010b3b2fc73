"""What was changed of a model after its class made it, and a split would compute otherwise.

Plans and the trials of proxy models are of a configuration. Adapters, other norms, more layers and
tied parameters are seen in the module itself; what is looked for here would see a shard:

    in blocks that tensor ranks divide      modules of another class, hooks, forwards of an instance
    on sequence shards                      hooks and forwards of an instance anywhere

and forwards that may compute another loss than their configuration says.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from torch import nn

from hocket.models.proxy import proxy_of
from hocket.spec.errors import ModelError
from hocket.spec.plan import ParallelPlan

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OURS = ("torch", "transformers", "hocket")
_WHOLE = ("vocab_embedding", "vocab_head", "sum_grad")
"""Styles that divide a module by itself, not the block that it is in."""


def require_unchanged(model: nn.Module, plan: ParallelPlan, *, sequence: bool) -> None:
    """Reject what would compute on a shard what was made for the whole.

    Args:
        model: the whole model. plan: its own. sequence: it runs on sequence shards.

    Raises:
        ModelError: the module, by name, and what it has.
    """
    assert plan.tensor is not None
    blocks = {
        pattern.rpartition(".")[0]
        for pattern, split in plan.tensor.splits.items()
        if split.style not in _WHOLE and "." in pattern
    }
    each = "|".join(map(_expression, blocks)) or "$^"
    block, inside = re.compile(f"({each})"), re.compile(rf"({each})\..+")
    proxy = proxy_of(model.config).build()  # type: ignore[arg-type]
    made: dict[str, set[type]] = {}
    for name, child in proxy.named_modules():
        made.setdefault(_by_layer(name), set()).add(type(child))
    for name, child in model.named_modules():
        # A hook of a block itself is given what the block is given, and gives: all of it, or with
        # `sequence` a shard.
        divided, whole = inside.fullmatch(name), block.fullmatch(name)
        what = _hook(child) if divided or (sequence and name) else None
        if divided or whole or (sequence and name):
            what = what or _own_forward(child)
        if (divided or whole) and type(child) not in made.get(_by_layer(name), ()):
            what = f"is a {type(child).__name__}, which its configuration does not make"
        if what is not None:
            raise ModelError(
                f"{name} {what}, and would be given a shard of what it was made for",
                hint="a layout without tp, or the model as its class makes it"
                if divided or whole
                else "sequence_parallel=false",
            )


def require_own_layers(model: nn.Module, plan: ParallelPlan) -> None:
    """Raises ModelError where a layer has a parameter of another, which its class does not say."""
    said = getattr(model, "all_tied_weights_keys", None) or {}
    layers = "" if plan.stages is None else f"{plan.stages.layers}."
    for name, owner in plan.ties.items():
        if layers and name not in said and (name.startswith(layers) or owner.startswith(layers)):
            raise ModelError(
                f"{name} is the same parameter as {owner}; layers that share theirs are not split",
                hint="a layout of dp alone",
            )


def has_own_loss(model: nn.Module) -> bool:
    """Whether its forward is not that of a class of transformers alone, so that its loss may be
    another than that of its configuration."""
    own = "_loss_function" in vars(model) or not _known(type(model).forward)
    return own or (_own_forward(model) or _hook(model)) is not None


def _own_forward(module: nn.Module) -> str | None:
    own = "forward" in vars(module) and not _known(module.forward)
    return "has a forward of its own" if own else None


def _hook(module: nn.Module) -> str | None:
    for kind in _HOOKS:
        for hook in getattr(module, kind).values():
            if not _known(hook):
                return f"has a hook ({getattr(hook, '__qualname__', type(hook).__name__)})"
    return None


def _known(function: Callable[..., Any]) -> bool:
    """Whether it is of PyTorch, transformers or hocket."""
    while hasattr(function, "func"):
        function = function.func
    home = getattr(function, "__module__", None) or type(function).__module__
    return str(home).partition(".")[0] in _OURS


def _expression(pattern: str) -> str:
    return re.escape(pattern).replace(r"\*", "[^.]+")


def _by_layer(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)
