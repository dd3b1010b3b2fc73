"""Build: everything one rank of a training job is made of, composed from its RunSpec.

    world     device, process group, mesh
    source    where the model comes from         skeleton  the whole model on the meta device
    plan      how it may be split                parallel  this rank's stages, still without memory
    weights   values for those, not read yet     finish    memory, values, buckets, ties, norms
    optimizer

Nothing here communicates but the making of groups, so every rank builds at its own pace.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hocket.models.attention import choose_kernels_on_cuda
from hocket.models.context import leave_graphs, own_attention, split_sequences, use_whole_rows
from hocket.models.experts import replace_grouped_mm
from hocket.models.lora import alpha_of, targets_of
from hocket.models.masks import of_whole_sequences
from hocket.models.plan_cache import built_plan
from hocket.models.skeleton import build_skeleton
from hocket.models.source import ModelSource, run_source
from hocket.models.weights import Weights
from hocket.runtime.allocator import keep_freed_memory
from hocket.runtime.base_4bit import quantize_base
from hocket.runtime.context_parallel import ContextParallel, whole_rows
from hocket.runtime.context_parallel.apply import CONTEXT
from hocket.runtime.device import (
    claim_device,
    host_threads,
    pick_backend,
    pick_device,
    ranks_here,
)
from hocket.runtime.fp8 import multiply_in_fp8
from hocket.runtime.fp8_weights import store_in_fp8
from hocket.runtime.lora import Lora, adapt
from hocket.runtime.mesh import Axis, Mesh
from hocket.runtime.offload import OffloadedLayer, SavedOnHost, offload_activations
from hocket.runtime.parallelize import Parallel, parallelize
from hocket.runtime.recompute import CORE, RecomputedLayer
from hocket.runtime.record import Recorder
from hocket.runtime.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from hocket.runtime.tensor_parallel.sequence import IN_GRAPH
from hocket.runtime.triton import grouped_gemm
from hocket.spec.capabilities import refused_precision
from hocket.spec.errors import ModelError, OptionError, unknown
from hocket.spec.links import Links
from hocket.spec.plan import ParallelPlan
from hocket.spec.run import RunSpec, TrainOptions
from hocket.spec.schedule import Schedule
from hocket.training.optimizer import Optimizer

if TYPE_CHECKING:
    from hocket.launch import RankContext

DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp8": torch.bfloat16,
}
"""Of parameters, by the dtype that was asked for: fp8 is one of products alone."""


@dataclasses.dataclass(kw_only=True)
class RankJob:
    """What one rank trains with.

    Attributes:
        source, skeleton, plan: the whole model: where from, without memory, how it may be split.
        parallel: this rank's part of it.
        optimizer: over the parameters of that part.
    """

    spec: RunSpec
    mesh: Mesh
    source: ModelSource
    skeleton: nn.Module
    plan: ParallelPlan
    parallel: Parallel
    optimizer: Optimizer


def join_world(spec: RunSpec, context: RankContext) -> Mesh:
    """Choose this rank's device and backend, meet the other ranks, and make the mesh.

    Raises:
        OptionError: a device or backend that this machine does not have.
        LayoutError: the world has another size than the layout.
    """
    options = spec.options
    if options.emulate_links is not None and not context.one_machine:
        raise OptionError("--emulate-links joins ranks of one machine, these are on several")
    wanted = context.device_kind if options.device == "auto" else options.device
    device = pick_device(wanted, context.local_rank)
    for text in claim_device(device):
        context.emit({"event": "note", "text": f"rank {context.rank}: {text}"})
    if device.type == "cuda":
        torch.set_float32_matmul_precision("highest" if spec.workload.dtype == "fp32" else "high")
    recorder = Recorder(context.rank, device)
    if context.world_size == 1:
        pick_backend(options.backend, device, 1, context.one_machine)  # refuses what cannot be
    else:
        backend = _agreed_backend(options.backend, device, context)
        if backend == "shm":
            import hocket.runtime.shm  # noqa: F401  registers the backend
        if options.emulate_links is not None:
            install_links(Links.parse(options.emulate_links), backend, context, recorder)
            backend = "links"
        # The parent sees silence sooner and says more of it; this is for worlds without one.
        context.init_process_group(backend, device, timeout=max(options.timeout, 600.0))
    if device.type == "cpu":
        keep_freed_memory()
    mesh = Mesh(spec.layout, context.rank, device, recorder)
    context.position = mesh.position
    return mesh


def install_links(links: Links, inner: str, context: RankContext, recorder: Recorder) -> None:
    """Let the groups that are made from now on feel `links`, in what belongs to a step.

    What is recorded as `other` (building, evaluating, saving, exporting) costs nothing on them.
    """
    from hocket.runtime.links import install

    install(
        links,
        rank=context.rank,
        world_size=context.world_size,
        store=context.store(),
        inner=inner,
        active=lambda: recorder.phase != "other",
    )


def _agreed_backend(wanted: str, device: torch.device, context: RankContext) -> str:
    """Rank 0's choice: what `auto` finds (free memory, say) may differ from rank to rank."""
    mine = pick_backend(wanted, device, context.world_size, context.one_machine)
    store = context.store()
    if context.rank == 0:
        store.set("backend", mine)
    return str(store.get("backend").decode())


