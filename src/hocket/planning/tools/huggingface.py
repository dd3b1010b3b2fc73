"""accelerate, and NeMo Automodel, which trains Hugging Face models.

Rules: accelerate/parallelism_config.py, commands/launch.py, commands/config/config_args.py of
accelerate 1.15.0; nemo_automodel at 36044ad3 (22 August 2026).
"""

from __future__ import annotations

from typing import Any

from hocket.planning.tools.job import Tool, ToolJob
from hocket.planning.tools.limits import ToolLimits, ToolRule

ACCELERATE_LIMITS = ToolLimits(
    software="accelerate 1.15.0",
    axes=("dp", "cp", "tp"),
    zero=(0, 2, 3),
    recompute=("none", "full"),
    sequence_parallel=(False,),
    precisions=("bf16", "fp32"),
    offload=("none", "params"),
    context=("ring",),
    rules=(
        ToolRule(
            "zero {zero} with tp {tp} and cp {cp}: it replicates a model over data ranks alone",
            lambda at, _: (at.zero == 0) & (at.tp * at.cp > 1) & (at.dp * at.cp > 1),
        ),
        ToolRule(
            "shard {shard} of dp {dp}: fewer than 2 data ranks share a state",
            lambda at, _: (at.zero > 0) & (at.shard < 2) & (at.dp > 1),
        ),
        ToolRule(
            "tp {tp} of {experts} experts: Hugging Face models split no experts over tp",
            lambda at, facts: (at.tp > 1) & (facts.experts > 0),
        ),
        ToolRule(
            "zero {zero} with dp {dp} and cp {cp}: FSDP needs several ranks that share a state",
            lambda at, _: (at.tp > 1) & (at.dp * at.cp == 1),
        ),
    ),
)


def _yaml(values: dict[str, Any], indent: str = "") -> list[str]:
    lines = []
    for key, value in values.items():
        if isinstance(value, dict):
            lines += [f"{indent}{key}:", *_yaml(value, indent + "  ")]
        elif value is not None:
            text = str(value).lower() if isinstance(value, bool) else str(value)
            lines.append(f"{indent}{key}: {text}")
    return lines


def _write_accelerate(job: ToolJob) -> str:
    layout, facts = job.layout, job.facts
    nodes = -(-layout.world_size // facts.gpus_per_node)
    sharded = layout.zero > 0 and layout.dp * layout.cp > 1
    values: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP" if sharded else "MULTI_GPU" if layout.world_size > 1 else "'NO'",
        "num_machines": nodes,
        "num_processes": layout.world_size,
        "mixed_precision": "'no'" if facts.precision == "fp32" else facts.precision,
    }
    if sharded:
        values["fsdp_config"] = {
            "fsdp_version": 2,
            "fsdp_reshard_after_forward": layout.zero == 3,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_activation_checkpointing": layout.recompute == "full",
            "fsdp_offload_params": layout.offload == "params",
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        }
        shard = layout.shard or layout.dp
        sizes = {
            "dp_replicate_size": layout.dp // shard,
            "dp_shard_size": shard,
            "tp_size": layout.tp,
            "cp_size": layout.cp,
        }
        values["parallelism_config"] = {f"parallelism_config_{k}": v for k, v in sizes.items()}
    notes = [
        f"{ACCELERATE_LIMITS.software}, {layout.world_size} GPUs: "
        "accelerate launch --config_file FILE script.py",
        f"in the script: {job.microbatch} sequences of {facts.seq_len} a rank, "
        f"gradient_accumulation_steps={job.microbatches}",
    ]
    if nodes > 1:
        notes.append("on each machine: --machine_rank I --main_process_ip HEAD")
    if not sharded and layout.recompute == "full":
        notes.append("in the script: model.gradient_checkpointing_enable()")
    return "\n".join([*(f"# {note}" for note in notes), *_yaml(values)]) + "\n"


AUTOMODEL_LIMITS = ToolLimits(
    software="NeMo Automodel at 36044ad3 (2026-08-22)",
    axes=("dp", "cp", "tp", "pp"),
    schedules=("1f1b", "gpipe", "interleaved"),
    zero=(3,),
    recompute=("none", "full"),
    precisions=("bf16",),
    context=("ring",),
    any_split=False,
    rules=(
        ToolRule(
            "zero {zero} with tp {tp}, pp {pp} and cp {cp}: its FSDP shards over data ranks",
            lambda at, _: (at.dp * at.cp == 1) & (at.tp * at.pp > 1) & (at.zero != 3),
        ),
        ToolRule(
            "1f1b with {microbatches} microbatches: PyTorch's needs one for each of pp {pp} stages",
            lambda at, _: (at.pp > 1) & (at.virtual == 1) & (at.microbatches < at.pp),
        ),
        ToolRule(
            "tp {tp} of {experts} experts: Hugging Face models split no experts over tp",
            lambda at, facts: (at.tp > 1) & (facts.experts > 0),
        ),
    ),
)
_PIPELINES = {"1f1b": "1f1b", "gpipe": "gpipe", "interleaved": "interleaved1f1b"}


def _write_automodel(job: ToolJob) -> str:
    layout = job.layout
    shard = layout.shard or layout.dp
    distributed: dict[str, Any] = {
        "strategy": "fsdp2",
        "dp_size": layout.dp,
        "dp_replicate_size": layout.dp // shard,
        "tp_size": layout.tp,
        "pp_size": layout.pp,
        "cp_size": layout.cp,
        "sequence_parallel": layout.sequence_parallel and layout.tp > 1,
        "activation_checkpointing": layout.recompute == "full",
    }
    batch = job.microbatch
    if layout.pp > 1:
        distributed["pipeline"] = {
            "pp_schedule": _PIPELINES[layout.schedule],
            "pp_microbatch_size": job.microbatch,
            "layers_per_stage": job.cut[0],
        }
        batch *= job.microbatches
    values = {
        "distributed": distributed,
        "step_scheduler": {
            "global_batch_size": job.facts.global_batch,
            "local_batch_size": batch,
        },
    }
    notes = [f"{AUTOMODEL_LIMITS.software}, {layout.world_size} GPUs: merge into a recipe's YAML"]
    return "\n".join([*(f"# {note}" for note in notes), *_yaml(values)]) + "\n"


ACCELERATE = Tool(name="accelerate", limits=ACCELERATE_LIMITS, write=_write_accelerate)
AUTOMODEL = Tool(name="automodel", limits=AUTOMODEL_LIMITS, write=_write_automodel)
