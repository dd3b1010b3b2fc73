"""Megatron-LM and Megatron-Bridge.

Rules: megatron/training/arguments.py (validate_args), core/parallel_state.py,
core/pipeline_parallel/schedules.py and core/transformer/moe/moe_layer.py of Megatron-LM at
d98e8a64 (22 August 2026, megatron-core 0.20.0); Megatron-Bridge 0.7.0 at 067f987d.
"""

from __future__ import annotations

from typing import Any

from hocket.planning.tools.job import Tool, ToolJob, flags_text
from hocket.planning.tools.limits import LayoutRule, ToolLimits, ToolRule, is_schedule
from hocket.spec import recompute
from hocket.spec.layout import Layout

MEGATRON_RULES = (
    ToolRule(
        "interleaved with {microbatches} microbatches: they must be a multiple of pp {pp}",
        lambda at, _: (
            is_schedule(at, "interleaved")
            & ((at.microbatches < at.pp) | (at.microbatches % at.pp != 0))
        ),
    ),
    ToolRule(
        "{virtual_stages} virtual stages with schedule {schedule}: its virtual stages are "
        "interleaved 1F1B",
        lambda at, _: (at.virtual > 1) & ~is_schedule(at, "interleaved"),
    ),
    ToolRule(
        "tp {tp} without sequence parallelism: it rejects that for models with experts",
        lambda at, facts: (at.tp > 1) & (at.sequence_parallel == 0) & (facts.experts > 0),
    ),
    ToolRule(
        "shard {shard} with ep {ep}: dp / shard must divide the data ranks of an expert",
        lambda at, _: (
            (at.zero > 0) & ((at.dp * at.cp * at.tp / (at.ep * at.etp)) % (at.dp / at.shard) != 0)
        ),
    ),
    ToolRule(
        "seq_len {seq_len} with tp {tp} and cp {cp}: it must divide by tp x cp",
        lambda at, facts: (at.sequence_parallel > 0) & (facts.seq_len % (at.tp * at.cp) != 0),
    ),
    ToolRule(
        "seq_len {seq_len} with cp {cp}: it must divide by 2 x cp",
        lambda at, facts: (at.cp > 1) & (facts.seq_len % (2 * at.cp) != 0),
    ),
    ToolRule(
        "recompute activation of a dense model: it recomputes those of experts alone",
        lambda at, facts: at.recomputes("activation") & (facts.experts == 0),
    ),
    ToolRule(
        "recompute norm or activation with precision {precision}: its rules have them for 8 bits",
        lambda at, facts: (
            (at.recomputes("norm") | at.recomputes("activation")) & (facts.precision == "fp4")
        ),
    ),
)

_PRECISIONS = ("bf16", "fp16", "fp32", "fp8", "fp4")
_PIPELINE_FIRST = ("tp", "cp", "pp", "dp")
_DEFAULT = ("tp", "cp", "dp", "pp")


def _late_pipeline(layout: Layout) -> bool:
    """Whether pipeline ranks vary before data ranks do."""
    split = [axis for axis in layout.order if layout.degree(axis) > 1]
    return split != [axis for axis in _DEFAULT if axis in split]


_LAYOUT_RULES = (
    LayoutRule(
        "rank order {order} with ep {ep}: expert data ranks must be as many as data ranks",
        lambda layout, _: _late_pipeline(layout) and 1 < layout.ep != layout.cp,
    ),
)

_RECOMPUTE = (*recompute.CHOICES, "mlp")

LIMITS = ToolLimits(
    software="Megatron-LM at d98e8a64 (2026-08-22, megatron-core 0.20.0)",
    schedules=("1f1b", "interleaved"),
    recompute=_RECOMPUTE,
    precisions=_PRECISIONS,
    orders=(_DEFAULT, _PIPELINE_FIRST),
    offload=("none", "optimizer"),
    predictions=True,
    rules=MEGATRON_RULES,
    layout_rules=(
        *_LAYOUT_RULES,
        LayoutRule(
            "offload optimizer with zero {zero}: it needs zero=1",
            lambda layout, _: layout.offload == "optimizer" and layout.zero != 1,
        ),
    ),
)

