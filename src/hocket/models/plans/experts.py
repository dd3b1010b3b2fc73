"""ExpertPlan of a Hugging Face model: its modules of stacked experts.

transformers computes experts in one form for all families (`transformers.integrations.moe`): a
module whose parameters have the experts as their first dim, and whose forward is given tokens, the
numbers of their experts and the routing weights. Whatever has that form can be divided over ranks.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator

from torch import nn

from hocket.models.plans.segments import folded
from hocket.spec.plan import ExpertPlan, TensorPlan, matches

_ARGUMENTS = 3


def named_experts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules of several experts, by name: transformers names their classes so."""
    for name, module in model.named_modules():
        if type(module).__name__.endswith("Experts"):
            yield name, module


def expert_plan(model: nn.Module, tensor: TensorPlan | None) -> tuple[ExpertPlan | None, str]:
    """The experts of a causal language model; None where it has none, or none that ranks can hold
    some of, and why.

    Args:
        model: the whole model; its device does not matter.
        tensor: its tensor plan, which may slice each expert.
    """
    found: dict[str, bool] = {}
    others: dict[str, str] = {}
    for name, module in named_experts(model):
        why = _why_not(module)
        if name.endswith(".base_layer"):  # of an adapter of peft
            around = model.get_submodule(name.rpartition(".")[0])
            why = f"are adapted by a {type(around).__name__}, which has values for all of them"
        if why and "Shared" in type(module).__name__:
            continue  # experts of every token, which are no choice of a router's
        if why:
            others[type(module).__name__] = why
        else:
            found[name] = True
    if others:
        return None, "; ".join(f"{kind} {why}" for kind, why in others.items())
    if not found:
        return None, ""
    patterns = tuple(folded(found))
    splits = {} if tensor is None else tensor.splits
    sliced = tuple(
        pattern
        for pattern in patterns
        if all(
            any(s.style == "experts" and matches(p, name) for p, s in splits.items())
            for name in found
            if matches(pattern, name)
        )
    )
    return ExpertPlan(modules=patterns, sliced=sliced), ""


def expert_shares(model: nn.Module) -> dict[str, float]:
    """Name patterns of modules of experts, to the share of tokens that each of their experts gets:
    the router next to them has a `top_k`. Experts that are given no choice compute all tokens
    (Llama 4; shared ones)."""
    found: dict[str, float] = {}
    for name, module in named_experts(model):
        around = model.get_submodule(name.rpartition(".")[0])
        chosen = [getattr(one, "top_k", None) for one in (around, *around.children())]
        top_k = next((k for k in chosen if isinstance(k, int)), 0)
        count = getattr(module, "num_experts", None)
        if not isinstance(count, int):
            count = max((p.shape[0] for p in module.parameters() if p.ndim == 3), default=0)
        if len(inspect.signature(module.forward).parameters) < _ARGUMENTS:
            top_k = count
        if 0 < top_k <= count:
            found[name] = top_k / count
    return folded(found)


def _why_not(module: nn.Module) -> str:
    """Why a module of experts has another form; empty: it has this one."""
    own = list(module.named_parameters())
    count = getattr(module, "num_experts", None)
    if not isinstance(count, int) or not own:
        return "does not keep its experts in stacked parameters"
    odd = [name for name, p in own if "." in name or p.ndim < 2 or p.shape[0] != count]
    if odd:
        return f"has {', '.join(odd)}, whose first dim is not its {count} experts"
    if len(inspect.signature(module.forward).parameters) != _ARGUMENTS:
        return "is not called with tokens, the numbers of their experts and routing weights"
    return ""
