"""Applying an expert plan: each rank keeps its experts, and their modules change their class."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from hocket.runtime.expert_parallel.copies import ExpertBalancer, ExpertCopies
from hocket.runtime.expert_parallel.deep_ep import DeepEP
from hocket.runtime.expert_parallel.experts import ExpertParallelExperts, sharded_experts_class
from hocket.runtime.expert_parallel.gathered import GatheredTokens
from hocket.runtime.expert_parallel.two_level import NodeAxes
from hocket.runtime.mesh import Axis
from hocket.runtime.record import Recorder
from hocket.spec.errors import LayoutError
from hocket.spec.expert_copies import first_copies
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
    deep_ep: DeepEP | None = None,
    redundant: int = 0,
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
        deep_ep: moves the tokens instead.
        redundant: copies of experts in each module, over all ranks, besides one of each.

    Raises:
        LayoutError: the number of experts, or of copies, does not divide.
    """
    for name, child in list(module.named_modules()):
        parameters = dict(child.named_parameters(recurse=False))
        if not parameters or not any(matches(pattern, name) for pattern in plan.modules):
            continue
        own: Any = child
        kind: Any = type(child)
        if own.num_experts % experts.size:
            raise LayoutError(f"{own.num_experts} experts do not divide over ep {experts.size}")
        if redundant % experts.size:
            raise LayoutError(f"{redundant} copies of experts do not divide over ep {experts.size}")
        every = list(range(own.num_experts))
        copies = None
        if redundant:
            every = first_copies(len(every), redundant, experts.size)
            copies = ExpertCopies.of(every, own.num_experts, experts.size)
        count = len(every) // experts.size
        mine = every[experts.index * count : (experts.index + 1) * count]
        for key, parameter in parameters.items():
            full = f"{name}.{key}"
            placements[full] = _placed(placements[full], mine)
            if experts.size > 1:
                kept = parameter.detach()[mine].clone()
                child._parameters[key] = nn.Parameter(kept, parameter.requires_grad)
        own.num_experts = count
        own.__class__ = sharded_experts_class(kind)
        own.copies = copies
        own.experts_axis, own.tokens_axis, own.experts_recorder = experts, tokens, recorder
        own.node_axes, own.deep_ep = nodes, deep_ep
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


def balancer_of(module: nn.Module, every: int) -> ExpertBalancer | None:
    """What places the copies of a stage's experts again every so many steps; None: it has none."""
    both = [m for m in module.modules() if isinstance(m, ExpertParallelExperts)]
    found = [m for m in both if m.copies is not None]
    return ExpertBalancer(found, every) if found else None


def _placed(placement: Placement, experts: list[int]) -> Placement:
    """The placement with these experts, which are dim 0."""
    blocks = []
    for block in placement.blocks:
        assert block.start[0] == 0, placement
        assert block.size[0] == placement.shape[0], placement
        for place, first, count in _runs(experts):
            blocks.append(
                TensorBlock(
                    start=(first, *block.start[1:]),
                    local=(place, *block.local[1:]),
                    size=(count, *block.size[1:]),
                    copies=block.copies,
                )
            )
    return dataclasses.replace(
        placement,
        local_shape=(len(experts), *placement.local_shape[1:]),
        blocks=tuple(blocks),
        sharded=(*placement.sharded, "ep"),
        replicated=(),
        grad_sum=(),
    )


def _runs(experts: list[int]) -> Iterator[tuple[int, int, int]]:
    """(place, first expert, number) of experts that follow each other."""
    place = 0
    while place < len(experts):
        end = place + 1
        while end < len(experts) and experts[end] == experts[end - 1] + 1:
            end += 1
        yield place, experts[place], end - place
        place = end
