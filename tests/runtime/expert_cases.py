"""What ranks run in the tests of expert parallelism: one module of experts, routed by hand."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hocket.models.experts import skip_absent
from hocket.models.plans.experts import expert_plan
from hocket.models.skeleton import build_skeleton
from hocket.runtime.collectives import all_reduce
from hocket.runtime.expert_parallel import (
    DeepEP,
    NodeAxes,
    apply_expert_parallel,
    balancer_of,
    gather_experts,
)
from hocket.runtime.mesh import Axis, Mesh
from hocket.spec.layout import Layout
from hocket.spec.placement import Placement
from tests.families import EXPERTS, FAMILIES
from tests.runtime import deep_ep_emulated

WIDTH = 32


def block(family: str) -> nn.Module:
    """The first set of experts of a tiny model, computed as its family writes it: by a loop."""
    model: Any = build_skeleton({**FAMILIES, **EXPERTS}[family], device="cpu", dropout=0.0)
    model.set_experts_implementation("eager")
    found = next(m for n, m in model.named_modules() if n.endswith(".experts"))
    holder = nn.Module()
    holder.experts = found
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        with torch.no_grad():
            for parameter in holder.parameters():
                parameter.copy_(0.3 * torch.randn(parameter.shape))
    return holder


def choices(routing: str, tokens: int, experts: int, generator: torch.Generator) -> Tensor:
    """[tokens, k], experts of each token."""
    if routing == "one":
        return torch.full((tokens, 1), 1)
    if routing == "empty":  # neither the last expert, nor any of the first half
        return (
            experts // 2
            + torch.rand(tokens, experts // 2 - 1, generator=generator).argsort(1)[:, :2]
        )
    return torch.rand(tokens, experts, generator=generator).argsort(1)[:, :2]


def tokens_of(rank: int, routing: str, experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(hidden, choices, routing weights, gradient of the output) of one data rank; each has
    another number of tokens."""
    generator = torch.Generator().manual_seed(100 + rank)
    count = 5 + 2 * rank
    index = choices(routing, count, experts, generator)
    hidden = torch.randn(count, WIDTH, generator=generator)
    weights = torch.rand(index.shape, generator=generator)
    return hidden, index, weights, torch.randn(count, WIDTH, generator=generator)


