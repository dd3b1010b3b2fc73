"""Adapters: a process that looks for what a run with LoRA asks of the model, on each stage.

The model is built without values, and split as each pipeline rank of the run will have it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hocket.launch import RankContext
    from hocket.spec.run import RunSpec
    from hocket.spec.schedule import Schedule


def main(context: RankContext, payload: dict[str, Any]) -> None:
    """The process's side of `require`. Payload: `spec`, `schedule` (its text)."""
    from hocket.models.lora import targets_of
    from hocket.spec.run import RunSpec
    from hocket.spec.schedule import Schedule

    spec = RunSpec.from_json(payload["spec"])
    layers = targets_of(_skeleton(spec), spec.options.lora_targets)
    first: dict[int, int] = {}
    for rank in range(spec.layout.world_size):
        first.setdefault(spec.layout.coordinate(rank)["pp"], rank)
    for rank in first.values():
        _require(spec, Schedule.parse(payload["schedule"]), rank)
    context.emit({"event": "adapters", "layers": len(layers)})


def _skeleton(spec: RunSpec) -> Any:
    from hocket.models.skeleton import build_skeleton
    from hocket.models.source import run_source

    source = run_source(spec)
    return build_skeleton(source.config, attention="sdpa", code=source.code)


def _require(spec: RunSpec, schedule: Schedule, rank: int) -> None:
    """Reject adapters, or a base in 4 bits, that this rank cannot have."""
    from hocket.models.plan_cache import built_plan
    from hocket.runtime.base_4bit import require_whole_blocks
    from hocket.runtime.lora import adapt
    from hocket.runtime.parallelize import parallelize
    from hocket.training.build import lora_of
    from hocket.training.memory_forecast import silent_mesh

    skeleton, layout = _skeleton(spec), spec.layout
    plan = built_plan(skeleton, sequence=layout.sequence_parallel)
    mesh = silent_mesh(layout, rank)
    parallel = parallelize(skeleton, layout, plan, mesh=mesh, schedule=schedule)
    lora = lora_of(skeleton, spec.options)
    assert lora is not None
    adapt(parallel, lora, values=False)
    if spec.options.quantize_base is not None:
        require_whole_blocks(parallel)
