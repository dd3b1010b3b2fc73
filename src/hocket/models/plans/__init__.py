"""How a Hugging Face model may be split: its tensors over ranks, its layers over stages."""

from __future__ import annotations

from typing import Any

from torch import nn

from hocket.models.failure import failure_place, raise_if_exhausted
from hocket.models.plans.experts import expert_plan
from hocket.models.plans.families import FAMILIES
from hocket.models.plans.positions import counts_from_mask
from hocket.models.plans.router import router_loss
from hocket.models.plans.sequence import sequence_plan
from hocket.models.plans.stages import stage_plan
from hocket.models.plans.tensor import tensor_plan
from hocket.models.proxy import proxy_of
from hocket.spec.errors import ModelError
from hocket.spec.plan import ParallelPlan


def plan_for(model: nn.Module, *, sequence: bool = False) -> ParallelPlan:
    """The plan of a whole causal language model (a skeleton on the meta device will do).

    A kind of split that is not possible is None in the plan, with the reason in `plan.reasons`;
    a reason given with a split names the blocks that are replicated. Only with `sequence`
    is it tried whether the model runs on slices of its sequences, which takes two small forwards.
    """
    config: Any = model.config
    reasons: dict[str, str] = {}
    stages = proxy = None
    try:
        proxy = proxy_of(config)
        stages = stage_plan(proxy, model)
        decoder = stages.decoder
    except ModelError as error:
        reasons["stages"] = error.message
        decoder = str(getattr(model, "base_model_prefix", ""))
    except Exception as error:  # a forward of any family may fail in its own way
        reasons["stages"] = f"its tiny proxy model does not run: it fails in {failure_place(error)}"
        decoder = str(getattr(model, "base_model_prefix", ""))
    try:
        layers = stages.layers if stages is not None else ""
        tensor, note = tensor_plan(model, decoder, proxy, layers)
    except Exception as error:  # heads that vary by layer raise kinds of their own
        raise_if_exhausted(error)
        said = str(error).partition(". ")[0]
        tensor, note = None, f"its configuration keeps head counts in another way ({said})"
    if note:
        reasons["tensor"] = note
    experts, why = expert_plan(model, tensor)
    if why:
        reasons["experts"] = why
    from_mask = False
    try:
        from_mask = proxy is not None and counts_from_mask(proxy)
    except Exception as error:  # a proxy model that does not run has reasons of its own
        raise_if_exhausted(error)
    slices = None
    if sequence:
        try:
            slices = sequence_plan(proxy, model, tensor, stages)
        except ModelError as error:
            reasons["sequence"] = error.message
    known = config.model_type in FAMILIES or getattr(config, "base_model_tp_plan", None)
    return ParallelPlan(
        tensor=tensor,
        experts=experts,
        inferred=tensor is not None and not known,
        stages=stages,
        sequence=slices,
        mask_positions=from_mask,
        hidden_size=int(config.get_text_config().hidden_size),
        ties=_ties(model),
        router=router_loss(model),
        reasons=reasons,
    )


def _ties(model: nn.Module) -> dict[str, str]:
    """Other names of a parameter to the one that owns it: as the model's class says, and as the
    module is, of which a head may have been replaced, or tied by hand."""
    every = dict(model.named_parameters(remove_duplicate=False))
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    found = {
        tied: owner
        for tied, owner in (getattr(model, "all_tied_weights_keys", None) or {}).items()
        if tied not in every
        or owner not in every
        or every[tied] is every[owner]
        or every[tied].is_meta
    }
    for name, parameter in every.items():
        owner = first[id(parameter)]
        if name != owner and name not in found and owner not in found:
            found[name] = owner
    return found
