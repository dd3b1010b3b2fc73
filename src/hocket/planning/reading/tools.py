"""Readers: the key map of each tool, from its file to a layout's fields."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

from hocket.planning.reading import sections, words
from hocket.planning.reading.configuration import ToolConfiguration, degree, whole
from hocket.planning.reading.python import assignments
from hocket.planning.tools.torchtitan import SCHEDULES
from hocket.spec.errors import OptionError

_TITAN_SCHEDULES = {name.lower(): ours for ours, name in SCHEDULES.items()}


def _unread(found: dict[str, Any], used: Iterable[str]) -> tuple[str, ...]:
    known = set(used)
    return tuple(f"{key} = {str(value)[:60]}" for key, value in found.items() if key not in known)


def _modules(words: str | None) -> str:
    """Megatron's --recompute-modules as a value of `Layout.recompute`. Raises OptionError."""
    named = set((words or "").split())
    if named == {"core_attn"}:
        return "selective"
    if {"layernorm", "moe_act"} <= named <= {"layernorm", "moe_act", "mla_up_proj"}:
        return "modules"
    raise _reject(f"--recompute-modules {words}")


def _reject(why: str) -> OptionError:
    return OptionError(f"the configuration has {why}, which no layout here has")


# --- Megatron-LM ---------------------------------------------------------------------------------

_STRATEGIES = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}