def build_model(
    spec: RunSpec,
    mesh: Mesh,
    schedule: Schedule | None,
    plan: ParallelPlan | None = None,
    *,
    labels_shifted: bool = True,
) -> tuple[ModelSource, nn.Module, ParallelPlan, Parallel]:
    """This rank's part of the model that a RunSpec names, with its values, ready to step.

    `plan` is how the model may be split, where that is known already; None: it is found here.
    Labels are shifted as the data pipeline's are, unless `labels_shifted` is False.

    Raises:
        ModelError: the model cannot be built, or not split as the layout asks.
        WeightsError: weight files whose names or shapes do not fit.
    """
    options = spec.options
    dtype = dtype_of(spec.workload.dtype)
    source = run_source(spec)
    skeleton = build_skeleton(
        source.config,
        attention=options.attention,
        dtype=dtype,
        dropout=options.dropout,
        code=source.code,
        router_loss=spec.command not in ("serve", "generate"),
    )
    plan = plan or built_plan(skeleton, sequence=spec.layout.sequence_parallel)
    if spec.layout.sequence_parallel:
        of_whole_sequences()
    if mesh.device.type == "cuda":
        choose_kernels_on_cuda(skeleton, asked=options.attention)
        group_experts()
    if spec.layout.cp > 1 and spec.command != "serve":  # whose attention has ranks of its own
        over_context_ranks(skeleton, plan)
    parallel = parallelize(
        skeleton,
        spec.layout,
        plan,
        mesh=mesh,
        schedule=schedule,
        seed=options.seed,
        bucket_mb=options.bucket_mb,
        labels_shifted=labels_shifted,
        context_parallel=options.context_parallel,
        expert_dispatch=options.expert_dispatch,
        redundant_experts=0 if spec.serving is None else spec.serving.redundant_experts,
    )
    parallel.forward_only = spec.command == "serve"
    weights = [
        Weights(
            stage.module,
            stage.placements,
            skeleton,
            source,
            device=mesh.device,
            dtype=dtype,
            seed=options.seed,
        )
        for stage in parallel.stages
    ]
    lora = lora_of(skeleton, options)
    if lora is not None:
        adapt(parallel, lora)
    keep_gradients(parallel, options)
    if options.quantize_base is not None:
        quantize_base(parallel, [each.fill for each in weights])
    if spec.workload.dtype == "fp8":
        why = refused_precision(
            "fp8",
            cuda=mesh.device.type == "cuda",
            capability=torch.cuda.get_device_capability(mesh.device)
            if mesh.device.type == "cuda"
            else None,
        )
        if why is not None:
            raise OptionError(why, hint="--dtype bf16")
        for stage in parallel.stages:
            multiply_in_fp8(stage.module, plan.stages)
    if spec.serving is not None and spec.serving.quantization is not None:
        group_experts()
        store_in_fp8(parallel, [each.fill for each in weights])
    parallel.finish([each.fill for each in weights])
    for each in weights:
        each.close()
    if spec.layout.offloads("activations"):
        offloaded_to_host(parallel)
    if options.compile:
        for stage in parallel.stages:
            compile_blocks(stage.module, plan)
    parallel.train()
    return source, skeleton, plan, parallel


