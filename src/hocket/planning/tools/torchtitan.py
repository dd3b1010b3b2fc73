"""torchtitan, release 0.3.0 (flags) and release 0.2.2 (the last with TOML).

Rules: torchtitan/trainer.py, config/configs.py, distributed/{parallel_dims,pipeline_parallel}.py
and models/*/parallelize.py of both releases; torch/distributed/pipelining/schedules.py.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from hocket.cost.layout_batch import Layouts
from hocket.planning.tools.job import Tool, ToolJob, flags_text
from hocket.planning.tools.limits import Facts, ToolLimits, ToolRule, is_schedule

SCHEDULES = {
    "1f1b": "1F1B",
    "gpipe": "GPipe",
    "interleaved": "Interleaved1F1B",
    "zb-v": "ZBVZeroBubble",
}

_MODELS = {
    "llama-3-8b": ("llama3", "8B"),
    "llama-3-70b": ("llama3", "70B"),
    "llama-3.1-405b": ("llama3", "405B"),
    "qwen3-0.6b": ("qwen3", "0.6B"),
    "qwen3-32b": ("qwen3", "32B"),
    "qwen3-30b-a3b": ("qwen3", "30B-A3B"),
    "deepseek-v3": ("deepseek_v3", "671B"),
}
"""Names of the catalogue, to the model and flavour that both releases have."""


def _config(name: str, flavour: str) -> str:
    """The configuration function of release 0.3.0: `llama3_8b`."""
    return f"{name}_{flavour.lower().replace('.', '_').replace('-', '_')}"


CONFIGS = {
    written.lower(): ours
    for ours, (name, flavour) in _MODELS.items()
    for written in (f"{name} {flavour}", f"{name} {_config(name, flavour)}")
}
"""Model and flavour, or module and configuration, in lower case, to names of the catalogue."""


def _expert_ranks(at: Layouts, facts: Facts) -> np.ndarray:
    """[r] bool: rows whose expert ranks are not within the ranks of one shard."""
    ranks = np.where(at.zero > 0, at.shard, 1) * at.cp * at.tp / at.etp
    found: np.ndarray = (at.ep > 1) & (ranks % at.ep != 0)
    return found


_WHOLE = ToolRule(
    "experts whole with tp {tp} and ep {ep}: without ep it divides them over tp",
    lambda at, facts: (facts.experts > 0) & (at.ep == 1) & (at.etp < at.tp),
)

_RULES = (
    _WHOLE,
    ToolRule(
        "1f1b with {microbatches} microbatches: PyTorch's needs one for each of pp {pp} stages",
        lambda at, _: is_schedule(at, "1f1b") & (at.microbatches < at.pp),
    ),
    ToolRule(
        "interleaved with {microbatches} microbatches over pp {pp}: it must be a multiple of pp",
        lambda at, _: (
            is_schedule(at, "interleaved")
            & (at.microbatches % np.maximum(1, at.microbatches // at.pp) != 0)
        ),
    ),
    ToolRule(
        "{virtual_stages} virtual stages with schedule {schedule}: interleaved has 2 or more, "
        "zb-v 2, every other schedule 1",
        lambda at, _: (
            (is_schedule(at, "interleaved") & (at.virtual < 2))
            | (is_schedule(at, "zb-v") & (at.virtual != 2))
            | (~is_schedule(at, "interleaved") & ~is_schedule(at, "zb-v") & (at.virtual > 1))
        ),
    ),
    ToolRule(
        "zero {zero} with cp {cp}: its FSDP shards over data and context ranks",
        lambda at, _: (at.cp > 1) & (at.zero == 0),
    ),
    ToolRule(
        "shard {shard} with cp {cp}: fewer than 2 data ranks share a state",
        lambda at, _: (at.cp > 1) & (at.zero > 0) & (at.shard < 2) & (at.dp > 1),
    ),
    ToolRule(
        "seq_len {seq_len} with tp {tp} and cp {cp}: it must divide by tp x 2 cp",
        lambda at, facts: (
            facts.seq_len
            % (np.where(at.sequence_parallel > 0, at.tp, 1) * np.where(at.cp > 1, 2 * at.cp, 1))
            != 0
        ),
    ),
)

LIMITS = ToolLimits(
    software="torchtitan 0.3.0",
    schedules=tuple(SCHEDULES),
    zero=(0, 2, 3),
    recompute=("none", "full"),
    precisions=("bf16", "fp32"),
    offload=("none", "params"),
    context=("ring",),
    rules=(
        *_RULES,
        ToolRule(
            "tp {tp} with ep {ep}: it keeps experts whole, and the plan splits each over tp",
            lambda at, _: (at.tp > 1) & (at.ep > 1) & (at.etp > 1),
        ),
        ToolRule(
            "ep {ep} with shard {shard}: expert ranks are taken from the ranks of one shard",
            _expert_ranks,
        ),
    ),
)

OLD_LIMITS = ToolLimits(
    software="torchtitan 0.2.2",
    schedules=tuple(SCHEDULES),
    zero=(0, 2, 3),
    sequence_parallel=(True,),
    precisions=("bf16", "fp32"),
    offload=("none", "params"),
    context=("ring",),
    rules=(
        *_RULES,
        ToolRule(
            "zero {zero} with tp {tp} and pp {pp}: its DDP takes no other axis",
            lambda at, _: (at.zero == 0) & (at.dp > 1) & ((at.tp > 1) | (at.pp > 1)),
        ),
        ToolRule(
            "ep {ep} with shard {shard}: expert ranks are taken from the ranks of one shard",
            _expert_ranks,
        ),
        ToolRule(
            "recompute selective: it recomputes every second layer, the plan attention cores",
            lambda at, facts: at.recomputes("core_attn") & (not facts.half_of_layers),
        ),
    ),
)


def _stage_modules(job: ToolJob, head: str) -> list[list[str]]:
    """Modules of each stage; `head`: the name of the output projection."""
    found, first = [], 0
    for count in job.cut:
        found.append([f"layers.{i}" for i in range(first, first + count)])
        first += count
    found[0].insert(0, "tok_embeddings")
    found[-1] += ["norm", head]
    return found


def parallelism(job: ToolJob) -> dict[str, Any]:
    """Values of the section `parallelism` that both releases have; None is left out."""
    layout = job.layout
    shard = (layout.shard or layout.dp) if layout.zero else 1
    piped = layout.pp > 1
    return {
        "data_parallel_replicate_degree": layout.dp // shard,
        "data_parallel_shard_degree": shard,
        "fsdp_reshard_after_forward": "always" if layout.zero == 3 else "never",
        "tensor_parallel_degree": layout.tp,
        "pipeline_parallel_degree": layout.pp,
        "pipeline_parallel_schedule": SCHEDULES[layout.schedule] if piped else None,
        "pipeline_parallel_microbatch_size": job.microbatch if piped else None,
        "context_parallel_degree": layout.cp,
        "expert_parallel_degree": layout.ep if layout.ep > 1 else None,
    }


def training(job: ToolJob) -> dict[str, Any]:
    """Values of the section `training`, likewise."""
    batch = job.microbatch * (job.microbatches if job.layout.pp > 1 else 1)
    return {
        "local_batch_size": batch,
        "global_batch_size": job.facts.global_batch,
        "seq_len": job.facts.seq_len,
        "mixed_precision_param": "float32" if job.facts.precision == "fp32" else None,
        "enable_cpu_offload": True if job.layout.offload == "params" else None,
    }


def _torchtitan_flags(job: ToolJob) -> dict[str, Any]:
    """Flags of release 0.3.0, without the model and without recompute, which is the last word."""
    layout = job.layout
    flags = {f"--parallelism.{key}": value for key, value in parallelism(job).items()}
    off = layout.tp > 1 and not layout.sequence_parallel
    flags["--parallelism.no-enable_sequence_parallel"] = True if off else None
    if layout.pp > 1:
        stages = " ".join(",".join(part) for part in _stage_modules(job, "lm_head"))
        flags["--parallelism.module_fqns_per_model_part"] = stages
    for key, value in training(job).items():
        flags[f"--training.{key}"] = value
    graphs = layout.pp == 1 and layout.ep == 1
    flags["--training.disable_cuda_graphs"] = None if graphs else True
    return flags


def recompute_word(job: ToolJob) -> str:
    """The last word of a line of flags."""
    return f"activation-checkpoint:{job.layout.recompute}"


def _write(job: ToolJob) -> str:
    layout = job.layout
    name, flavour = _MODELS.get(job.facts.model, ("MODULE", ""))
    model = {"--module": name, "--config": _config(name, flavour) if flavour else "CONFIG"}
    notes = [f"{LIMITS.software}, {layout.world_size} GPUs: append to torchtitan/train.py"]
    if not flavour:
        notes.append(f"MODULE and CONFIG: the module and function that describe {job.facts.model}")
    return flags_text({**model, **_torchtitan_flags(job), recompute_word(job): True}, notes)


def _write_toml(job: ToolJob) -> str:
    layout = job.layout
    name, flavour = _MODELS.get(job.facts.model, ("MODEL", "FLAVOR"))
    split = parallelism(job)
    if layout.pp > 1:
        split["module_fqns_per_model_part"] = _stage_modules(job, "output")
    if layout.ep > 1:
        split["expert_tensor_parallel_degree"] = layout.expert_tp
    recompute = {"mode": layout.recompute}
    if layout.recompute == "selective":
        recompute["selective_ac_option"] = "2"
    sections = {
        "model": {"name": name, "flavor": flavour},
        "training": training(job),
        "parallelism": split,
        "activation_checkpoint": recompute,
    }
    lines = [f"# {OLD_LIMITS.software}, {layout.world_size} GPUs: --job.config_file FILE"]
    for section, values in sections.items():
        lines += ["", f"[{section}]"]
        lines += [f"{k} = {json.dumps(v)}" for k, v in values.items() if v is not None]
    return "\n".join(lines) + "\n"


TORCHTITAN = Tool(name="torchtitan", limits=LIMITS, write=_write)
TORCHTITAN_OLD = Tool(name="torchtitan-0.2.2", limits=OLD_LIMITS, write=_write_toml)