BRIDGE = ToolLimits(
    software="Megatron-Bridge 0.7.0 at 067f987d (2026-08-22)",
    schedules=LIMITS.schedules,
    recompute=_RECOMPUTE,
    precisions=("bf16", "fp16"),
    orders=(_DEFAULT, _PIPELINE_FIRST),
    predictions=True,
    rules=MEGATRON_RULES,
    layout_rules=(
        *_LAYOUT_RULES,
        LayoutRule(
            "rank order {order} with zero {zero}: Megatron-FSDP has tp-cp-dp-pp",
            lambda layout, _: _late_pipeline(layout) and layout.zero >= 2,
        ),
    ),
)

_STRATEGIES = {2: "optim_grads", 3: "optim_grads_params"}


def _megatron_stages(job: ToolJob) -> str:
    """Layers per stage in Megatron's notation: `Et*9|t*9|t*8|t*6mL` (m: multi-token prediction)."""
    parts = [f"t*{count}" if count else "" for count in job.cut]
    return "E" + "|".join(parts) + "m" * job.facts.predictions + "L"


def _pipeline(job: ToolJob) -> tuple[int | None, str | None]:
    """Virtual stages and the layout of layers, of which Megatron takes one at most."""
    if job.layout.pp == 1:
        return None, None
    if not job.even:
        return None, _megatron_stages(job)
    return (job.layout.virtual_stages if job.layout.virtual_stages > 1 else None), None


def _megatron_environment(job: ToolJob) -> str | None:
    """The line that sets CUDA_DEVICE_MAX_CONNECTIONS, where Megatron checks it."""
    layout = job.layout
    if layout.zero >= 2:
        return "unset CUDA_DEVICE_MAX_CONNECTIONS"
    blackwell = job.facts.capability is not None and job.facts.capability[0] >= 10
    if (layout.tp > 1 or layout.cp > 1) and not blackwell:
        return "export CUDA_DEVICE_MAX_CONNECTIONS=1"
    return None


def _recompute(job: ToolJob) -> tuple[str | None, list[str] | None]:
    """The granularity, and the modules where it is theirs.

    A mixture's dense layers keep their activation functions' results: Megatron has no module for
    them.
    """
    asked = job.layout.recompute
    if asked in ("none", "selective", "full"):
        return (None if asked == "none" else asked), None
    modules = [one for one in recompute.modules(asked) if one != "mla_up" or job.facts.latent]
    return ("selective", [recompute.MEGATRON[one] for one in modules]) if modules else (None, None)


def _megatron_flags(job: ToolJob) -> dict[str, Any]:
    layout, precision = job.layout, job.facts.precision
    virtual, stages = _pipeline(job)
    shard = layout.shard or layout.dp
    strategy = _STRATEGIES.get(layout.zero)
    full = layout.recompute == "full"
    granularity, modules = _recompute(job)
    return {
        "--tensor-model-parallel-size": layout.tp,
        "--pipeline-model-parallel-size": layout.pp,
        "--num-virtual-stages-per-pipeline-rank": virtual,
        "--pipeline-model-parallel-layout": None if stages is None else f"'{stages}'",
        "--context-parallel-size": layout.cp,
        "--cp-comm-type": {"ring": "p2p", "ulysses": "a2a"}.get(job.context),
        "--expert-model-parallel-size": layout.ep if layout.ep > 1 else None,
        "--expert-tensor-parallel-size": layout.etp,
        "--moe-grouped-gemm": job.facts.experts > 0,
        "--moe-token-dispatcher-type": "alltoall" if layout.ep > 1 else None,
        "--sequence-parallel": layout.sequence_parallel and layout.tp > 1,
        "--use-tp-pp-dp-mapping": _late_pipeline(layout),
        "--use-distributed-optimizer": layout.zero > 0,
        "--num-distributed-optimizer-instances": layout.dp // shard
        if layout.zero and shard < layout.dp
        else None,
        "--use-megatron-fsdp": strategy is not None,
        "--data-parallel-sharding-strategy": strategy,
        "--ckpt-format": None if strategy is None else "fsdp_dtensor",
        "--no-gradient-accumulation-fusion": strategy is not None,
        "--overlap-grad-reduce": layout.dp * layout.cp > 1 or layout.zero > 0,
        "--overlap-param-gather": layout.zero > 0,
        "--optimizer-cpu-offload": layout.offload == "optimizer",
        "--use-precision-aware-optimizer": layout.offload == "optimizer",
        "--recompute-granularity": granularity,
        "--recompute-modules": None if modules is None else " ".join(modules),
        "--recompute-method": "uniform" if full else None,
        "--recompute-num-layers": 1 if full else None,
        "--mtp-num-layers": job.facts.predictions or None,
        "--micro-batch-size": job.microbatch,
        "--global-batch-size": job.facts.global_batch,
        "--seq-length": job.facts.seq_len,
        "--attention-backend": None if precision == "fp32" else "flash",
        "--fp16": precision == "fp16",
        "--bf16": precision in ("bf16", "fp8", "fp4"),
        "--fp8-format": "hybrid" if precision == "fp8" else None,
        # Its default, delayed scaling, rejects norms and activations that are made again.
        **({"--fp8-recipe": "tensorwise"} if precision == "fp8" and modules else {}),
        "--fp4-format": "e2m1" if precision == "fp4" else None,
    }


