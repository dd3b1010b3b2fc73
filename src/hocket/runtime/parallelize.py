"""Parallel: a module carried out in a layout; all the axes composed.

parallelize   cut stages (pp), split them (tp); still on the meta device if the module was
finish        buckets of gradients (dp), ties, norm, random streams: needs real tensors
a step        forward_backward -> clip_grad_norm -> optimizer
"""

from __future__ import annotations

import copy
import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hocket.runtime.collectives import all_reduce
from hocket.runtime.context_parallel import ContextParallel, apply_context_parallel
from hocket.runtime.device import pick_device
from hocket.runtime.expert_parallel import DeepEP, NodeAxes, apply_expert_parallel
from hocket.runtime.loss import NextTokenLoss, OwnLoss, router_degree
from hocket.runtime.mesh import Axis, Mesh
from hocket.runtime.parallel import Parallel
from hocket.runtime.pipeline.cut import cut, cut_costs
from hocket.runtime.pipeline.stage import LossFunction, Stage
from hocket.runtime.tensor_parallel import apply_tensor_parallel, copies_needed
from hocket.spec.capabilities import absent, runnable
from hocket.spec.cut import choose_cut
from hocket.spec.errors import LayoutError, ModelError
from hocket.spec.expert_dispatch import DEEPEP, parse_dispatch
from hocket.spec.launcher_variables import launcher_number
from hocket.spec.layout import Layout
from hocket.spec.legality import narrowed
from hocket.spec.placement import Placement
from hocket.spec.plan import (
    ParallelPlan,
    experts_rejected,
    recompute_rejected,
    router_loss_rejected,
)
from hocket.spec.schedule import Schedule

__all__ = ["Parallel", "parallelize"]


