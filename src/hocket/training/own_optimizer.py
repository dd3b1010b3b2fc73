"""The optimizer of one's own loop: what of it a checkpoint stores, by global name and by group.

state     per parameter: tensors, and numbers as tensors of one element
groups    what `torch.optim.Optimizer.load_state_dict` restores: learning rate, decay, counters
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hocket.spec.errors import CheckpointError, OptionError

Named = Iterable[tuple[str, Tensor]]
_NUMBERS = (bool, int, float)


def begin_state(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer make its state, changing no value."""
    groups = optimizer.param_groups
    rates = [group["lr"] for group in groups]
    parameters = [p for group in groups for p in group["params"] if p.requires_grad]
    for group in groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
    before = [p.grad for p in parameters]
    with torch.no_grad():
        for p in parameters:
            p.grad = torch.zeros_like(p)
        optimizer.step()
    for p, grad in zip(parameters, before, strict=True):
        p.grad = grad
    for group, rate in zip(groups, rates, strict=True):
        group["lr"] = rate


def state_of(optimizer: torch.optim.Optimizer, stepped: Named) -> dict[str, dict[str, Tensor]]:
    """By global name, an optimizer's state: its own tensors, and numbers as new ones.

    Raises:
        OptionError: the optimizer has tensors that are not among `stepped`, or a state that is
            neither a tensor nor a number.
    """
    named = list(stepped)
    _require_own(optimizer, {id(tensor) for _, tensor in named})
    found: dict[str, dict[str, Tensor]] = {}
    for name, tensor in named:
        for key, value in optimizer.state.get(tensor, {}).items():
            if isinstance(value, _NUMBERS):
                value = torch.tensor(float(value), dtype=torch.float64)
            elif value is not None and not isinstance(value, Tensor):
                raise OptionError(
                    f"the state {key!r} that {type(optimizer).__name__} has of {name} is a "
                    f"{type(value).__name__}; a checkpoint stores tensors and numbers",
                    hint="parallel.save_checkpoint(FOLDER) without the optimizer",
                )
            if value is not None:
                found.setdefault(name, {})[key] = value
    return found


def take_numbers(
    optimizer: torch.optim.Optimizer, stepped: Named, state: Mapping[str, Mapping[str, Tensor]]
) -> None:
    """Give the optimizer's state the numbers that `state_of` made tensors of and that were
    filled since."""
    for name, tensor in stepped:
        held = optimizer.state.get(tensor, {})
        for key, value in held.items():
            if isinstance(value, _NUMBERS):
                held[key] = type(value)(state[name][key].item())


def groups_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Of each parameter group the numbers, as JSON values."""
    return [
        {key: plain for key, value in group.items() if (plain := _plain(value)) is not None}
        for group in optimizer.param_groups
    ]


def take_groups(optimizer: torch.optim.Optimizer, saved: Sequence[Mapping[str, Any]]) -> None:
    """Give the parameter groups their numbers back, as torch's `load_state_dict` does.

    Raises:
        CheckpointError: the optimizer has another number of groups.
    """
    groups = optimizer.param_groups
    if len(groups) != len(saved):
        raise CheckpointError(
            f"the checkpoint's optimizer has {len(saved)} parameter groups, this one {len(groups)}",
            hint="groups of the same parameters in the same order",
        )
    for group, values in zip(groups, saved, strict=True):
        for key, value in values.items():
            if isinstance(group.get(key), Tensor):
                group[key].fill_(value)
            else:
                group[key] = tuple(value) if isinstance(value, list) else value


def _plain(value: Any) -> Any:
    """A number, or a tuple of numbers, as a JSON value; None for anything else."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, tuple) and all(isinstance(each, _NUMBERS) for each in value):
        return list(value)
    return value if isinstance(value, _NUMBERS) else None


def _require_own(optimizer: torch.optim.Optimizer, own: set[int]) -> None:
    tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
    others = sum(id(tensor) not in own for tensor in tensors)
    if others:
        raise OptionError(
            f"{others} of the optimizer's {len(tensors)} tensors are not this model's, as where it "
            "was made before parallelize(): their state cannot be saved or loaded",
            hint=f"torch.optim.{type(optimizer).__name__}(parallel.parameters(), lr=1e-4)",
        )
