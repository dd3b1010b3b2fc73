"""accelerate and NeMo Automodel: their YAML, read as a layout."""

from __future__ import annotations

from typing import Any

from hocket.planning.reading import sections
from hocket.planning.reading.configuration import (
    ToolConfiguration,
    degree,
    not_a_layout,
    unread,
    whole_number,
)
from hocket.spec.errors import OptionError


def accelerate(text: str) -> ToolConfiguration:
    """A YAML of `accelerate config`."""
    found = sections.load_sections(text, "yaml")
    used: set[str] = set()

    def get(key: str, default: Any = None) -> Any:
        used.add(key)
        return found.get(key, default)

    world = degree(get("num_processes", 1), "num_processes")
    kind = str(get("distributed_type", "NO"))
    sizes = {}
    for name in ("dp_replicate", "dp_shard", "tp", "cp", "sp"):
        key = f"parallelism_config.parallelism_config_{name}_size"
        sizes[name] = degree(get(key, 1), key)
    if sizes["sp"] > 1 and sizes["cp"] > 1:
        raise not_a_layout("cp and sp together")
    fields: dict[str, Any] = {
        "tp": sizes["tp"], "cp": sizes["cp"] * sizes["sp"], "pp": 1, "zero": 0,
    }  # fmt: skip
    precision = {"no": "fp32", False: "fp32", None: "fp32"}.get(
        get("mixed_precision", "no"), str(found.get("mixed_precision"))
    )
    notes = ["batch sizes are set in the script"]
    if kind == "DEEPSPEED":
        stage = get("deepspeed_config.zero_stage", 0)
        fields["zero"] = whole_number(stage, "zero_stage", least=0)
        if get("deepspeed_config.offload_optimizer_device", "none") not in ("none", None):
            fields["offload"] = "optimizer"
    elif kind == "FSDP":
        version = whole_number(get("fsdp_config.fsdp_version", 1), "fsdp_version")
        after = get("fsdp_config.fsdp_reshard_after_forward", True)
        name = str(get("fsdp_config.fsdp_sharding_strategy", "FULL_SHARD"))
        old = {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2, "NO_SHARD": 0, "1": 3, "2": 2, "3": 0,
               "HYBRID_SHARD": 3, "HYBRID_SHARD_ZERO2": 2, "4": 3, "5": 2}  # fmt: skip
        if version == 1 and name not in old:
            raise not_a_layout(f"fsdp_sharding_strategy {name}")
        fields["zero"] = (2 if after in (False, "false") else 3) if version > 1 else old[name]
        if get("fsdp_config.fsdp_activation_checkpointing", False) is True:
            fields["recompute"] = "full"
        if get("fsdp_config.fsdp_offload_params", False) is True and fields["zero"] == 3:
            fields["offload"] = "params"
        if version == 1 and name.startswith(("HYBRID", "4", "5")):  # inside a node
            fields["shard"] = max(1, world // degree(get("num_machines", 1), "num_machines"))
        if sizes["dp_replicate"] > 1 and fields["zero"]:
            fields["shard"] = sizes["dp_shard"]
    elif kind == "MEGATRON_LM":
        p = "megatron_lm_config.megatron_lm_"
        fields["tp"] = degree(get(f"{p}tp_degree", 1), "tp_degree")
        fields["pp"] = degree(get(f"{p}pp_degree", 1), "pp_degree")
        fields["zero"] = 1 if get(f"{p}use_distributed_optimizer") in (True, "true") else 0
        fields["sequence_parallel"] = get(f"{p}sequence_parallelism") in (True, "true")
    elif kind not in ("MULTI_GPU", "NO"):
        raise not_a_layout(f"distributed_type {kind}")
    used |= {"compute_environment", "num_machines", "fsdp_config.fsdp_auto_wrap_policy",
             "fsdp_config.fsdp_state_dict_type"}  # fmt: skip
    return ToolConfiguration(
        tool="accelerate", fields=fields, world=world, precision=precision,
        unread=unread(found, used), notes=tuple(notes),
    )  # fmt: skip


# --- NeMo Automodel ------------------------------------------------------------------------------

_PIPELINES = {"1f1b": "1f1b", "gpipe": "gpipe", "interleaved1f1b": "interleaved"}


def automodel(text: str) -> ToolConfiguration:
    """A recipe's YAML of NeMo Automodel: `distributed` and `step_scheduler`."""
    found = sections.load_sections(text, "yaml")
    used: set[str] = set()

    def get(key: str, default: Any = None) -> Any:
        used.add(key)
        return found.get(key, default)

    def number(key: str, default: int | None = None) -> int | None:
        value = get(key)
        return default if value is None else degree(value, key)

    d, s = "distributed.", "step_scheduler."
    tp, pp, cp, ep = (number(f"{d}{axis}_size", 1) or 1 for axis in ("tp", "pp", "cp", "ep"))
    if ep > 1:
        raise not_a_layout(f"distributed.ep_size {ep}, experts over a mesh of their own")
    strategy = str(get(f"{d}strategy", "fsdp2"))
    zero = {"fsdp2": 3, "megatron_fsdp": 3, "ddp": 0}.get(strategy)
    if zero is None:
        raise not_a_layout(f"distributed.strategy {strategy}")
    fields: dict[str, Any] = {"tp": tp, "pp": pp, "cp": cp, "zero": zero}
    fields["sequence_parallel"] = get(f"{d}sequence_parallel", False) is True and tp > 1
    if get(f"{d}activation_checkpointing", False) is True:
        fields["recompute"] = "full"
    data = number(f"{d}dp_size")
    copies = number(f"{d}dp_replicate_size", 1) or 1
    micro, count, each = number(f"{s}local_batch_size"), None, None
    if pp > 1:
        name = str(get(f"{d}pipeline.pp_schedule", "interleaved1f1b")).lower()
        if name not in _PIPELINES:
            raise not_a_layout(f"distributed.pipeline.pp_schedule {name}")
        fields |= {"schedule": _PIPELINES[name], "pipeline_split": "even"}
        each = number(f"{d}pipeline.layers_per_stage")
        fields["virtual_stages"] = 2 if name == "interleaved1f1b" else 1
        size = number(f"{d}pipeline.pp_microbatch_size", 1) or 1
        if micro is not None and micro % size:
            raise OptionError(
                f"step_scheduler.local_batch_size {micro} is not a multiple of {size}"
            )
        micro, count = size, None if micro is None else micro // size
    return ToolConfiguration(
        tool="automodel", fields=fields, instances=copies, data_ranks=data, microbatch=micro,
        accumulation=count, layers_per_stage=each, global_batch=number(f"{s}global_batch_size"),
        precision="bf16", unread=unread(found, used),
    )  # fmt: skip
