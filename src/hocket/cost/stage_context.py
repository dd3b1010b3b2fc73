"""The fields of a stage's share that come from context parallelism, and what recompute repeats."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from hocket.spec import recompute
from hocket.spec.layout import Layout
from hocket.spec.model_shape import Attention, Handed
from hocket.spec.placement import Placement
from hocket.spec.plan import ParallelPlan


def over_context(
    plan: ParallelPlan,
    placements: Mapping[str, Placement],
    layout: Layout,
    handed: Mapping[str, Handed],
    cores: Collection[tuple[Attention, bool]],
) -> dict[str, Any]:
    """The fields of a share that come from context parallelism."""
    if layout.cp == 1:
        return {}

    def attentions(held: Mapping[str, Placement], gradient: bool = True) -> tuple[Attention, ...]:
        return tuple(
            core.on_rank(layout.tp)
            for core, has_gradient in cores
            if has_gradient == gradient and any(p.startswith(f"{core.name}.") for p in held)
        )

    def states(held: Mapping[str, Placement]) -> tuple[Handed, ...]:
        return tuple(h for n, h in handed.items() if any(p.startswith(f"{n}.") for p in held))

    found: dict[str, Any] = {
        "attentions": attentions(placements),
        "attentions_constant": attentions(placements, gradient=False),
        "handed": states(placements),
    }
    if layout.recompute == "full" or "core_attn" in recompute.modules(layout.recompute):
        again = recomputed_placements(plan, placements, layout)
        found["attentions_again"] = attentions(again)
        found["handed_again"] = states(again) if layout.recompute == "full" else ()
    return found


def recomputed_placements(
    plan: ParallelPlan, placements: Mapping[str, Placement], layout: Layout
) -> dict[str, Placement]:
    """The placements of the layers that are recomputed."""
    assert plan.stages is not None
    prefix = f"{plan.stages.layers}."
    inside = {name: p for name, p in placements.items() if name.startswith(prefix)}
    numbers = sorted({int(name[len(prefix) :].partition(".")[0]) for name in inside})
    kept = {f"{prefix}{number}." for number in numbers[: layout.recompute_layers]}
    return {
        name: p
        for name, p in inside.items()
        if f"{prefix}{name[len(prefix) :].partition('.')[0]}." in kept
    }
