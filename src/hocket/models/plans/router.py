"""RouterLoss of a model: whether its own forward adds a load-balancing loss, and how much of it."""

from __future__ import annotations

from typing import Any

from torch import nn

from hocket.spec.plan import RouterLoss

SWITCH = "output_router_logits"
"""The key of a configuration with which transformers' models compute and add the loss."""

_COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef")
_RECORDED = "router_logits"


def router_loss(model: nn.Module) -> RouterLoss | None:
    """The auxiliary loss that `model` adds in `forward(labels=...)`; None: none."""
    config: Any = getattr(model, "config", None)
    if not getattr(config, SWITCH, False):
        return None
    gates = _gates(model)
    for name in _COEFFICIENTS:
        coefficient = getattr(model, name, None)
        if gates and isinstance(coefficient, int | float):
            return RouterLoss(coefficient=float(coefficient), gates=gates)
    return None  # no router, or the switch is for the model's outputs alone


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