def parallelize(
    module: nn.Module,
    layout: Layout,
    plan: ParallelPlan | None = None,
    *,
    mesh: Mesh | None = None,
    schedule: Schedule | None = None,
    loss_fn: LossFunction | None = None,
    bounds: Sequence[int] | None = None,
    seed: int = 0,
    bucket_mb: float | None = None,
    labels_shifted: bool = False,
    context_parallel: str = "auto",
    expert_dispatch: str = "direct",
    redundant_experts: int = 0,
    kind: type[Parallel] = Parallel,
) -> Parallel:
    """Take this rank's part of `module`. Call on every rank of the world with equal arguments.

    A module on the meta device is left as it is and its part stays on the meta device: give it
    values, then call `finish`. A module with values (the same on every rank) is changed in place,
    keeps its slices of them, moves to the mesh's device and is ready.

    Args:
        module: any module; with several stages or tensor ranks it needs a plan that says how.
        layout: how it is split.
        plan: how it may be split. None: not at all, for data parallelism alone.
        mesh: None: made here, over the default process group or, without one, of one rank.
        schedule: when everything runs; needed with several stages.
        loss_fn: `(output, microbatch) -> (sum of losses, number of tokens)`, of whole logits. None:
            next-token cross-entropy of the output's `logits` (or of the output) against `labels`.
        bounds: layers per stage. None: as `layout.pipeline_split` says.
        seed: of the random numbers that dropout draws.
        bucket_mb: size of a gradient bucket in MB. None: by the device.
        labels_shifted: `labels[:, i]` is the token after `input_ids[:, i]`. False: transformers'
            convention, labels are at the positions of their tokens and -100 is ignored.
        context_parallel: how keys meet queries of other ranks' tokens (cp): `ring`, `ulysses` or
            `auto` (`runtime.context_parallel.ContextParallel`). The module's attention must go
            through it; a loss function of the caller's is given shifted labels.
        expert_dispatch: `direct`, `node:RANKS` or `deepep` (`spec.expert_dispatch`).
        redundant_experts: copies of experts over the ranks of ep, for inference
            (`runtime.expert_parallel.copies`).
        kind: the class of what is returned.

    Raises:
        LayoutError: the layout does not fit the world or the module.
        ModelError: the plan does not fit the module, or lacks what the layout needs.
    """
    plan = plan or ParallelPlan()
    _check(layout, plan, schedule)
    if mesh is None:
        rank = dist.get_rank() if dist.is_initialized() else 0
        mesh = Mesh(layout, rank, _device_of(module, rank))
    num_stages = layout.num_stages if schedule is None else schedule.num_stages
    place = (0,) if schedule is None else schedule.stage_ranks
    meta = any(p.is_meta for p in module.parameters())
    if not meta:
        _check_equal(module, mesh)
    crossing = plan.crossing() if num_stages > 1 else {}
    mesh.prepare(
        copies_needed(plan.tensor, layout.tp), tie=(place[0], place[-1]) if crossing else False
    )
    if num_stages > 1:
        assert plan.stages is not None
        if bounds is None:
            bounds = choose_cut(
                layout.pipeline_split,
                plan.stages.num_layers,
                num_stages,
                **cut_costs(module, plan.stages, cuda=mesh.device.type == "cuda"),
            )
    nodes = _expert_nodes(mesh, expert_dispatch)
    deep = None
    if expert_dispatch == DEEPEP:
        deep = DeepEP(mesh.axis("expert"), mesh.recorder)
    sequence = plan.sequence if layout.sequence_parallel and layout.tp > 1 else None
    stages = []
    for index in [s for s, r in enumerate(place) if r == mesh.axis("pp").index]:
        if num_stages > 1:
            assert plan.stages is not None
            assert bounds is not None
            part = cut(module, plan.stages, bounds, index)
        else:
            part = copy.deepcopy(module) if meta else module
        placements = apply_tensor_parallel(
            part, plan.tensor_for(layout), mesh.axis("tp"), mesh.recorder, sequence
        )
        if layout.splits_experts:
            assert plan.experts is not None
            tokens_replicated = layout.etp is not None and sequence is None
            apply_expert_parallel(
                part,
                plan.experts,
                placements,
                experts=mesh.axis("expert"),
                tokens=mesh.axis("tp") if tokens_replicated else Axis("tp"),
                recorder=mesh.recorder,
                nodes=nodes,
                deep_ep=deep,
                redundant=redundant_experts,
            )
        if layout.cp > 1:
            given = ContextParallel(mesh.axis("cp"), mesh.recorder, context_parallel)
            apply_context_parallel(part, given)
        for tied, owner in crossing.items():
            if tied in placements:
                placements[tied] = dataclasses.replace(placements[tied], tie=owner)
        last = index == num_stages - 1
        stages.append(
            Stage(
                part,
                index,
                num_stages,
                plan=plan.stages,
                placements=placements,
                loss_fn=None
                if not last
                else OwnLoss(loss_fn, part)
                if loss_fn is not None
                else _default_loss(part, mesh, plan, placements, labels_shifted),
                hidden_size=plan.hidden_size,
                slices=None if sequence is None else (sequence, layout.tp),
            )
        )
    parallel = kind(layout, mesh, plan, stages, schedule, bounds=bounds, seed=seed)
    parallel.bucket_mb = bucket_mb
    parallel.labels_shifted = labels_shifted if loss_fn is None else None
    if not meta:
        for stage in stages:
            stage.module.to(mesh.device)
        parallel.finish()
    return parallel


def _expert_nodes(mesh: Mesh, dispatch: str) -> NodeAxes | None:
    ranks = parse_dispatch(dispatch)[1]
    if ranks is None or not mesh.prepare_nodes(ranks):
        return None
    return NodeAxes(across=mesh.axis("expert_rail"), inside=mesh.axis("expert_node"))


def _default_loss(
    part: nn.Module,
    mesh: Mesh,
    plan: ParallelPlan,
    placements: Mapping[str, Placement],
    labels_shifted: bool,
) -> NextTokenLoss:
    router = plan.router
    degree = 1 if router is None else router_degree(router, placements, mesh.axis("tp").size)
    shifted = labels_shifted or mesh.axis("cp").size > 1  # before sequences were split
    return NextTokenLoss(part, mesh, labels_shifted=shifted, router=router, router_degree=degree)