def _write(job: ToolJob) -> str:
    notes = [
        f"{LIMITS.software}, {job.layout.world_size} GPUs",
        "append to pretrain_gpt.py and the model's own flags (--num-layers, ...)",
    ]
    head = "".join(f"# {note}\n" for note in notes)
    line = _megatron_environment(job)
    return head + (f"{line}\n" if line else "") + flags_text(_megatron_flags(job), ())


BRIDGE_DEFAULTS: dict[str, Any] = {
    "model.recompute_modules": None,
    "model.cp_comm_type": None,
    "dist.use_tp_pp_dp_mapping": False,
    "ddp.use_megatron_fsdp": False,
    "ddp.data_parallel_sharding_strategy": "no_shard",
    "checkpoint.ckpt_format": "torch_dist",
}
"""Of attributes that `bridge_values` leaves out where a layout does not need them."""


def bridge_values(job: ToolJob) -> dict[str, Any]:
    """Attributes of Megatron-Bridge's ConfigContainer."""
    layout = job.layout
    virtual, stages = _pipeline(job)
    strategy = _STRATEGIES.get(layout.zero)
    shard = layout.shard or layout.dp
    full = layout.recompute == "full"
    granularity, modules = _recompute(job)
    values: dict[str, Any] = {
        "model.tensor_model_parallel_size": layout.tp,
        "model.pipeline_model_parallel_size": layout.pp,
        "model.virtual_pipeline_model_parallel_size": virtual,
        "model.pipeline_model_parallel_layout": stages,
        "model.context_parallel_size": layout.cp,
        "model.expert_model_parallel_size": layout.ep,
        "model.expert_tensor_parallel_size": layout.etp,
        "model.sequence_parallel": layout.sequence_parallel and layout.tp > 1,
        "model.recompute_granularity": granularity,
        "model.recompute_method": "uniform" if full else None,
        "model.recompute_num_layers": 1 if full else None,
        "model.seq_length": job.facts.seq_len,
        "train.micro_batch_size": job.microbatch,
        "train.global_batch_size": job.facts.global_batch,
        "ddp.use_distributed_optimizer": layout.zero > 0,
        "ddp.num_distributed_optimizer_instances": layout.dp // shard if layout.zero else 1,
        "ddp.overlap_grad_reduce": layout.dp * layout.cp > 1 or layout.zero > 0,
        "ddp.overlap_param_gather": layout.zero > 0,
        "mixed_precision": f"{job.facts.precision}_mixed",
    }
    if modules is not None:
        values["model.recompute_modules"] = modules
    if job.facts.predictions:
        values["model.mtp_num_layers"] = job.facts.predictions
    if layout.cp > 1:
        values["model.cp_comm_type"] = {"ring": "p2p", "ulysses": "a2a"}[job.context or "ring"]
    if _late_pipeline(layout):
        values["dist.use_tp_pp_dp_mapping"] = True
    if strategy is not None:
        values["ddp.use_megatron_fsdp"] = True
        values["ddp.data_parallel_sharding_strategy"] = strategy
        values["checkpoint.ckpt_format"] = "fsdp_dtensor"
    return values


def _bridge(job: ToolJob) -> str:
    values, line = bridge_values(job), _megatron_environment(job)
    lines = [
        f"# {BRIDGE.software}, {job.layout.world_size} GPUs",
        *([f"# environment: {line}"] if line else []),
        "# cfg = one of megatron.bridge.recipes' functions, called; then apply_layout(cfg)",
        "def apply_layout(cfg):",
        *(f"    cfg.{name} = {value!r}" for name, value in values.items()),
        "    return cfg",
    ]
    return "\n".join(lines) + "\n"


MEGATRON = Tool(name="megatron", limits=LIMITS, write=_write)
MEGATRON_BRIDGE = Tool(name="megatron-bridge", limits=BRIDGE, write=_bridge)
