"""Which weights of a model the ranks of a layout store in 8 bits, found on the meta device.

Nothing is computed and nothing communicates: a rank's shards follow from the plan alone. Data,
pipeline and context ranks store what others of them store, so tensor and expert ranks are enough.
"""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hocket.spec.errors import HocketError, ModelError
from hocket.spec.layout import Layout
from hocket.spec.serving import replica_layout

if TYPE_CHECKING:
    from hocket.launch import RankContext
    from hocket.spec.placement import Placement


def main(context: RankContext, payload: dict[str, Any]) -> None:
    """Emit `{"event": "eight_bits", "columns"}`: of each weight, by name, the columns of its input
    side that each tensor rank has, empty where they have all; or `{"event": "eight_bits",
    "rejected", "hint"}`.

    Payload: `config`, `code` (a directory or None), `layout` of one replica.
    """
    code = Path(payload["code"]) if payload.get("code") else None
    config, layout = payload["config"], Layout.parse(payload["layout"])
    try:
        found = columns_in_8_bits(config, layout, code)
    except HocketError as error:
        hint = _nearest(config, layout, code) or error.hint
        context.emit({"event": "eight_bits", "rejected": error.message, "hint": hint})
        return
    context.emit({"event": "eight_bits", "columns": found})


def _nearest(config: dict[str, Any], layout: Layout, code: Path | None) -> str:
    """The layout with the most tensor ranks below this one's in which the model can; or empty."""
    for tp in (degree for degree in range(layout.tp - 1, 0, -1) if layout.tp % degree == 0):
        fewer = replica_layout(dataclasses.replace(layout, tp=tp))
        with contextlib.suppress(HocketError):
            columns_in_8_bits(config, fewer, code)
            return f"--layout {fewer.axes_text()}"
    return ""


def columns_in_8_bits(
    config: dict[str, Any], layout: Layout, code: Path | None = None
) -> dict[str, list[list[int]]]:
    """Of each weight in 8 bits, by name, the input columns of each tensor rank; empty where every
    rank has all of them.

    Raises:
        ModelError: a rank stores none, the model's own code multiplies its experts, or ranks
            differ in what they store.
    """
    from hocket.models.plan_cache import built_plan
    from hocket.models.skeleton import build_skeleton
    from hocket.runtime.fp8_weights import weights_in_8_bits
    from hocket.runtime.linear import is_transposed
    from hocket.runtime.mesh import Mesh
    from hocket.runtime.parallelize import parallelize

    skeleton = build_skeleton(config, dropout=0.0, code=code)
    plan = built_plan(skeleton)
    one = dataclasses.replace(layout, pp=1, cp=1, pipeline_split="balanced")
    if layout.cp > 1 and one.splits_experts:  # experts' ranks are of context ranks too
        one = dataclasses.replace(one, dp=one.dp * layout.cp)
    found: dict[str, dict[tuple[int, ...], None]] = {}
    for rank in range(one.world_size):
        mesh = Mesh(one, rank, "meta", group_factory=lambda *_: None)
        parallel = parallelize(skeleton, one, plan, mesh=mesh)
        names = [name for _, name in weights_in_8_bits(parallel)]
        if found and set(names) != set(found):
            other = min(set(names) ^ set(found))
            raise ModelError(
                f"{other} has sides that are multiples of 16 on some tensor ranks alone, so that "
                "they would multiply it in different precisions",
                hint="--layout dp1",
            )
        (stage,) = parallel.stages
        for name in names:
            module: Any = stage.module.get_submodule(name.rpartition(".")[0])
            turned = is_transposed(module) or getattr(module, "is_transposed", False)
            place = parallel.placements[name]
            columns = _columns(place, -2 if turned else -1)
            found.setdefault(name, {})[columns] = None
    return {name: _split(list(each)) for name, each in found.items()}


def _columns(place: Placement, side: int) -> tuple[int, ...]:
    """Those of a rank's shard, in their order."""
    held = {(b.local[side], b.start[side], b.size[side]) for b in place.blocks}
    return tuple(n for _, start, size in sorted(held) for n in range(start, start + size))


def _split(ranks: list[tuple[int, ...]]) -> list[list[int]]:
    return [] if len(ranks) == 1 else [list(columns) for columns in ranks]
