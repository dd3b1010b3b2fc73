"""Megatron-LM's flags and Megatron-Bridge's attributes, read as a layout."""

from __future__ import annotations

import re
from typing import Any

from hocket.planning.reading import words
from hocket.planning.reading.configuration import ToolConfiguration, degree, not_a_layout, unread
from hocket.planning.reading.python import assignments
from hocket.spec import recompute
from hocket.spec.errors import OptionError


def _modules(words: str | None) -> str:
    """Megatron's --recompute-modules as a value of `Layout.recompute`. Raises OptionError."""
    named = (words or "").split()
    known = {value: one for one, value in recompute.MEGATRON.items()}
    if not named or not set(named) <= set(known):
        raise not_a_layout(f"--recompute-modules {words}")
    return recompute.parse("+".join(known[one] for one in named))


_STRATEGIES = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}


BRIDGE = {
    **{
        f"model.{name}": f"--{name.replace('_', '-')}"
        for name in (
            "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size",
            "expert_model_parallel_size", "expert_tensor_parallel_size", "sequence_parallel",
            "pipeline_model_parallel_layout", "recompute_granularity", "recompute_method",
            "recompute_num_layers", "recompute_modules", "seq_length", "cp_comm_type", "num_layers",
            "mtp_num_layers",
        )
    },
    "model.virtual_pipeline_model_parallel_size": "--num-virtual-stages-per-pipeline-rank",
    "model.num_layers_in_first_pipeline_stage": "--decoder-first-pipeline-num-layers",
    "model.num_layers_in_last_pipeline_stage": "--decoder-last-pipeline-num-layers",
    "model.account_for_embedding_in_pipeline_split":
        "--account-for-embedding-in-pipeline-split",
    "model.account_for_loss_in_pipeline_split": "--account-for-loss-in-pipeline-split",
    "train.micro_batch_size": "--micro-batch-size",
    "train.global_batch_size": "--global-batch-size",
    **{
        f"ddp.{name}": f"--{name.replace('_', '-')}"
        for name in (
            "use_distributed_optimizer", "num_distributed_optimizer_instances",
            "overlap_grad_reduce", "use_megatron_fsdp", "data_parallel_sharding_strategy",
        )
    },
    "ddp.overlap_param_gather": "--overlap-param-gather",
    "dist.use_tp_pp_dp_mapping": "--use-tp-pp-dp-mapping",
    "checkpoint.ckpt_format": "--ckpt-format",
}  # fmt: skip
"""Attributes of Megatron-Bridge's ConfigContainer, to Megatron-LM's flags of the same meaning."""

OTHERS = (
    "--recompute-activations", "--num-layers-per-virtual-pipeline-stage",
    "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers",
    "--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split",
    "--use-torch-fsdp2", "--torch-fsdp2-no-reshard-after-forward",
)  # fmt: skip
"""Flags that are read and never printed: none of them stays in a changed command."""

_RECIPES = ("bf16", "fp16", "fp8", "fp4")


def megatron(text: str) -> ToolConfiguration:
    """Megatron-LM's arguments, alone or in a launch script."""
    _, found = words.words_and_flags(text)
    return _megatron("megatron", dict(found), {})


def megatron_bridge(text: str) -> ToolConfiguration:
    """Megatron-Bridge: the literal assignments to a ConfigContainer in Python."""
    found: dict[str, Any] = {}
    names: dict[str, str] = {}
    for name, value in assignments(text).items():
        if name == "mixed_precision" and isinstance(value, str) and not value.startswith("<"):
            given = [kind for kind in _RECIPES if kind in value]
            found |= {f"--{kind}" + ("-format" if kind[2] in "84" else ""): None for kind in given}
            continue
        flag = BRIDGE.get(name, name)
        names[flag] = name
        if value is None or (value is False and flag != name):
            continue
        if flag == "--recompute-modules" and isinstance(value, list):
            value = " ".join(map(str, value))
        found[flag] = None if value is True else value
    return _megatron("megatron-bridge", found, names)