def build_rank_job(
    spec: RunSpec,
    context: RankContext,
    schedule: Schedule | None = None,
    *,
    labels_shifted: bool = True,
) -> RankJob:
    """All of it, from the process group to the optimizer. Every rank calls it.

    Args:
        spec: what is trained.
        context: this rank's place.
        schedule: when everything runs; with one stage None accumulates gradients.
        labels_shifted: as for `build_model`.
    """
    mesh = join_world(spec, context)
    source, skeleton, plan, parallel = build_model(
        spec, mesh, schedule, labels_shifted=labels_shifted
    )
    optimizer = build_optimizer(parallel, spec.options)
    return RankJob(
        spec=spec,
        mesh=mesh,
        source=source,
        skeleton=skeleton,
        plan=plan,
        parallel=parallel,
        optimizer=optimizer,
    )


def keep_gradients(parallel: Parallel, options: TrainOptions) -> None:
    """Say in which dtype gradients are kept and summed: fp32 unless less was asked for, since
    each is a sum of many small terms, over microbatches and data ranks. Before `finish`."""
    for parameter in parallel.parameters():
        parameter.grad_dtype = dtype_of(options.grad_dtype)


def offloaded_to_host(parallel: Parallel, **more: Any) -> list[SavedOnHost]:
    """Keep in host memory what layers save for backward; `more` as `SavedOnHost`. After
    `finish`."""
    found = []
    for stage in parallel.stages:
        if parallel.plan.stages is None:
            reason = parallel.plan.reasons.get("stages", "its plan names no layers")
            raise OptionError(f"no layer's activations can be offloaded: {reason}")
        saved = SavedOnHost(stage.module.parameters(), **more)
        layers = stage.module.get_submodule(parallel.plan.stages.layers).children()
        held = [layer for layer in layers if any(True for _ in layer.parameters())]
        offload_activations(held, saved)
        found.append(saved)
    return found


def build_optimizer(parallel: Parallel, options: TrainOptions) -> Optimizer:
    """The optimizer of what this rank steps: its parameters, or with ZeRO its share of them."""
    shapes = {name: placement.shape for name, placement in parallel.placements.items()}
    on_host = parallel.layout.offloads("optimizer")
    stepped_there = on_host or parallel.layout.offloads("params")
    if stepped_there and parallel.mesh.device.type == "cuda" and torch.cuda.is_available():
        torch.set_num_threads(max(options.threads, host_threads(ranks_here())))
    return Optimizer(parallel.named_stepped(), options, shapes, on_host=on_host)


def lora_of(skeleton: nn.Module, options: TrainOptions) -> Lora | None:
    """What is trained in addition to the frozen model; None where it is the model itself.

    Raises:
        OptionError, ModelError: targets that are not there, or no linear layers.
    """
    if options.lora_rank is None:
        return None
    return Lora(
        rank=options.lora_rank,
        alpha=alpha_of(options),
        dropout=options.lora_dropout,
        targets=targets_of(skeleton, options.lora_targets),
        seed=options.seed,
    )


