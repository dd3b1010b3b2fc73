"""The loss that a transformers model computes itself, compared with next-token cross-entropy.

`model(input_ids, labels=labels).loss` is what a user of plain transformers trains on. Most families
shift the labels and take the cross-entropy; a few compare each logit with the label at its own
position; with a switch of their configuration some add a loss of their own.

Legend: B batch, S sequence, V vocabulary.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hocket.models.plans.router import router_loss
from hocket.spec.errors import ModelError

_TOLERANCE = 2e-5
"""Largest difference of a loss, relative to itself: sums in fp32."""


def takes_labels(model: nn.Module) -> bool:
    """Whether `forward` computes a loss at all, or hands `labels` on to a class that does."""
    own = inspect.signature(model.forward).parameters
    if all(each.kind is not each.VAR_KEYWORD for each in own.values()):
        return "labels" in own
    made = (vars(kind).get("forward") for kind in type(model).__mro__)
    return any("labels" in inspect.signature(one).parameters for one in made if one is not None)


@torch.no_grad()
def shifts_labels(
    model: Any, input_ids: Tensor, whose: str = "transformers' own loss of the proxy model"
) -> bool:
    """Whether `model` shifts its labels itself: `labels=input_ids` is then next-token prediction.

    Args:
        model: with values; dropout off.
        input_ids: [B, S], S at least 4.
        whose: what an error calls its loss.

    Raises:
        ModelError: its loss is neither the shifted nor the unshifted cross-entropy, plus the
            router's auxiliary loss where the configuration switches it on.
    """
    if not takes_labels(model):
        return True
    labels = input_ids.clone()
    labels[:, 1] = -100
    output = model(input_ids=input_ids, labels=labels, use_cache=False)
    own, logits = float(output.loss), output.logits
    router = router_loss(model)
    added = 0.0 if router is None else router.coefficient * float(output.aux_loss)
    shifted = _cross_entropy(logits[:, :-1], labels[:, 1:]) + added
    if abs(own - shifted) <= _TOLERANCE * abs(own):
        return True
    if abs(own - added - _cross_entropy(logits, labels)) <= _TOLERANCE * abs(own):
        return False
    keys = _loss_keys(model.config)
    raise ModelError(
        f"{whose} is {own:.6g}, next-token cross-entropy "
        f"{'and the auxiliary loss of its routers are' if router else 'is'} {shifted:.6g}: "
        "hocket does not compute the loss of its forward"
        + (f" ({', '.join(keys)} in the configuration)" if keys else ""),
        hint=f'"{keys[0].partition("=")[0]}": 0 in the configuration' if keys else None,
    )


def forward_shifts_labels(module: Any) -> bool:
    """Whether a model with a forward of its own shifts labels, found by calling it on a few tokens.
    Raises ModelError where its loss is not that of the next token."""
    first = next(module.parameters())
    vocabulary = int(module.config.get_text_config().vocab_size)
    ids = torch.randint(0, vocabulary, (2, 8), generator=torch.Generator().manual_seed(0))
    training = module.training
    try:
        return shifts_labels(
            module.eval(), ids.to(first.device), f"the loss of {type(module).__name__}'s forward"
        )
    finally:
        module.train(training)


def _cross_entropy(logits: Tensor, labels: Tensor) -> float:
    flat = logits.reshape(-1, logits.shape[-1])
    wide = flat if flat.dtype == torch.float64 else flat.float()
    return float(F.cross_entropy(wide, labels.reshape(-1), ignore_index=-100))


def _loss_keys(config: Any) -> list[str]:
    """Keys of a configuration that weigh a loss, with their values."""
    return [
        f"{key}={value}"
        for key, value in config.to_dict().items()
        if "loss" in key and "router" not in key and isinstance(value, float) and value
    ]