def changed_environment(text: str, line: str | None) -> str:
    """A script whose CUDA_DEVICE_MAX_CONNECTIONS is as `line` has it; None: as it is."""
    if line is None:
        return text
    name, ends = "CUDA_DEVICE_MAX_CONNECTIONS", r"(?=[ \t]*(?:[;#\n]|$))"
    text = re.sub(rf"(?m)^([ \t]*)(?:export[ \t]+{name}=[^\s;]*|unset[ \t]+{name}){ends}",
                  rf"\1{line}", text)  # fmt: skip
    if line.startswith("unset"):  # set for one command alone
        return re.sub(rf"(?m)(^|(?<=\s)){name}=[^\s;]*[ \t]+(?=\S)", "", text)
    return re.sub(rf"\b{name}=[^\s;]*", line.removeprefix("export "), text)


def _megatron(tool: str, found: dict[str, Any], spelled: dict[str, str]) -> ToolConfiguration:
    """Of flags with their values; `spelled`: what the file calls them."""
    used: set[str] = set()

    def has(name: str) -> bool:
        used.add(name)
        return name in found

    def number(name: str, default: int | None = None) -> int | None:
        return degree(found[name], spelled.get(name, name)) if has(name) else default

    tp = number("--tensor-model-parallel-size", 1) or 1
    pp = number("--pipeline-model-parallel-size", 1) or 1
    cp = number("--context-parallel-size", 1) or 1
    ep = number("--expert-model-parallel-size", 1) or 1
    expert_tp = number("--expert-tensor-parallel-size", tp)
    if has("--cp-comm-type") and found["--cp-comm-type"] not in ("p2p", "a2a"):
        raise not_a_layout(f"--cp-comm-type {found['--cp-comm-type']}")
    fields: dict[str, Any] = {"tp": tp, "pp": pp, "cp": cp, "ep": ep}
    mixture = (
        ep > 1
        or tool != "megatron"
        or any(n.startswith(("--moe-", "--num-experts")) for n in found)
    )
    if mixture and expert_tp != tp:
        fields["etp"] = expert_tp
    virtual = number("--num-virtual-stages-per-pipeline-rank", 1) or 1
    fields["pipeline_split"] = "even" if pp > 1 else "balanced"
    if has("--pipeline-model-parallel-layout"):
        cut = megatron_layers(str(found["--pipeline-model-parallel-layout"] or ""))
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
    has("--data-parallel-sharding-strategy")  # without Megatron-FSDP it has no effect
    if has("--use-megatron-fsdp"):
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
        raise not_a_layout("--recompute-method block")
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
    seq, predictions = number("--seq-length"), number("--mtp-num-layers", 0) or 0
    world = 1
    for names in (("--nproc_per_node", "--nproc-per-node"), ("--nnodes",)):
        size = next((n for n in names if has(n) and str(found[n]).isdecimal()), None)
        world = world * degree(found[size], size) if size and world else 0
    used |= {
        "--overlap-grad-reduce", "--overlap-param-gather", "--ckpt-format", "--attention-backend",
        "--moe-grouped-gemm", "--moe-token-dispatcher-type", "--use-precision-aware-optimizer",
        "--no-gradient-accumulation-fusion", "--num-layers", "--fp8-recipe",
    }  # fmt: skip
    gpus = world or None
    others = {spelled.get(k, k): v for k, v in found.items() if k not in used}
    return ToolConfiguration(
        tool=tool, fields=fields, instances=instances, world=gpus, microbatch=micro,
        global_batch=batch, seq_len=seq, precision=precision, predictions=predictions,
        unread=unread(others, ()), notes=tuple(notes),
    )  # fmt: skip


def megatron_layers(text: str) -> tuple[int, ...]:
    """Layers of each stage of `Et*9|t*9|(t|)*2tmL`, without m, those for multi-token prediction,
    which end the last one. Raises OptionError where it is not read."""
    text = text.strip("'\" ").replace(",", "")

    def repeated(match: re.Match[str]) -> str:
        times = int(match[2])
        if times > 512:
            raise OptionError(f"the layout repeats a part {times} times")
        return match[1] * times

    plain = re.sub(r"\(([^()]*)\)\*(\d{1,4})", repeated, text)
    plain = re.sub(r"([tm|])\*(\d{1,4})", repeated, plain)
    if not re.fullmatch(r"E[t|]*m*L", plain):
        raise OptionError(
            f"the layout {text[:60]!r} is not read: E, stages of t divided by |, m before L alone"
        )
    return tuple(stage.count("t") for stage in plain.split("|"))
