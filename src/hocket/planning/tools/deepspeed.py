"""DeepSpeed: a JSON configuration, and what a script sets in addition.

Rules: deepspeed/runtime/{config,engine}.py, runtime/zero/{config,mics}.py,
runtime/tensor_parallel/config.py, runtime/pipe/{engine,topology,module}.py and
module_inject/auto_ep_config.py of DeepSpeed 0.19.6 to 0.19.8.
"""

from __future__ import annotations

import json
from typing import Any

from hocket.planning.tools.job import Tool, ToolJob
from hocket.planning.tools.limits import ToolLimits, ToolRule

EXPERT_PRESETS = {
    "mixtral": "mixtral",
    "qwen3_moe": "qwen3_moe",
    "qwen3_5_moe": "qwen3_5_moe",
    "deepseek_v2": "deepseek_v2",
    "deepseek_v3": "deepseek_v3",
}
"""`model_type` of a Hugging Face configuration, to the preset of expert parallelism."""

TENSOR_PRESETS = {
    "llama": "llama",
    "bloom": "bloom",
    "mixtral": "mixtral",
    "deepseek_v2": "deepseek_v2",
    "qwen2": "qwen2",
    "phi3": "phi3",
}

LIMITS = ToolLimits(
    software="DeepSpeed 0.19.8",
    schedules=("1f1b",),
    recompute=("none", "full"),
    sequence_parallel=(False,),
    offload=("none", "optimizer", "params"),
    context=("ulysses",),
    any_split=False,
    rules=(
        ToolRule(
            "{virtual_stages} virtual stages: its pipeline has one stage a rank",
            lambda at, _: at.virtual > 1,
        ),
        ToolRule(
            "tp {tp} with pp {pp}: its tensor parallelism builds no pipeline",
            lambda at, _: (at.tp > 1) & (at.pp > 1),
        ),
        ToolRule(
            "zero {zero} with pp {pp}: its pipeline takes ZeRO-0 and 1",
            lambda at, _: (at.zero > 1) & (at.pp > 1),
        ),
        ToolRule(
            "cp {cp} with tp {tp} and pp {pp}: its sequence parallelism takes data parallelism "
            "alone",
            lambda at, _: (at.cp > 1) & ((at.tp > 1) | (at.pp > 1)),
        ),
        ToolRule(
            "cp {cp}: its sequence parallelism divides {heads} heads and {seq_len} tokens",
            lambda at, facts: (facts.heads % at.cp != 0) | (facts.seq_len % at.cp != 0),
        ),
        ToolRule(
            "shard {shard} of dp {dp}: MiCS shards ZeRO-3 over consecutive ranks of data "
            "parallelism alone",
            lambda at, _: (
                (at.zero > 0) & (at.shard != at.dp) & ((at.zero != 3) | (at.tp * at.pp * at.cp > 1))
            ),
        ),
        ToolRule(
            "ep {ep} of a model of type {model_type!r}: its expert parallelism has presets for "
            + ", ".join(EXPERT_PRESETS),
            lambda at, facts: (at.ep > 1) & (facts.model_type not in EXPERT_PRESETS),
        ),
        ToolRule(
            "experts whole with tp {tp}: it divides them over tensor ranks",
            lambda at, facts: (facts.experts > 0) & (at.etp < at.tp),
        ),
        ToolRule(
            "ep {ep} with tp {tp}, pp {pp} and cp {cp}: experts are whole, and it takes data "
            "parallelism alone",
            lambda at, _: (at.ep > 1) & (at.tp * at.pp * at.cp > 1),
        ),
        ToolRule(
            "ep {ep} with shard {shard} of dp {dp}: not with MiCS",
            lambda at, _: (at.ep > 1) & (at.zero > 0) & (at.shard != at.dp),
        ),
    ),
)


def _write(job: ToolJob) -> str:
    layout, precision = job.layout, job.facts.precision
    state: dict[str, Any] = {"stage": layout.zero}
    if layout.zero:
        state |= {"overlap_comm": layout.pp == 1, "contiguous_gradients": True}
    if layout.offload in ("optimizer", "params"):
        state["offload_optimizer"] = {"device": "cpu"}
    if layout.offload == "params":
        state["offload_param"] = {"device": "cpu"}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": job.microbatch,
        "gradient_accumulation_steps": job.microbatches,
    }
    if layout.tp == 1:  # its check counts tensor ranks as data ranks
        config = {"train_batch_size": job.facts.global_batch, **config}
    if precision != "fp32":
        config[precision] = {"enabled": True}
    config["zero_optimization"] = state
    notes = [f"{LIMITS.software}, {layout.world_size} GPUs"]
    if layout.tp > 1:
        config["tensor_parallel"] = {"autotp_size": layout.tp}
        preset = TENSOR_PRESETS.get(job.facts.model_type)
        if preset is not None:
            config["tensor_parallel"]["preset_model"] = preset
        notes.append(f"reported train_batch_size is {layout.tp} times the true one")
    if layout.cp > 1:
        config["sequence_parallel_size"] = layout.cp
        config["data_parallel_size"] = layout.dp
        notes.append("in code: deepspeed.sequence.layer.DistributedAttention around attention")
    if layout.ep > 1:
        config["expert_parallel"] = {
            "enabled": True,
            "autoep_size": layout.ep,
            "preset_model": EXPERT_PRESETS[job.facts.model_type],
        }
    if layout.shard is not None and layout.shard != layout.dp:
        state["mics_shard_size"] = layout.shard
        notes.append("in code: build the model under deepspeed.zero.MiCS_Init")
    if layout.pp > 1:
        notes.append(
            f"in code: PipelineModule(layers, num_stages={layout.pp}, "
            'partition_method="type:DECODER_LAYER_CLASS")'
        )
    if layout.recompute == "full" and layout.pp > 1:
        config["pipeline"] = {"activation_checkpoint_interval": 1}
        notes.append("in code: PipelineModule(..., activation_checkpoint_interval=1)")
    elif layout.recompute == "full":
        notes.append("in code: model.gradient_checkpointing_enable()")
    return json.dumps({"comment": notes, **config}, indent=2) + "\n"


DEEPSPEED = Tool(name="deepspeed", limits=LIMITS, write=_write)
