"""torchtitan: its TOML (0.2.2), flags (0.3.0) and Python, read as a layout."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from hocket.planning.reading import sections, words
from hocket.planning.reading.configuration import (
    ToolConfiguration,
    degree,
    not_a_layout,
    unread,
    whole_number,
)
from hocket.planning.reading.python import assignments
from hocket.planning.tools.torchtitan import SCHEDULES
from hocket.spec.errors import OptionError

_TITAN_SCHEDULES = {name.lower(): ours for ours, name in SCHEDULES.items()}


def torchtitan_toml(text: str) -> ToolConfiguration:
    """A TOML, of release 0.2.2 or earlier."""
    return _titan("torchtitan-0.2.2", sections.load_sections(text, "toml"))


def torchtitan(text: str) -> ToolConfiguration:
    """A line of flags of release 0.3.0."""
    _, flags = words.words_and_flags(text)
    found: dict[str, Any] = {}
    for name, value in flags.items():
        found[name.lstrip("-").replace("-", "_")] = True if value is None else value
    for mode in re.findall(r"activation-checkpoint:([\w-]+)", text):
        found["activation_checkpoint.mode"] = mode
    match = re.search(r"module[_-]fqns[_-]per[_-]model[_-]part\s+([\w.,\s]+)", text)
    if match:
        modules = r"(tok_embeddings|layers\.\d+|norm|output|lm_head)"
        found["parallelism.module_fqns_per_model_part"] = [
            word.split(",")
            for word in match[1].split()
            if re.fullmatch(f"{modules}(,{modules})*", word)
        ]
    if "parallelism.no_enable_sequence_parallel" in found:
        found["parallelism.enable_sequence_parallel"] = False
    return _titan("torchtitan", found)


def torchtitan_python(text: str) -> ToolConfiguration:
    """A configuration in Python, of 0.3.0 or later: its literal assignments."""
    found = assignments(text)
    for name in list(found):
        for section in ("parallelism.", "training.", "activation_checkpoint."):
            place = name.find(section)
            if place > 0:
                found[name[place:]] = found.pop(name)
                break
    if found.get("activation_checkpoint") is None and "activation_checkpoint" in found:
        found["activation_checkpoint.mode"] = "none"
        del found["activation_checkpoint"]
    return _titan("torchtitan-python", found)


def _titan(tool: str, found: dict[str, Any]) -> ToolConfiguration:
    used: set[str] = set()

    def get(key: str, default: Any = None) -> Any:
        used.add(key)
        return found.get(key, default)

    def number(key: str, default: int | None = None) -> int | None:
        value = get(key)
        return default if value in (None, -1, "-1") else degree(value, key)

    p, t = "parallelism.", "training."
    tp, pp, cp = (number(f"{p}{name}_parallel_degree", 1) or 1
                  for name in ("tensor", "pipeline", "context"))  # fmt: skip
    ep = number(f"{p}expert_parallel_degree", 1) or 1
    replicate = number(f"{p}data_parallel_replicate_degree", 1) or 1
    shard = number(f"{p}data_parallel_shard_degree")
    etp = number(f"{p}expert_tensor_parallel_degree", 1)
    get(f"{p}context_parallel_rotate_method")
    fields: dict[str, Any] = {"tp": tp, "pp": pp, "cp": cp, "ep": ep}
    if ep > 1 and tp > 1:  # with ep it keeps experts whole, since 0.3.0 always
        if etp not in (1, tp):
            raise not_a_layout(f"expert_tensor_parallel_degree {etp} with tp {tp}")
        fields["etp"] = etp
    after = get(f"{p}fsdp_reshard_after_forward", "default")
    reshard = after == "always" or (after == "default" and pp == 1)
    fields["zero"] = 0 if shard == 1 and cp == 1 else 3 if reshard else 2
    if replicate > 1 and shard is not None and fields["zero"]:
        fields["shard"] = shard
    local = number(f"{t}local_batch_size", 8)
    micro, count, each = local, None, None
    edges: list[int] = []
    used |= {
        f"{t}disable_cuda_graphs", f"{p}module_fqns_per_model_part",
        f"{p}pipeline_parallel_schedule", f"{p}pipeline_parallel_microbatch_size",
    }  # fmt: skip
    if pp > 1:
        name = str(get(f"{p}pipeline_parallel_schedule", "1F1B")).lower()
        if name not in _TITAN_SCHEDULES:
            raise not_a_layout(f"pipeline_parallel_schedule {name}")
        fields["schedule"] = _TITAN_SCHEDULES[name]
        micro = number(f"{p}pipeline_parallel_microbatch_size", 1) or 1
        assert local is not None
        if local % micro:
            raise OptionError(f"local_batch_size {local} is not a multiple of {micro}")
        count = local // micro
        looped = fields["schedule"] in ("interleaved", "zb-v")
        fields["virtual_stages"] = 2 if looped else 1
        keys = [f"{p}pipeline_parallel_{edge}_stage_less_layers" for edge in ("first", "last")]
        edges = [whole_number(get(key, 1), key, least=0) for key in keys]
        each = number(f"{p}pipeline_parallel_layers_per_stage")
        parts = get(f"{p}module_fqns_per_model_part")
        if isinstance(parts, list) and all(isinstance(part, list) for part in parts):
            cut = tuple(sum(str(m).startswith("layers.") for m in part) for part in parts)
            if len(cut) % pp:
                raise OptionError(f"module_fqns_per_model_part has {len(cut)} parts, pp is {pp}")
            fields |= {"pipeline_split": cut, "virtual_stages": len(cut) // pp}
            edges, each = [], None
    mode = str(get("activation_checkpoint.mode", "selective" if tool == "torchtitan-0.2.2"
                   else "none"))  # fmt: skip
    notes: list[str] = []
    get("activation_checkpoint.selective_ac_option")
    if mode in ("none", "full"):
        fields["recompute"] = mode
    else:
        notes.append(f"activation checkpointing {mode} is estimated as none: its memory is less")
    parallel = get(f"{p}enable_sequence_parallel", True)
    fields["sequence_parallel"] = bool(parallel) and tp > 1
    get(f"{p}no_enable_sequence_parallel")
    if get(f"{t}enable_cpu_offload") and fields["zero"] == 3:
        fields["offload"] = "params"
    precision = "fp32" if get(f"{t}mixed_precision_param", "bfloat16") == "float32" else "bf16"
    model = get("config") if tool == "torchtitan" else get("model.flavor")
    family = get("module") if tool == "torchtitan" else get("model.name")
    batch = number(f"{t}global_batch_size")
    if batch is None and shard is not None and local is not None:
        batch = local * replicate * shard
    data = replicate * shard if shard is not None else None
    ends = (edges[0], edges[1]) if edges else None
    if "training.num_tokens_per_microbatch_per_dp_rank" in found:
        read = _titan_tokens(found, fields, data, used, notes)
        return dataclasses.replace(read, layers_per_stage=each, edges=ends)
    seq = number(f"{t}seq_len", 2048)
    return ToolConfiguration(
        tool=tool, fields=fields, data_ranks=data, microbatch=micro, accumulation=count,
        global_batch=batch, seq_len=seq, precision=precision,
        model=f"{family} {model}" if model else None, layers_per_stage=each,
        edges=ends,
        unread=unread(found, used), notes=tuple(notes),
    )  # fmt: skip


def _titan_tokens(
    found: dict[str, Any], fields: dict[str, Any], data: int | None, used: set[str],
    notes: list[str],
) -> ToolConfiguration:  # fmt: skip
    """Batches in tokens, as torchtitan's main branch has them since August 2026."""
    keys = {
        name: f"training.{name}"
        for name in (
            "num_tokens_per_microbatch_per_dp_rank", "num_tokens_per_train_step",
            "max_context_length",
        )
    }  # fmt: skip
    seq = whole_number(found.get(keys["max_context_length"], 2048), "max_context_length")
    each = whole_number(
        found[keys["num_tokens_per_microbatch_per_dp_rank"]], "tokens of a microbatch"
    )
    step = found.get(keys["num_tokens_per_train_step"])
    if each % seq:
        raise OptionError(f"{each} tokens of a microbatch are not a multiple of {seq}")
    return ToolConfiguration(
        tool="torchtitan-python", fields=fields, data_ranks=data, microbatch=each // seq,
        global_batch=None if step in (None, -1) else whole_number(step, "tokens of a step") // seq,
        seq_len=seq, precision="bf16", notes=tuple(notes),
        unread=unread(found, {*used, *keys.values(), "parallelism.num_pp_microbatches"}),
    )  # fmt: skip
