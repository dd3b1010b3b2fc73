"""A proxy model, whole or split: its microbatch, its logits and gradients, and how far
those of two are apart."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

    from hocket.models.proxy import ProxyModel
    from hocket.spec.plan import ParallelPlan, RouterLoss

TOLERANCE = 1e-5
"""Largest difference of a logit, relative to the largest one."""

GRADIENT_TOLERANCE = (1e-4, 1e-7)
"""Largest difference of a gradient: of its own largest entry, of the model's largest gradient."""

GRADIENT = "the gradient"
"""How `proxy_differences` begins where the logits agree and a gradient does not."""

ROUTER_WEIGHT = 100.0
"""Of a router's auxiliary loss, so that its gradients are about as large as those of the logits."""

DRAWS = 2
"""Proxy models tried where the logits of the first agree and a gradient does not: an activation
that lies within its rounding of a kink (of a ReLU, of xIELU) tips over and takes a share of the
gradient with it. What a split leaves out is missing in every draw."""


def microbatch(
    proxy: ProxyModel, draw: int = 0, tokens: int = 16
) -> tuple[dict[str, Tensor], Tensor]:
    """Two sequences of S tokens, and weights [2, S, V] that turn logits into one number."""
    import torch

    from hocket.models.proxy import VOCABULARY

    generator = torch.Generator().manual_seed(1 + draw)
    vocabulary = int(getattr(proxy.config, "vocab_size", VOCABULARY))
    ids = torch.randint(3, vocabulary, (2, tokens), generator=generator)
    positions = torch.arange(tokens).expand(2, tokens).contiguous()
    weight = torch.randn((2, tokens, vocabulary), generator=generator)
    return {"input_ids": ids, "position_ids": positions}, weight


def outputs(
    model: nn.Module, inputs: dict[str, Tensor], plan: ParallelPlan | None = None, degree: int = 1
) -> Any:
    """What the model returns; where the plan has been asked for sequence shards, from these."""
    from hocket.runtime.pipeline.stage import Stage

    stage = Stage(model)
    if plan is not None and plan.sequence is not None:
        stage = Stage(model, plan=plan.stages, slices=(plan.sequence, degree))
    return stage.output(inputs)


def forward(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    logits: Tensor = outputs(model, inputs).logits
    return logits


def one_number(
    output: Any, weight: Tensor, router: RouterLoss | None, router_degree: int = 1
) -> Tensor:
    """The number whose gradients are compared: weighted logits, and a router's auxiliary loss."""
    from hocket.runtime.loss import auxiliary_loss

    total: Tensor = (output.logits * weight).sum()
    if router is not None:
        total = total + ROUTER_WEIGHT * auxiliary_loss(output, router_degree)
    return total


def taken_gradients(model: nn.Module) -> dict[str, Tensor]:
    """The gradients of a model, which forgets them."""
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def proxy_differences(
    expected: Tensor,
    logits: Tensor,
    gradients: dict[str, Tensor],
    found: dict[str, Tensor],
    plan: ParallelPlan,
) -> str:
    """Where the split proxy model's logits or gradients are not the whole one's; empty: nowhere."""
    scale = float(expected.abs().max())
    off = float((logits - expected).abs().max())
    if not off <= TOLERANCE * scale:
        return (
            f"the logits of its tiny proxy model differ by {off:.1e} (the largest is {scale:.1e})"
        )
    own, model = GRADIENT_TOLERANCE
    floor = model * max(float(g.abs().max()) for g in gradients.values())
    for name, gradient in gradients.items():
        parameter = name.split(" ")[0]
        if name not in found:
            return f"{plan.ties.get(parameter, parameter)} of its tiny proxy model gets no gradient"
        largest = float(gradient.abs().max())
        off = float((found[name] - gradient).abs().max())
        if not off <= max(own * largest, floor):
            share = off / largest if largest else float("inf")
            return (
                f"{GRADIENT} of {parameter} in its tiny proxy model differs by {100 * share:.2g}%"
            )
    return ""
