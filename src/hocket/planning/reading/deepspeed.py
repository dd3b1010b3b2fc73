"""DeepSpeed: its JSON configuration, read as a layout."""

from __future__ import annotations

import re
from typing import Any

from hocket.planning.reading import sections
from hocket.planning.reading.configuration import ToolConfiguration, degree, unread, whole_number


def deepspeed(text: str) -> ToolConfiguration:
    """A JSON configuration."""
    return _deepspeed(sections.load_sections(text, "json"), "")


def _deepspeed(found: dict[str, Any], prefix: str) -> ToolConfiguration:
    used: set[str] = {"comment", "pipeline.activation_checkpoint_interval"}
    automatic: list[str] = []

    def get(key: str, default: Any = None) -> Any:
        used.add(prefix + key)
        value = found.get(prefix + key, default)
        if value == "auto":
            automatic.append(key)
            return default
        return value

    def number(key: str, default: int | None = None) -> int | None:
        value = get(key)
        return default if value in (None, 0, -1) else degree(value, key)

    tp = number("tensor_parallel.autotp_size", 1) or 1
    cp = number("sequence_parallel_size", 1) or 1
    in_code = str(found.get("comment", ""))  # what `--emit` writes of the script
    stages = re.search(r"PipelineModule\(layers, num_stages=(\d{1,18})", in_code)
    fields: dict[str, Any] = {"tp": tp, "cp": cp, "pp": 1}
    if stages:
        fields |= {"pp": degree(int(stages[1]), "num_stages"), "pipeline_split": "even"}
    if re.search(r"gradient_checkpointing_enable|activation_checkpoint_interval=1\b", in_code):
        fields["recompute"] = "full"
    stage = get("zero_optimization.stage", 0)
    fields["zero"] = whole_number(stage, "zero_optimization.stage", least=0)
    shard = number("zero_optimization.mics_shard_size")
    if shard:
        fields["shard"] = shard
    where = [get(f"zero_optimization.offload_{name}.device", "none")
             for name in ("optimizer", "param")]  # fmt: skip
    if where[1] not in ("none", None):
        fields["offload"] = "params"
    elif where[0] not in ("none", None):
        fields["offload"] = "optimizer"
    if get("expert_parallel.enabled"):
        fields["ep"] = number("expert_parallel.autoep_size", 1)
        get("expert_parallel.preset_model")
    micro = number("train_micro_batch_size_per_gpu")
    count = number("gradient_accumulation_steps")
    batch = number("train_batch_size")
    data = number("data_parallel_size")
    if batch is not None and tp > 1:
        batch //= tp
    precision = "fp32"
    for name in ("bf16", "fp16"):
        if get(f"{name}.enabled"):
            precision = name
    notes = []
    if not stages:
        notes.append("a pipeline is set in code; none is assumed")
    if "recompute" not in fields:
        notes.append("recomputation of layers is set in code; none is assumed")
    if automatic:
        notes.append("set by the trainer (auto): " + ", ".join(automatic))
    used |= {prefix + f"zero_optimization.{name}" for name in (
        "overlap_comm", "contiguous_gradients")}  # fmt: skip
    get("tensor_parallel.preset_model")
    return ToolConfiguration(
        tool="deepspeed", fields=fields, data_ranks=data if cp > 1 else None, microbatch=micro,
        accumulation=count, global_batch=batch, precision=precision,
        unread=unread(found, used), notes=tuple(notes),
    )  # fmt: skip
