"""Theory compared with measurement: the collectives that a run's ranks should have made.

The expected rows need the model's plan, so they are made by one rank of the launcher, on the meta
device; the parent stays without torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hocket.spec.plan import matches
from hocket.spec.run import RunFolder, RunSpec, bucket_mb

if TYPE_CHECKING:
    from hocket.cost.stage_communication import StageShare
    from hocket.launch import RankContext
    from hocket.spec.placement import Placement
    from hocket.spec.plan import ParallelPlan


Row = dict[str, Any]


def main(context: RankContext, payload: dict[str, Any]) -> None:
    """In one rank: emit the expected rows of every rank of the run."""
    folder = RunFolder(payload["run"])
    from hocket.training.build import read_schedule

    schedule = read_schedule(folder.schedule_file)
    context.emit({"event": "theory", "ranks": expected_rows(folder.load(), schedule.stage_ranks)})


def expected_rows(
    spec: RunSpec, stage_ranks: tuple[int, ...], ranks: Iterable[int] | None = None
) -> list[list[Row]]:
    """The expected rows of ranks, from the plan of the model and nothing that ran.

    Args:
        ranks: global ranks. None: every rank of the layout.
    """
    import torch

    from hocket.cost.communication import communication
    from hocket.cost.communication_table import Step
    from hocket.cost.stage_communication import StageShare
    from hocket.models.context import attention_cores
    from hocket.models.context_scans import state_sizes
    from hocket.models.meta_forward import module_runs
    from hocket.models.plan_cache import built_plan
    from hocket.models.skeleton import build_skeleton
    from hocket.models.source import run_source
    from hocket.runtime.expert_parallel import apply_expert_parallel
    from hocket.runtime.fp8 import MULTIPLE
    from hocket.runtime.linear import block_linears
    from hocket.runtime.lora import adapter_placements
    from hocket.runtime.mesh import Axis
    from hocket.runtime.pipeline.cut import cut, cut_costs
    from hocket.runtime.record import Recorder
    from hocket.runtime.tensor_parallel import apply_tensor_parallel
    from hocket.spec.cut import choose_cut
    from hocket.spec.expert_dispatch import DEEPEP, num_nodes
    from hocket.training.build import dtype_of, lora_of

    layout, workload = spec.layout, spec.workload
    dtype = dtype_of(workload.dtype)
    source = run_source(spec)
    skeleton = build_skeleton(
        source.config,
        attention=spec.options.attention,
        dtype=dtype,
        dropout=spec.options.dropout,
        code=source.code,
    )
    plan = built_plan(skeleton, sequence=layout.sequence_parallel)
    lora = lora_of(skeleton, spec.options)
    num_stages = len(stage_ranks)
    device = spec.options.device
    cuda = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    bounds: tuple[int, ...] | None = None
    if num_stages > 1:
        assert plan.stages is not None
        costs = cut_costs(skeleton, plan.stages, cuda=cuda)
        bounds = choose_cut(layout.pipeline_split, plan.stages.num_layers, num_stages, **costs)
    element_bytes = routing = torch.empty(0, dtype=dtype).element_size()
    choices = int(source.config.get("num_experts_per_tok") or 0)
    if layout.splits_experts or layout.tp > 1:
        routing, choices = routing_of(skeleton, plan) or (element_bytes, choices)
    step = Step(
        seq_len=workload.seq_len // layout.cp,
        microbatch_size=workload.global_batch // layout.dp // (layout.microbatches or 1),
        num_microbatches=layout.microbatches or 1,
        hidden_size=source.dimensions.hidden_size,
        element_bytes=element_bytes,
        experts_per_token=choices,
        expert_nodes=num_nodes(spec.options.expert_dispatch, layout),
        experts_by_library=spec.options.expert_dispatch == DEEPEP,
        counts_tokens=False,  # the training loop knows the number: no sequence is padded
        bucket_bytes=1e6 * bucket_mb(spec.options.bucket_mb, cuda=cuda, dp=layout.data_degree),
        context_parallel=spec.options.context_parallel,
    )

    def share(stage: int, tp_index: int, ep_index: int) -> StageShare:
        import copy

        part = copy.deepcopy(skeleton)
        if bounds is not None:
            assert plan.stages is not None
            part = cut(skeleton, plan.stages, bounds, stage)
        axis = Axis("tp", layout.tp, tp_index, tuple(range(layout.tp)), None)
        placements = apply_tensor_parallel(
            part, plan.tensor_for(layout), axis, Recorder(0), plan.sequence
        )
        if layout.splits_experts and plan.experts is not None:
            apply_expert_parallel(
                part,
                plan.experts,
                placements,
                experts=Axis("expert", layout.ep, ep_index, tuple(range(layout.ep)), None),
                tokens=Axis("tp"),
                recorder=Recorder(0),
            )
        for tied, owner in plan.ties.items() if num_stages > 1 else ():
            if tied in placements:
                placements[tied] = dataclasses.replace(placements[tied], tie=owner)
        names = [
            (name, type(part.get_submodule(name)).__name__ == "Conv1D")
            for name in (lora.targets if lora is not None else ())
            if f"{name}.weight" in placements
        ]
        products = {}
        for name, transposed in names:
            assert lora is not None
            weight = placements[f"{name}.weight"]
            products[name] = adapter_placements(
                f"{name}.", weight, transposed=transposed, rank=lora.rank
            )
        if lora is not None:
            placements = _with_products(placements, products)
        fp8 = [
            name.removesuffix(".weight")
            for name, place in placements.items()
            if workload.dtype == "fp8"
            and plan.stages is not None
            and name.startswith(f"{plan.stages.layers}.")
            and name.endswith(".weight")
            and not any(size % MULTIPLE for size in place.local_shape)
        ]
        packed: list[str] = []
        if spec.options.quantize_base is not None:
            assert plan.stages is not None
            packed = [name for name, _ in block_linears(part, plan.stages.layers)]
        return StageShare.of_plan(
            plan,
            placements,
            layout,
            fp8=frozenset(fp8),
            packed={f"{name}.weight" for name in packed},
            routing_width=routing // element_bytes,
            trained=None
            if lora is None
            else {place.name for pair in products.values() for place in pair},
            constant=constant,
            stage=stage,
            num_stages=num_stages,
            experts_per_token=choices,
            handed=handed,
            cores=cores,
            runs=runs,
        )

    handed = state_sizes(skeleton, source.dimensions.hidden_size) if layout.cp > 1 else {}
    constant = {name for name, p in skeleton.named_parameters() if not p.requires_grad}
    cores = attention_cores(skeleton) if layout.cp > 1 else []
    runs = module_runs(skeleton) if layout.tp > 1 else {}
    shares: dict[tuple[int, int, int], StageShare] = {}
    places = {rank: i for row in layout.expert_groups("expert") for i, rank in enumerate(row)}
    found = []
    for rank in range(layout.world_size) if ranks is None else ranks:
        where = layout.coordinate(rank)
        held = [stage for stage, place in enumerate(stage_ranks) if place == where["pp"]]
        for stage in held:
            key = stage, where["tp"], places[rank]
            if key not in shares:
                shares[key] = share(*key)
        mine = [shares[stage, where["tp"], places[rank]] for stage in held]
        found.append(communication(layout, rank, step, mine, stage_ranks))
    return found


def _with_products(
    placements: Mapping[str, Placement], products: Mapping[str, Sequence[Placement]]
) -> dict[str, Placement]:
    """Placements in module order, those of each adapted module's products behind its own."""
    found: dict[str, Placement] = {}
    names = list(placements)
    for index, name in enumerate(names):
        found[name] = placements[name]
        module = name.rpartition(".")[0]
        if index + 1 == len(names) or names[index + 1].rpartition(".")[0] != module:
            found |= {place.name: place for place in products.get(module, ())}
    return found


