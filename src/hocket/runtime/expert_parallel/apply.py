"""Applying an expert plan: each rank keeps its experts, and their modules change their class."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import nn

from hocket.runtime.expert_parallel.experts import ExpertParallelExperts, sharded_experts_class
from hocket.runtime.expert_parallel.gathered import GatheredTokens
from hocket.runtime.expert_parallel.two_level import NodeAxes
from hocket.runtime.mesh import Axis
from hocket.runtime.record import Recorder
from hocket.spec.errors import LayoutError
from hocket.spec.placement import Placement, TensorBlock
from hocket.spec.plan import ExpertPlan, matches


def apply_expert_parallel(
    module: nn.Module,
    plan: ExpertPlan,
    placements: dict[str, Placement],
    *,
    experts: Axis,
    tokens: Axis,
    recorder: Recorder,
    nodes: NodeAxes | None = None,
) -> None:
    """Keep this rank's experts of `module`, in place, and note where they are in `placements`.

    Comes after `apply_tensor_parallel`, which may have sliced each expert over tp. Works on a
    module that holds values and on one on the meta device; modules that a pipeline cut has replaced
    stay.

    Args:
        module: one stage.
        plan: names its modules of experts.
        placements: of its parameters; those of experts are replaced.
        experts: the ranks that together hold all experts.
        tokens: ranks that are given the same tokens although they are not slices of one expert; of
            one rank: none.
        recorder: of their messages.
        nodes: the ranks of `experts` as nodes, to each of which a token is sent once. None: a row
            is sent for each choice.

    Raises:
        LayoutError: the number of experts does not divide.
    """
    for name, child in list(module.named_modules()):
        parameters = dict(child.named_parameters(recurse=False))
        if not parameters or not any(matches(pattern, name) for pattern in plan.modules):
            continue
        own: Any = child
        kind: Any = type(child)
        if own.num_experts % experts.size:
            raise LayoutError(f"{own.num_experts} experts do not divide over ep {experts.size}")
        count = own.num_experts // experts.size
        first = experts.index * count
        for key, parameter in parameters.items():
            full = f"{name}.{key}"
            placements[full] = _placed(placements[full], first, count)
            if experts.size > 1:
                kept = parameter.detach()[first : first + count].clone()
                child._parameters[key] = nn.Parameter(kept, parameter.requires_grad)
        own.num_experts = count
        own.__class__ = sharded_experts_class(kind)
        own.experts_axis, own.tokens_axis, own.experts_recorder = experts, tokens, recorder
        own.node_axes = nodes
        if not isinstance(getattr(child, "axis", None), Axis):
            own.axis = experts  # as every split module has


def gather_experts(
    module: nn.Module, skip_absent: Callable[[nn.Module], str]
) -> tuple[GatheredTokens | None, str]:
    """Let the experts over ranks in `module` take gathered tokens, so that the host reads nothing.

    Args:
        skip_absent: has the forward of experts skip choices of `num_experts`; why it cannot, or
            nothing.

    Returns:
        What sets which steps are gathered; None: all are dispatched, for the reason that follows.
    """
    found = [m for m in module.modules() if isinstance(m, ExpertParallelExperts)]
    for one in found:
        why = skip_absent(one)
        if why:
            return None, why
    gathered = GatheredTokens()
    for one in found:
        one.gathered = gathered
    return gathered, ""


def _placed(placement: Placement, first: int, count: int) -> Placement:
    """The placement with `count` experts from number `first` on, which are dim 0."""
    blocks = []
    for block in placement.blocks:
        assert block.start[0] == 0, placement
        assert block.size[0] == placement.shape[0], placement
        blocks.append(
            TensorBlock(
                start=(first, *block.start[1:]),
                local=block.local,
                size=(count, *block.size[1:]),
                copies=block.copies,
            )
        )
    return dataclasses.replace(
        placement,
        local_shape=(count, *placement.local_shape[1:]),
        blocks=tuple(blocks),
        sharded=(*placement.sharded, "ep"),
        replicated=(),
        grad_sum=(),
    )
