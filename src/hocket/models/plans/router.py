"""RouterLoss of a model: whether its own forward adds a load-balancing loss, and how much of it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hocket.spec.plan import RouterLoss

SWITCH = "output_router_logits"
"""The key of a configuration with which transformers' models compute and add the loss."""

_COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef")
_RECORDED = "router_logits"
_FUNCTION = "load_balancing_loss_func"
"""Of the modules of transformers, by its name there."""


def router_loss(model: nn.Module) -> RouterLoss | None:
    """The auxiliary loss that `model` adds in `forward(labels=...)`; None: none."""
    config: Any = getattr(model, "config", None)
    if not getattr(config, SWITCH, False):
        return None
    gates = _gates(model)
    for name in _COEFFICIENTS:
        coefficient = getattr(model, name, None)
        if gates and isinstance(coefficient, int | float):
            experts, top_k = _switch_sizes(model)
            return RouterLoss(
                coefficient=float(coefficient), gates=gates, experts=experts, top_k=top_k
            )
    return None  # no router, or the switch is for the model's outputs alone


def _switch_sizes(model: Any) -> tuple[int, int]:
    """Experts and choices of a token where the model's loss is that of the Switch Transformer;
    zeros where it is another."""
    function = getattr(sys.modules.get(type(model).__module__), _FUNCTION, None)
    experts = getattr(model, "num_experts", None)
    top_k = getattr(model, "num_experts_per_tok", None)
    if not (isinstance(experts, int) and isinstance(top_k, int) and function is not None):
        return 0, 0
    return (experts, top_k) if _is_switch(function) else (0, 0)


def _is_switch(function: Callable[..., Any]) -> bool:
    """Whether a function of transformers is the loss of Fedus et al. 2021, section 2.2, over the
    tokens of all layers that a mask keeps: tried on seeded logits."""
    generator = torch.Generator().manual_seed(0)
    gates = tuple(torch.randn(6, 4, generator=generator) for _ in range(2))
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    chances = torch.stack([gate.softmax(-1) for gate in gates])
    chosen = nn.functional.one_hot(chances.topk(2).indices, 4).sum(-2)
    for kept in (None, mask):
        weight = torch.ones(6) if kept is None else kept.flatten().float()
        rows = 2 * weight.sum()
        means = [(each * weight[:, None]).sum((0, 1)) / rows for each in (chosen, chances)]
        try:
            found = function(gates, 4, 2, kept)
        except Exception:  # another signature
            return False
        expected = 4 * (means[0] * means[1]).sum()
        if not (isinstance(found, Tensor) and torch.allclose(found, expected)):
            return False
    return True


def _gates(model: nn.Module) -> tuple[str, ...]:
    """The modules whose outputs transformers records as the router's logits."""
    kinds: list[type] = []
    for module in model.modules():
        recorded = (getattr(module, "_can_record_outputs", None) or {}).get(_RECORDED)
        for each in recorded if isinstance(recorded, list) else [recorded]:
            kind = getattr(each, "target_class", each)
            if isinstance(kind, type):
                kinds.append(kind)
    return tuple(name for name, m in model.named_modules() if isinstance(m, tuple(kinds)))