def routing_of(skeleton: Any, plan: ParallelPlan) -> tuple[int, int] | None:
    """Bytes of a routing weight and experts of a token, of the first experts of a model on the meta
    device, whose forward runs up to them; None: it has none, or its forward reads values before
    them."""
    import torch

    from hocket.models.rows import one_sequence_each

    found: list[tuple[int, int]] = []

    class Reached(Exception):
        pass

    def before(module: Any, args: Any, kwargs: Any) -> None:
        given = [*args, *kwargs.values()]
        if len(given) > 2:
            found.append((given[2].element_size(), given[2].shape[-1]))
        raise Reached

    splits = plan.tensor.splits if plan.tensor is not None else {}
    patterns = [pattern for pattern, split in splits.items() if split.style == "experts"]
    patterns += plan.experts.modules if plan.experts is not None else ()
    hooks = [
        module.register_forward_pre_hook(before, with_kwargs=True)
        for name, module in skeleton.named_modules()
        if any(matches(pattern, name) for pattern in patterns)
    ]
    if not hooks:
        return None
    ids = torch.zeros(1, 8, dtype=torch.long, device="meta")
    try:
        with torch.no_grad(), one_sequence_each():
            skeleton(input_ids=ids)
    except (Reached, RuntimeError):
        pass
    finally:
        for hook in hooks:
            hook.remove()
    return found[0] if found else None
