"""One forward of a model on the meta device: what it runs, and how often, without a value."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from torch import Tensor, nn

from hocket.models.plans.experts import named_experts
from hocket.models.rows import one_sequence_each
from hocket.spec.errors import ModelError
from hocket.spec.model_shape import ModuleRuns

_TOKENS = 8


def meta_forward(model: nn.Module) -> None:
    """Run a model that is on the meta device, in evaluation mode and with gradients. Its stacked
    experts return zeros: what they compute depends on values.

    Raises:
        ModelError: its forward reads values elsewhere.
    """
    for _, module in named_experts(model):
        if any(p.ndim == 3 for p in module.parameters(recurse=False)):
            module.forward = _zeros  # type: ignore[method-assign]
    takes = inspect.signature(model.forward).parameters
    given: dict[str, Any] = {"input_ids": torch.zeros(1, _TOKENS, dtype=torch.long, device="meta")}
    if "position_ids" in takes:
        given["position_ids"] = torch.arange(_TOKENS, device="meta").unsqueeze(0)
    if "use_cache" in takes:
        given["use_cache"] = False
    try:
        with one_sequence_each(), torch.enable_grad():
            model.eval()(**given)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise ModelError(f"its forward reads values, which are not there yet: {reason}") from None


def _zeros(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return torch.zeros_like(hidden_states)


def module_runs(skeleton: nn.Module) -> dict[str, ModuleRuns]:
    """How often a forward runs each module, and on how much. Empty where it reads values."""
    model = copy.deepcopy(skeleton)
    found: dict[str, ModuleRuns] = {}
    read: dict[int, tuple[int, Tensor]] = {}  # they live until the end, so that ids differ

    def counted(name: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
            given = [*args, *kwargs.values()]
            first = kwargs.get("hidden_states", given[0] if given else None)
            result = out[0] if isinstance(out, tuple) and out else out
            if not isinstance(first, Tensor) or not isinstance(result, Tensor):
                return
            inputs, outputs = first.numel() // _TOKENS, result.numel() // _TOKENS
            before = found.get(name)
            found[name] = ModuleRuns(
                times=1 + (before.times if before else 0),
                learned=torch.is_grad_enabled() + (before.learned if before else 0),
                inputs=inputs,
                outputs=outputs,
                reads=before.reads if before else read.setdefault(id(first), (len(read), first))[0],
                weighted=len(given) > 2,
            )

        return hook

    for name, module in model.named_modules():
        module.register_forward_hook(counted(name), with_kwargs=True)
    try:
        meta_forward(model)
    except ModelError:
        return {}
    return found
