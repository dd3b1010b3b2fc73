"""The trial of context parallelism: a proxy model on two ranks, each with its tokens."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from hocket.models.dimensions import dimensions
from hocket.ranks.proxy.numbers import DRAWS, GRADIENT, microbatch, proxy_differences
from hocket.spec.errors import ModelError

if TYPE_CHECKING:
    from torch import Tensor

    from hocket.models.proxy import ProxyModel


def try_context(config: Any, attention: str, *, index: int, degree: int, group: Any = None) -> str:
    """Why the proxy model's sequences cannot be split over ranks; run on `degree` ranks.

    Logits and gradients are those of a ring: Ulysses goes the same way between its all-to-alls.

    Args:
        group: the ranks' process group. None: the default one.
    """
    from hocket.models.proxy import proxy_of

    try:
        proxy = proxy_of(config)
    except ModelError as error:
        return error.message
    for draw in range(DRAWS):
        reason = _try(proxy, attention, index=index, degree=degree, draw=draw, group=group)
        if not reason.startswith(GRADIENT):
            break
    return reason


def _try(
    proxy: ProxyModel, attention: str, *, index: int, degree: int, draw: int, group: Any
) -> str:
    """`try_context` with one draw of weights and tokens. Every rank returns the same."""
    import torch
    import torch.distributed as dist

    from hocket.models.context import own_attention
    from hocket.models.cores import watched
    from hocket.models.failure import failure_place
    from hocket.models.plans import plan_for
    from hocket.ranks.proxy.trial import proxy_reference, said_by_all
    from hocket.runtime.collectives import all_reduce
    from hocket.runtime.context_parallel import ContextParallel, apply_context_parallel, part_of
    from hocket.runtime.context_parallel.split import token_indices
    from hocket.runtime.mesh import Axis
    from hocket.runtime.pipeline.stage import Stage
    from hocket.runtime.record import Recorder
    from hocket.training.build import over_context_ranks

    axis = Axis("cp", degree, index, tuple(range(degree)), group or dist.group.WORLD)
    recorder = Recorder(index)
    try:
        model = proxy.build(seed=draw, attention=attention).train()
        width = dimensions(proxy.config.to_dict()).handed_width
        inputs, weight = microbatch(proxy, draw, max(16, 2 * degree * width))
        del inputs["position_ids"]  # whole rows are numbered by the model itself
        local = copy.deepcopy(model)
        for each in (model, local):  # its auxiliary loss is rejected by itself
            config: Any = each.config
            if getattr(config, "output_router_logits", False):
                config.output_router_logits = False
        with watched() as seen:
            expected, gradients = proxy_reference(model, inputs, weight)
        plan = plan_for(model)
    except ModelError as error:
        return error.message
    except Exception as error:  # the forward of a foreign family fails in its own way
        return f"its tiny proxy model does not run: it fails in {failure_place(error)}"
    if not seen and (reason := own_attention(model)):
        return reason
    # Every rank runs the same code on equal shapes: what a family rejects, all ranks reject.
    try:
        over_context_ranks(local)
        apply_context_parallel(local, ContextParallel(axis, recorder, "ring"))
        here = token_indices(weight.shape[1], index, degree)
        output = Stage(local).output(part_of(inputs, axis, labels_shifted=True))
        torch.autograd.backward((output.logits * weight[:, here]).sum())
    except ModelError as error:
        return error.message.partition("cannot be split over cp: ")[2] or error.message
    except Exception as error:
        return f"{failure_place(error)} fails on a part of the sequence"
    found: dict[str, Tensor] = {}
    for name, parameter in local.named_parameters():
        if name in gradients:
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            grad = grad.contiguous()
            all_reduce(grad, axis, recorder)
            found[name] = grad
    reason = proxy_differences(expected[:, here], output.logits.detach(), gradients, found, plan)
    return next((text for text in said_by_all(reason, axis, recorder) if text), "")