def megatron(text: str) -> ToolConfiguration:
    """Megatron-LM's arguments, alone or in a launch script."""
    _, found = words.flags(text)
    used: set[str] = set()

    def has(name: str) -> bool:
        used.add(name)
        return name in found

    def number(name: str, default: int | None = None) -> int | None:
        return degree(found[name], name) if has(name) else default

    tp = number("--tensor-model-parallel-size", 1) or 1
    pp = number("--pipeline-model-parallel-size", 1) or 1
    cp = number("--context-parallel-size", 1) or 1
    ep = number("--expert-model-parallel-size", 1) or 1
    expert_tp = number("--expert-tensor-parallel-size", tp)
    if has("--cp-comm-type") and found["--cp-comm-type"] not in ("p2p", "a2a"):
        raise _reject(f"--cp-comm-type {found['--cp-comm-type']}")
    fields: dict[str, Any] = {"tp": tp, "pp": pp, "cp": cp, "ep": ep}
    if ep > 1 and expert_tp != tp:
        fields["etp"] = expert_tp
    virtual = number("--num-virtual-stages-per-pipeline-rank", 1) or 1
    fields["pipeline_split"] = "even" if pp > 1 else "balanced"
    if has("--pipeline-model-parallel-layout"):
        cut = megatron_layers(found["--pipeline-model-parallel-layout"] or "")
        if len(cut) % pp:
            raise OptionError(f"the layout has {len(cut)} stages, and pp is {pp}")
        fields["pipeline_split"], virtual = cut, len(cut) // pp
    if has("--num-layers-per-virtual-pipeline-stage"):
        layers = number("--num-layers") or 0
        each = number("--num-layers-per-virtual-pipeline-stage") or 1
        if not layers or layers % (pp * each):
            raise OptionError(f"{layers} layers do not divide over pp {pp} x {each}")
        virtual = layers // (pp * each)
    first = number("--decoder-first-pipeline-num-layers")
    last = number("--decoder-last-pipeline-num-layers")
    if (first or last) and pp > 1 and virtual == 1:
        layers = number("--num-layers") or 0
        ends = (first is not None) + (last is not None)
        rest = layers - (first or 0) - (last or 0)
        if pp <= ends or rest % (pp - ends):
            raise OptionError(f"{rest} layers do not divide over the {pp - ends} middle stages")
        middle = (rest // (pp - ends),) * (pp - ends)
        fields["pipeline_split"] = (
            *((first,) if first else ()),
            *middle,
            *((last,) if last else ()),
        )
    if virtual > 1:
        fields |= {"virtual_stages": virtual, "schedule": "interleaved"}
    notes = [
        f"{name} is not read: the split is taken as even"
        for name in (
            "--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split",
        )
        if name in found
    ]  # fmt: skip
    zero = 1 if has("--use-distributed-optimizer") else 0
    if has("--use-megatron-fsdp"):
        has("--data-parallel-sharding-strategy")
        name = found.get("--data-parallel-sharding-strategy") or "optim_grads_params"
        if name not in _STRATEGIES:
            raise OptionError(f"--data-parallel-sharding-strategy is {name!r}")
        zero = _STRATEGIES[name]
    if has("--use-torch-fsdp2"):
        zero = 2 if has("--torch-fsdp2-no-reshard-after-forward") else 3
    instances = number("--num-distributed-optimizer-instances", 1) or 1
    fields["zero"] = zero
    if has("--recompute-activations"):
        fields["recompute"] = "selective"
    if has("--recompute-granularity"):
        fields["recompute"] = found["--recompute-granularity"]
    if has("--recompute-modules"):
        fields["recompute"] = _modules(found["--recompute-modules"])
    has("--recompute-method")
    has("--recompute-num-layers")
    if found.get("--recompute-method") == "block":
        raise _reject("--recompute-method block")
    fields["sequence_parallel"] = has("--sequence-parallel") and tp > 1
    if has("--use-tp-pp-dp-mapping"):
        fields["order"] = ("tp", "cp", "pp", "dp")
    if has("--optimizer-cpu-offload"):
        fields["offload"] = "optimizer"
    precision = "fp32"
    for name in ("bf16", "fp16"):
        if has(f"--{name}"):
            precision = name
    for name in ("fp8", "fp4"):
        if has(f"--{name}-format"):
            precision = name
    micro, batch = number("--micro-batch-size"), number("--global-batch-size")
    seq = number("--seq-length")
    world = 1
    for names in (("--nproc_per_node", "--nproc-per-node"), ("--nnodes",)):
        size = next((n for n in names if has(n) and str(found[n]).isdigit()), None)
        world = world * degree(found[size], size) if size and world else 0
    used |= {
        "--overlap-grad-reduce", "--overlap-param-gather", "--ckpt-format", "--attention-backend",
        "--moe-grouped-gemm", "--moe-token-dispatcher-type", "--use-precision-aware-optimizer",
        "--no-gradient-accumulation-fusion", "--num-layers",
    }  # fmt: skip
    gpus = world or None
    return ToolConfiguration(
        tool="megatron", fields=fields, instances=instances, world=gpus, microbatch=micro,
        global_batch=batch, seq_len=seq, precision=precision, unread=_unread(found, used),
        notes=tuple(notes),
    )  # fmt: skip


def megatron_layers(text: str) -> tuple[int, ...]:
    """Layers of each stage of `Et*9|t*9|(t|)*2tL`. Raises OptionError where it is not read."""
    text = text.strip("'\" ").replace(",", "")

    def repeated(match: re.Match[str]) -> str:
        times = int(match[2])
        if times > 512:
            raise OptionError(f"the layout repeats a part {times} times")
        return match[1] * times

    plain = re.sub(r"\(([^()]*)\)\*(\d{1,4})", repeated, text)
    plain = re.sub(r"([tm|])\*(\d{1,4})", repeated, plain)
    if not re.fullmatch(r"E[t|]*L", plain):
        raise OptionError(
            f"the layout {text[:60]!r} is not read: E, stages of t divided by |, and L; no m"
        )
    return tuple(stage.count("t") for stage in plain.split("|"))


# --- torchtitan ----------------------------------------------------------------------------------


def torchtitan_toml(text: str) -> ToolConfiguration:
    """A TOML, of release 0.2.2 or earlier."""
    return _titan("torchtitan-0.2.2", sections.load(text, "toml"))


def torchtitan(text: str) -> ToolConfiguration:
    """A line of flags of release 0.3.0."""
    _, flags = words.flags(text)
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
    if ep > 1 and tp > 1 and number(f"{p}expert_tensor_parallel_degree", 1) != tp:
        raise _reject(f"whole experts with tp {tp}")
    get(f"{p}expert_tensor_parallel_degree")
    get(f"{p}context_parallel_rotate_method")
    fields: dict[str, Any] = {"tp": tp, "pp": pp, "cp": cp, "ep": ep}
    after = get(f"{p}fsdp_reshard_after_forward", "default")
    reshard = after == "always" or (after == "default" and pp == 1)
    fields["zero"] = 0 if shard == 1 and cp == 1 else 3 if reshard else 2
    if replicate > 1 and shard is not None and fields["zero"]:
        fields["shard"] = shard
    local = number(f"{t}local_batch_size", 8)
    micro, count = local, None
    used |= {
        f"{t}disable_cuda_graphs", f"{p}module_fqns_per_model_part",
        f"{p}pipeline_parallel_schedule", f"{p}pipeline_parallel_microbatch_size",
    }  # fmt: skip
    if pp > 1:
        name = str(get(f"{p}pipeline_parallel_schedule", "1F1B")).lower()
        if name not in _TITAN_SCHEDULES:
            raise _reject(f"pipeline_parallel_schedule {name}")
        fields["schedule"] = _TITAN_SCHEDULES[name]
        micro = number(f"{p}pipeline_parallel_microbatch_size", 1) or 1
        assert local is not None
        if local % micro:
            raise OptionError(f"local_batch_size {local} is not a multiple of {micro}")
        count = local // micro
        looped = fields["schedule"] in ("interleaved", "zb-v")
        fields["virtual_stages"] = 2 if looped else 1
        parts = get(f"{p}module_fqns_per_model_part")
        if isinstance(parts, list) and all(isinstance(part, list) for part in parts):
            cut = tuple(sum(str(m).startswith("layers.") for m in part) for part in parts)
            if len(cut) % pp:
                raise OptionError(f"module_fqns_per_model_part has {len(cut)} parts, pp is {pp}")
            fields |= {"pipeline_split": cut, "virtual_stages": len(cut) // pp}
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
    if "training.num_tokens_per_microbatch_per_dp_rank" in found:
        return _titan_tokens(found, fields, data, used, notes)
    seq = number(f"{t}seq_len", 2048)
    return ToolConfiguration(
        tool=tool, fields=fields, data_ranks=data, microbatch=micro, accumulation=count,
        global_batch=batch, seq_len=seq, precision=precision,
        model=f"{family} {model}" if model else None,
        unread=_unread(found, used), notes=tuple(notes),
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
    seq = whole(found.get(keys["max_context_length"], 2048), "max_context_length")
    each = whole(found[keys["num_tokens_per_microbatch_per_dp_rank"]], "tokens of a microbatch")
    step = found.get(keys["num_tokens_per_train_step"])
    if each % seq:
        raise OptionError(f"{each} tokens of a microbatch are not a multiple of {seq}")
    return ToolConfiguration(
        tool="torchtitan-python", fields=fields, data_ranks=data, microbatch=each // seq,
        global_batch=None if step in (None, -1) else whole(step, "tokens of a step") // seq,
        seq_len=seq, precision="bf16", notes=tuple(notes),
        unread=_unread(found, {*used, *keys.values(), "parallelism.num_pp_microbatches"}),
    )  # fmt: skip


# --- DeepSpeed -----------------------------------------------------------------------------------


def deepspeed(text: str) -> ToolConfiguration:
    """A JSON configuration."""
    return _deepspeed(sections.load(text, "json"), "")


def _deepspeed(found: dict[str, Any], prefix: str) -> ToolConfiguration:
    used: set[str] = {"comment"}
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
    fields: dict[str, Any] = {"tp": tp, "cp": cp, "pp": 1}
    stage = get("zero_optimization.stage", 0)
    fields["zero"] = whole(stage, "zero_optimization.stage", least=0)
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
    notes = ["a pipeline is set in code; none is assumed"]
    if automatic:
        notes.append("set by the trainer (auto): " + ", ".join(automatic))
    used |= {prefix + f"zero_optimization.{name}" for name in (
        "overlap_comm", "contiguous_gradients")}  # fmt: skip
    get("tensor_parallel.preset_model")
    return ToolConfiguration(
        tool="deepspeed", fields=fields, data_ranks=data if cp > 1 else None, microbatch=micro,
        accumulation=count, global_batch=batch, precision=precision,
        unread=_unread(found, used), notes=tuple(notes),
    )  # fmt: skip


# --- accelerate ----------------------------------------------------------------------------------


def accelerate(text: str) -> ToolConfiguration:
    """A YAML of `accelerate config`."""
    found = sections.load(text, "yaml")
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
        raise _reject("cp and sp together")
    fields: dict[str, Any] = {
        "tp": sizes["tp"], "cp": sizes["cp"] * sizes["sp"], "pp": 1, "zero": 0,
    }  # fmt: skip
    precision = {"no": "fp32", False: "fp32", None: "fp32"}.get(
        get("mixed_precision", "no"), str(found.get("mixed_precision"))
    )
    notes = ["batch sizes are set in the script"]
    if kind == "DEEPSPEED":
        stage = get("deepspeed_config.zero_stage", 0)
        fields["zero"] = whole(stage, "zero_stage", least=0)
        if get("deepspeed_config.offload_optimizer_device", "none") not in ("none", None):
            fields["offload"] = "optimizer"
    elif kind == "FSDP":
        version = whole(get("fsdp_config.fsdp_version", 1), "fsdp_version")
        after = get("fsdp_config.fsdp_reshard_after_forward", True)
        name = str(get("fsdp_config.fsdp_sharding_strategy", "FULL_SHARD"))
        old = {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2, "NO_SHARD": 0, "1": 3, "2": 2, "3": 0}
        if version == 1 and name not in old:
            raise _reject(f"fsdp_sharding_strategy {name}")
        fields["zero"] = (2 if after in (False, "false") else 3) if version > 1 else old[name]
        if get("fsdp_config.fsdp_activation_checkpointing", False) is True:
            fields["recompute"] = "full"
        if get("fsdp_config.fsdp_offload_params", False) is True and fields["zero"] == 3:
            fields["offload"] = "params"
        if sizes["dp_replicate"] > 1 and fields["zero"]:
            fields["shard"] = sizes["dp_shard"]
    elif kind == "MEGATRON_LM":
        p = "megatron_lm_config.megatron_lm_"
        fields["tp"] = degree(get(f"{p}tp_degree", 1), "tp_degree")
        fields["pp"] = degree(get(f"{p}pp_degree", 1), "pp_degree")
        fields["zero"] = 1 if get(f"{p}use_distributed_optimizer") in (True, "true") else 0
        fields["sequence_parallel"] = get(f"{p}sequence_parallelism") in (True, "true")
    elif kind not in ("MULTI_GPU", "NO"):
        raise _reject(f"distributed_type {kind}")
    used |= {"compute_environment", "num_machines", "fsdp_config.fsdp_auto_wrap_policy",
             "fsdp_config.fsdp_state_dict_type"}  # fmt: skip
    return ToolConfiguration(
        tool="accelerate", fields=fields, world=world, precision=precision,
        unread=_unread(found, used), notes=tuple(notes),
    )  # fmt: skip


# --- vLLM ----------------------------------------------------------------------------------------

SHORT = {"-tp": "--tensor-parallel-size", "-pp": "--pipeline-parallel-size",
          "-dp": "--data-parallel-size"}  # fmt: skip


def vllm(text: str) -> ToolConfiguration:
    """A `vllm serve` line."""
    others, given = words.flags(text)
    found = {SHORT.get(name, name): value for name, value in given.items()}
    used = {
        "--max-model-len", "--max-num-seqs", "--max-num-batched-tokens", "--enable-chunked-prefill",
        "--gpu-memory-utilization", "--quantization", "--kv-cache-dtype", "--dtype",
    }  # fmt: skip
    fields: dict[str, Any] = {}
    for axis, name in (("tp", "tensor"), ("pp", "pipeline"), ("dp", "data")):
        flag = f"--{name}-parallel-size"
        used.add(flag)
        fields[axis] = degree(found.get(flag) or 1, flag)
    model = None
    if "serve" in others:
        after = others[others.index("serve") + 1 :]
        model = after[0] if after else None
    length = found.get("--max-model-len")
    tokens = found.get("--max-num-batched-tokens")
    weights = found.get("--quantization")
    return ToolConfiguration(
        tool="vllm",
        fields={k: v for k, v in fields.items() if k != "dp"},
        data_ranks=fields["dp"],
        world=fields["tp"] * fields["pp"] * fields["dp"],
        microbatch=None if tokens is None else whole(tokens, "--max-num-batched-tokens"),
        seq_len=None if length is None else whole(length, "--max-model-len"),
        model=model or found.get("--model"),
        precision="fp8" if str(weights).startswith("fp8") else
        "fp16" if found.get("--dtype") in ("half", "float16") else "bf16",
        unread=_unread(found, {*used, "--model"}),
    )  # fmt: skip


READERS: dict[str, Callable[[str], ToolConfiguration]] = {
    "megatron": megatron,
    "torchtitan": torchtitan,
    "torchtitan-0.2.2": torchtitan_toml,
    "torchtitan-python": torchtitan_python,
    "deepspeed": deepspeed,
    "accelerate": accelerate,
    "vllm": vllm,
}