def _check(layout: Layout, plan: ParallelPlan, schedule: Schedule | None) -> None:
    """Refuse what the layout asks for and the plan, or this version, does not have."""
    asked = absent(layout)
    if asked:
        raise LayoutError(
            f"parallelize does not do {', '.join(row.field for row in asked)}; "
            f"the layout is {layout}",
            hint=f"--layout {runnable(layout).axes_text()}",
        )
    if plan.router is not None and (why := router_loss_rejected(layout, plan.router)):
        one = layout.flag_with(pp=1, virtual_stages=1, data_parallel="processes")
        raise ModelError(why, hint=one)
    if layout.tp > 1 and plan.tensor is None:
        reason = plan.reasons.get("tensor", "its plan splits no tensors")
        raise ModelError(
            f"the module cannot be split over tp {layout.tp}: {reason}",
            hint=narrowed(layout, tp=1, sequence_parallel=False).flag_with(),
        )
    if layout.tp > 1 and layout.sequence_parallel and plan.sequence is None:
        reason = plan.reasons.get("sequence", "its plan does not support sequence parallelism")
        raise ModelError(
            f"the module does not support sequence parallelism: {reason}",
            hint=layout.flag_with(sequence_parallel=False),
        )
    rejected = experts_rejected(layout, plan)
    if rejected is not None:
        raise ModelError(rejected[0], hint=rejected[1])
    tensor = plan.tensor_for(layout)
    if tensor is not None:
        for segment in tensor.segments():
            segment.slice(0, layout.tp)
    if why := recompute_rejected(layout.recompute, plan):
        other = "none" if plan.stages is None else "full"
        raise ModelError(f"recompute is {layout.recompute}: {why}", hint=f"--recompute {other}")
    if schedule is None:
        if layout.num_stages > 1:
            raise LayoutError(
                f"{layout.num_stages} stages need a schedule",
                hint="schedule=hocket.schedules.registry.build_schedule(layout, num_microbatches)",
            )
    elif schedule.num_ranks != layout.pp:
        raise LayoutError(
            f"the schedule {schedule.name} is for {schedule.num_ranks} pipeline ranks, "
            f"the layout has pp {layout.pp}"
        )
    elif schedule.num_stages > 1 and plan.stages is None:
        reason = plan.reasons.get("stages", "its plan names no layers")
        one = layout.flag_with(pp=1, virtual_stages=1, pipeline_split="balanced")
        raise ModelError(f"the module cannot be cut into stages: {reason}", hint=one)


def _device_of(module: nn.Module, rank: int) -> torch.device:
    """The device of a rank that was given no mesh: CUDA only if the process group is for it, and
    then the current one from here on. A loop of one's own may have left that at 0 in every rank,
    where Triton would launch, and of which events and streams without a device would be."""
    first = next(module.parameters(), None)
    device = torch.device("cpu") if first is None or first.is_meta else first.device
    if dist.is_initialized():
        world: Any = dist.group.WORLD
        kind = "cuda" if dist.get_backend() == "nccl" else "cpu"
        local = launcher_number(os.environ, "LOCAL_RANK", rank)
        bound = world.bound_device_id
        device = pick_device(kind, local) if bound is None else torch.device(bound)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


@torch.no_grad()
def _check_equal(module: nn.Module, mesh: Mesh) -> None:
    """Refuse a module whose values differ between ranks: it would train to nonsense in silence."""
    sums = [p.sum(dtype=torch.float64) for p in module.parameters()]
    if not sums:
        return
    total = torch.stack(sums).to(mesh.device)
    for (name, _), value in zip(module.named_parameters(), total.tolist(), strict=True):
        if math.isnan(value):  # unequal to itself on every rank
            raise ModelError(f"{name} has values that are not finite numbers")
    if mesh.world_size == 1:
        return
    low, high = total.clone(), total.clone()
    all_reduce(low, mesh.axis("world"), mesh.recorder, op="min")
    all_reduce(high, mesh.axis("world"), mesh.recorder, op="max")
    differing = [
        name
        for (name, _), a, b in zip(module.named_parameters(), low, high, strict=True)
        if not torch.equal(a, b)
    ]
    if differing:
        raise ModelError(
            f"the ranks hold different values of {len(differing)} parameters, "
            f"the first of them {differing[0]}",
            hint="torch.manual_seed(0) before the module is made",
        )