def experts(context: Any, layout: str, family: str, routing: str, way: str) -> dict[str, float]:
    """The largest relative difference from one process of: output, and gradients of tokens,
    routing weights and parameters; and of the output without gradients.

    Args:
        way: tokens are `dispatched`, sent once to each `node` of two ranks, moved by the `library`
            DeepEP (which is emulated), or `gathered` over the experts' ranks.
    """
    where = Layout.parse(layout)
    mesh = Mesh(where, context.rank)
    whole, holder = block(family), block(family)
    plan, why = expert_plan(holder, None)
    assert plan is not None, why
    count = whole.experts.num_experts
    given = [tokens_of(rank, routing, count) for rank in range(where.dp)]
    hidden, index, weights, gradient = (torch.cat(parts) for parts in zip(*given, strict=True))
    hidden.requires_grad_(), weights.requires_grad_()
    wanted = whole.experts(hidden, index, weights)
    wanted.backward(gradient)

    placements = {n: Placement.whole(n, tuple(p.shape)) for n, p in holder.named_parameters()}
    token_axis = mesh.axis("tp") if where.tp > 1 else Axis("tp")
    nodes = None
    if way == "node":
        assert mesh.prepare_nodes(2)
        nodes = NodeAxes(mesh.axis("expert_rail"), mesh.axis("expert_node"))
    deep_ep = None
    if way == "library":
        deep_ep_emulated.install()
        deep_ep = DeepEP(mesh.axis("expert"), mesh.recorder)
    apply_expert_parallel(
        holder, plan, placements,
        experts=mesh.axis("expert"), tokens=token_axis, recorder=mesh.recorder,
        nodes=nodes,
        deep_ep=deep_ep,
    )  # fmt: skip
    if way == "gathered":
        holder.experts.config._experts_implementation = "grouped_mm"
        counts, why = gather_experts(holder, skip_absent)
        assert counts is not None, why
        counts.rows = max(len(part[0]) for part in given)
    me = mesh.axis("dp").index
    own, chosen, own_weights, own_gradient = given[me]
    own.requires_grad_(), own_weights.requires_grad_()
    out = holder.experts(own, chosen, own_weights)
    out.backward(own_gradient)
    first = sum(len(part[0]) for part in given[:me])
    mine = slice(first, first + len(own))
    found = {
        "output": _gap(out, wanted[mine]),
        "hidden": _gap(own.grad, hidden.grad[mine]),
        "weights": _gap(own_weights.grad, weights.grad[mine]),
    }
    whole_parameters = dict(whole.named_parameters())
    for name, parameter in holder.named_parameters():
        assert parameter.grad is not None, f"{name} has no gradient on rank {context.rank}"
        total = parameter.grad.clone()
        all_reduce(total, mesh.axis("expert_data"), mesh.recorder)
        (box,) = placements[name].blocks
        reference = whole_parameters[name].grad
        reference = torch.zeros_like(whole_parameters[name]) if reference is None else reference
        assert tuple(total.shape) == placements[name].local_shape
        assert len(total) == count // where.ep
        found[name] = _gap(total, reference[box.in_global], float(reference.abs().max()))
    found["rows"] = float(holder.experts.load.sum())
    sent = sum(r["bytes"] for r in mesh.recorder.collectives() if r["axis"] == "expert_rail")
    found["crossed"] = float(sent)
    part = slice(None)
    if where.tp > 1:  # each of two tensor ranks takes a part of the tokens
        half = -(-len(own) // 2)
        part = slice(half, None) if mesh.axis("tp").index else slice(half)
    routed = chosen[part].tolist()
    distinct = len({(t, e // (count // 2)) for t, row in enumerate(routed) for e in row})
    # Counts by expert and node; of each row its choices, and of two forwards and one backward the
    # row there and back, and its weights.
    first_forward = 8 * (count + 2) + distinct * (8 * index.shape[1])
    found["to cross"] = float(
        first_forward
        + distinct * (2 * 4 * WIDTH + 4 * index.shape[1])  # forward
        + distinct * (2 * 4 * WIDTH + 4 * index.shape[1])  # backward
    )
    with torch.no_grad():
        found["served"] = _gap(holder.experts(own, chosen, own_weights), wanted[mine])
    return found


def _gap(one: Tensor, other: Tensor, scale: float = 0.0) -> float:
    largest = scale or float(other.abs().max()) or 1.0
    return float((one - other).abs().max()) / largest if other.numel() else 0.0


def copied(context: Any, layout: str, family: str, way: str) -> dict[str, Any]:
    """The largest relative difference from one process of the output of experts with copies, as
    they are placed first and after each of two placements by what the tokens chose; the rows of
    the rank with most over the mean before and after; and whether all weights are where the tables
    say."""
    where = Layout.parse(layout)
    mesh = Mesh(where, context.rank)
    whole, holder = block(family), block(family)
    plan, why = expert_plan(holder, None)
    assert plan is not None, why
    count = whole.experts.num_experts
    placements = {n: Placement.whole(n, tuple(p.shape)) for n, p in holder.named_parameters()}
    apply_expert_parallel(
        holder, plan, placements,
        experts=mesh.axis("expert"), tokens=mesh.axis("tp") if where.tp > 1 else Axis("tp"),
        recorder=mesh.recorder, redundant=where.ep,
    )  # fmt: skip
    module: Any = holder.experts
    wanted = dict(whole.named_parameters())
    for name, parameter in holder.named_parameters():
        for there, here in placements[name].pairs():
            assert torch.equal(parameter[here], wanted[name][there]), name
    me = mesh.axis("dp").index
    given = [tokens_of(rank, "one", count) for rank in range(where.dp)]
    if way == "gathered":
        module.config._experts_implementation = "grouped_mm"
        counts, why = gather_experts(holder, skip_absent)
        assert counts is not None, why
        counts.rows = max(len(part[0]) for part in given)
    hidden, index, weights, _ = given[me]
    balancer = balancer_of(holder, 1)
    assert balancer is not None
    gaps, imbalance = [], []
    with torch.no_grad():
        reference = whole.experts(hidden, index, weights)
        for _ in range(3):
            gaps.append(_gap(holder.experts(hidden, index, weights), reference))
            balancer.step()
            imbalance.append(balancer.imbalance)
    slots = module.num_experts
    first = mesh.axis("expert").index * slots
    mine = module.copies.experts[first : first + slots]
    held = all(torch.equal(p, wanted[name][mine]) for name, p in holder.named_parameters())
    return {"gaps": gaps, "imbalance": imbalance, "held": held, "experts": module.copies.experts}
