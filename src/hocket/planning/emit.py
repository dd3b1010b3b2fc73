"""Emit: a layout as other tools' flags, so that a plan is of use to who runs something else.

What a tool does not have is said in a comment above its flags, with what stands there instead.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Callable
from typing import Any

from hocket.planning.forecast import Forecast
from hocket.spec.errors import OptionError, unknown


def emit(
    tool: str,
    forecast: Forecast,
    *,
    seq_len: int,
    global_batch: int,
    model: str,
    precision: str = "bf16",
) -> str:
    """The layout of a forecast, as text for one of `TOOLS`.

    Args:
        precision: of matrix products.

    Raises:
        OptionError: an unknown tool.
    """
    if tool not in TOOLS:
        message, hint = unknown("tool", tool, TOOLS)
        raise OptionError(f"--emit: {message}", hint=hint)
    return TOOLS[tool](forecast, Asked(seq_len, global_batch, model, precision))


@dataclasses.dataclass(frozen=True)
class Asked:
    """What a layout was planned for."""

    seq_len: int
    global_batch: int
    model: str
    precision: str


def _flags(command: str, flags: dict[str, Any], notes: list[str]) -> str:
    """One flag a line, as a shell reads it; True is a flag without a value, None is left out."""
    lines = [f"# {note}" for note in notes]
    words = [command] if command else []
    for name, value in flags.items():
        if value is None or value is False:
            continue
        words.append(name if value is True else f"{name} {value}")
    return "\n".join([*lines, " \\\n  ".join(words)]) + "\n"


def _cut(found: Forecast, *, megatron: bool = False) -> list[str]:
    """What of a cut and of recompute a tool has no flag for; Megatron has some."""
    cut, notes = found.layout.cut, []
    if cut == "light-ends" and not megatron:
        notes.append("the plan has one layer fewer on the first and last stage; set that by hand")
    if found.layout.recompute == "modules" and not megatron:
        notes.append("the plan recomputes norms and activation functions; set that by hand")
    if not isinstance(cut, str):
        text = "-".join(map(str, cut))
        notes.append(f"the plan holds {text} layers a stage; these flags say nothing of it")
    return notes


def _torchtitan(found: Forecast, asked: Asked) -> str:
    layout, notes = found.layout, _cut(found)
    sharded = layout.zero > 0
    if layout.zero in (1, 2):
        notes.append(f"torchtitan shards as ZeRO-3 (FSDP2); the plan is for ZeRO-{layout.zero}")
    if layout.tp > 1 and not layout.sequence_parallel:
        notes.append("torchtitan's tensor parallelism is always sequence parallel")
    if asked.precision != "bf16":
        notes.append(f"the plan is for {asked.precision}; these flags leave torchtitan in bf16")
    names = {
        "1f1b": "1F1B",
        "gpipe": "GPipe",
        "interleaved": "Interleaved1F1B",
        "zb-v": "ZBVZeroBubble",
    }
    schedule = names.get(layout.schedule)
    if layout.pp > 1 and schedule is None:
        notes.append(f"torchtitan has no {layout.schedule} with one stage a rank; 1F1B instead")
        schedule = "1F1B"
    if layout.virtual_stages > 2:
        notes.append(
            f"the plan has {layout.virtual_stages} stages a rank; torchtitan sets that by "
            "--parallelism.pipeline_parallel_layers_per_stage"
        )
    shard = (layout.shard or layout.dp) if sharded else 1
    p = "--parallelism."
    flags = {
        f"{p}data_parallel_replicate_degree": layout.dp // shard,
        f"{p}data_parallel_shard_degree": shard,
        f"{p}fsdp_reshard_after_forward": "always" if layout.zero == 3 else "never",
        f"{p}tensor_parallel_degree": layout.tp,
        f"{p}pipeline_parallel_degree": layout.pp,
        f"{p}pipeline_parallel_schedule": schedule if layout.pp > 1 else None,
        f"{p}pipeline_parallel_microbatch_size": found.microbatch if layout.pp > 1 else None,
        f"{p}context_parallel_degree": layout.cp,
        f"{p}context_parallel_rotate_method": "alltoall" if layout.cp > 1 else None,
        f"{p}expert_parallel_degree": layout.ep if layout.ep > 1 else None,
        "--activation_checkpoint.mode": "none"
        if layout.recompute == "modules"
        else layout.recompute,
        "--training.local_batch_size": asked.global_batch // layout.dp
        if layout.pp > 1
        else found.microbatch,
        "--training.global_batch_size": asked.global_batch,
        "--training.seq_len": asked.seq_len,
    }
    return _flags("", flags, notes)


def _megatron(found: Forecast, asked: Asked) -> str:
    layout, notes = found.layout, _cut(found, megatron=True)
    if layout.schedule not in ("1f1b", "interleaved") and layout.pp > 1:
        notes.append(f"Megatron-LM has no {layout.schedule} schedule; 1F1B instead")
    shard = layout.shard or layout.dp
    strategy = {2: "optim_grads", 3: "optim_grads_params"}.get(layout.zero)
    full = layout.recompute == "full"
    several = layout.virtual_stages > 1
    flags = {
        "--tensor-model-parallel-size": layout.tp,
        "--pipeline-model-parallel-size": layout.pp,
        "--num-virtual-stages-per-pipeline-rank": layout.virtual_stages if several else None,
        "--context-parallel-size": layout.cp,
        "--cp-comm-type": {"ring": "p2p", "ulysses": "a2a"}.get(found.context),
        "--expert-model-parallel-size": layout.ep if layout.ep > 1 else None,
        "--sequence-parallel": layout.sequence_parallel,
        "--use-distributed-optimizer": layout.zero > 0,
        "--num-distributed-optimizer-instances": layout.dp // shard if shard < layout.dp else None,
        "--use-megatron-fsdp": strategy is not None,
        "--data-parallel-sharding-strategy": strategy,
        "--overlap-grad-reduce": layout.dp > 1,
        "--overlap-param-gather": layout.zero > 0,
        "--account-for-embedding-in-pipeline-split": layout.cut == "light-ends",
        "--account-for-loss-in-pipeline-split": layout.cut == "light-ends",
        "--recompute-granularity": {
            "selective": "selective",
            "modules": "selective",
            "full": "full",
        }.get(layout.recompute),
        "--recompute-modules": "layernorm moe_act mla_up_proj"
        if layout.recompute == "modules"
        else None,
        "--recompute-method": "uniform" if full else None,
        "--recompute-num-layers": 1 if full else None,
        "--micro-batch-size": found.microbatch,
        "--global-batch-size": asked.global_batch,
        "--seq-length": asked.seq_len,
        "--use-flash-attn": True,
        "--fp16": asked.precision == "fp16",
        "--bf16": asked.precision in ("bf16", "fp8", "fp4"),
        "--fp8-format": "hybrid" if asked.precision == "fp8" else None,
    }
    return _flags("", flags, notes)


def _deepspeed(found: Forecast, asked: Asked) -> str:
    layout = found.layout
    half = "fp16" if asked.precision == "fp16" else "bf16"
    config: dict[str, Any] = {
        "train_batch_size": asked.global_batch,
        "train_micro_batch_size_per_gpu": found.microbatch,
        "gradient_accumulation_steps": layout.microbatches or 1,
        half: {"enabled": asked.precision != "fp32"},
        "zero_optimization": {
            "stage": layout.zero,
            "overlap_comm": True,
            "contiguous_gradients": True,
        },
    }
    if layout.tp > 1:
        config["tensor_parallel"] = {"autotp_size": layout.tp}
    if layout.pp > 1:
        config["pipeline"] = {"stages": layout.pp}
    if layout.cp > 1:
        config["sequence_parallel_size"] = layout.cp
    if layout.recompute != "none":
        config["activation_checkpointing"] = {"partition_activations": layout.tp > 1}
    notes = _cut(found)  # JSON has no comments; DeepSpeed reads the keys that it knows
    if layout.pp > 1 and layout.schedule != "1f1b":
        notes.append(f"DeepSpeed has no {layout.schedule} schedule; its pipeline runs 1F1B")
    if layout.pp > 1 and layout.zero > 1:
        notes.append(f"DeepSpeed's pipeline takes no ZeRO-{layout.zero}, at most ZeRO-1")
    if layout.cp > 1 and found.context == "ring":
        notes.append("the plan exchanges keys in a ring; DeepSpeed does it by all-to-alls")
    if layout.ep > 1:
        notes.append(f"ep {layout.ep} is set in code: deepspeed.moe.layer.MoE(ep_size=...)")
    if layout.shard is not None and layout.zero == 3:
        config["zero_optimization"]["mics_shard_size"] = layout.shard
    if asked.precision in ("fp8", "fp4"):
        notes.append(f"the plan is for {asked.precision}; this configuration computes in bf16")
    if notes:
        config = {"comment": notes, **config}
    return json.dumps(config, indent=2) + "\n"


def _vllm(found: Forecast, asked: Asked) -> str:
    layout = found.layout
    notes = ["the ranks of a training layout, for serving; cp, ZeRO and recompute have no meaning"]
    flags = {
        "--tensor-parallel-size": layout.tp,
        "--pipeline-parallel-size": layout.pp,
        "--data-parallel-size": layout.dp if layout.dp > 1 else None,
        "--enable-expert-parallel": layout.ep > 1,
        "--max-model-len": asked.seq_len,
    }
    return _flags(f"vllm serve {shlex.quote(asked.model)}", flags, notes)


TOOLS: dict[str, Callable[[Forecast, Asked], str]] = {
    "torchtitan": _torchtitan,
    "megatron": _megatron,
    "deepspeed": _deepspeed,
    "vllm": _vllm,
}
"""The tools whose flags can be printed."""