def compile_blocks(
    module: nn.Module,
    plan: ParallelPlan,
    backend: str = "inductor",
    *,
    functional: bool | None = None,
) -> None:
    """Compile each layer by itself: one small graph, compiled once for all equal layers.

    What communicates or seeds random numbers runs as it is, between compiled parts: collectives
    of our own are nothing that a graph can hold. They can be functional ones (None: on CUDA), which
    are inside the graph: one graph a layer.
    """
    if plan.stages is None:
        return
    if functional is None:
        functional = any(p.is_cuda for p in module.parameters())
    layers = list(module.get_submodule(plan.stages.layers).children())
    # Layers that differ have a graph each, with and without gradients. Beyond torch's limit of 8
    # the others would silently run uncompiled.
    limit = max(8, 2 * len(layers))
    for layer in layers:
        if not any(True for _ in layer.parameters()):
            continue  # cut away
        inside = functional and _in_graph(layer)
        for child in layer.modules():
            if isinstance(getattr(child, "axis", None), Axis) and not inside:
                child.forward = torch.compiler.disable(child.forward)  # type: ignore[no-untyped-call]
            context = getattr(child, CONTEXT, None)
            if isinstance(context, ContextParallel):
                leave_graphs()
                context.leave_graphs()
            if hasattr(child, CORE):
                setattr(child, CORE, torch.compiler.disable(getattr(child, CORE)))  # type: ignore[no-untyped-call]
            hooks: dict[int, Any]
            for hooks in (child._forward_pre_hooks, child._forward_hooks):
                for key, hook in hooks.items():
                    if not (inside and getattr(hook, IN_GRAPH, False)):
                        hooks[key] = torch.compiler.disable(hook)  # type: ignore[no-untyped-call]
        again = vars(layer).get("forward")
        if isinstance(again, RecomputedLayer | OffloadedLayer):  # which stay outside of any graph
            compiled: Any = torch.compile  # whose overloads lack the limit
            again.inner = compiled(
                again.inner, dynamic=False, backend=backend, recompile_limit=limit
            )
            layer.forward = torch.compiler.disable(again, recursive=False)  # type: ignore[assignment, no-untyped-call]
        else:
            layer.compile(dynamic=False, backend=backend, recompile_limit=limit)


def _in_graph(layer: nn.Module) -> bool:
    """Whether a layer's collectives may be inside a graph: those of slices of sequences, and of
    column- and row-parallel layers that gather and split nothing; where no module switches random
    streams."""
    split = [child for child in layer.modules() if isinstance(getattr(child, "axis", None), Axis)]
    if not split or any(getattr(child, "streams", None) is not None for child in split):
        return False
    return any(getattr(child, "slices", False) for child in split) or all(
        isinstance(child, ColumnParallelLinear | RowParallelLinear)
        and getattr(child, "gather", None) is None
        and getattr(child, "scatter", None) is None
        for child in split
    )


def dtype_of(name: str) -> torch.dtype:
    """The dtype that `--dtype` names. Raises OptionError for another name."""
    if name not in DTYPES:
        message, hint = unknown("dtype", name, DTYPES)
        raise OptionError(message, hint=hint)
    return DTYPES[name]


def over_context_ranks(model: nn.Module, plan: ParallelPlan | None = None) -> None:
    """Let the attention of a Hugging Face model go over context ranks.

    Raises:
        ModelError: its sequences cannot be split; or, as the plan says, its layers ask transformers
            for no attention function, so that each rank would attend to its own tokens alone.
    """
    if plan is not None and plan.stages is not None and not plan.stages.cores:
        why = own_attention(model)
        if why:
            raise ModelError(
                f"{type(model).__name__} cannot be split over cp: {why}", hint="--layout cp1"
            )
    use_whole_rows(whole_rows)
    split_sequences(model)


def group_experts() -> None:
    """Let experts on CUDA be multiplied without a host read, whatever their dtype and GPU."""
    replace_grouped_mm(grouped_gemm.grouped_mm, grouped_gemm.takes)


def read_schedule(path: Path) -> Schedule:
    """The schedule that a run folder holds."""
    return Schedule.parse(path.read_text())
