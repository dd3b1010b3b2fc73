"""Argument rules of other tools, restated: they read the text that is emitted, and nothing of ours.

Each function takes that text and the facts of the job, and asserts every rule of the tool's own
argument check (the sources are named in the modules of `hocket.planning.tools`).
"""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from typing import Any

import yaml

Facts = dict[str, Any]
"""gpus, layers, heads, experts, seq_len, global_batch, capability."""


def flags(text: str) -> dict[str, str]:
    """Flag to its words; an `export` or `unset` line is kept under `environment`."""
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    found = {"environment": ""}
    while lines and lines[0].startswith(("export ", "unset ")):
        found["environment"] = lines.pop(0)
    words = shlex.split(" ".join(lines).replace("\\ ", " "))
    name = ""
    for word in words:
        if word.startswith("--") or name == "" or word.startswith("activation-checkpoint:"):
            name = word
            assert name not in found, name
            found[name] = ""
        else:
            found[name] = f"{found[name]} {word}".strip()
    return found


def _number(found: dict[str, str], name: str, default: int = 1) -> int:
    return int(found.get(name, default))


def megatron_layers(text: str) -> list[int]:
    """Layers of each stage of `Et*9|t*9|t*8|t*6L`, by the notation's own rules."""
    stages = text.split("|")
    assert stages[0].startswith("E"), text
    assert stages[-1].endswith("L"), text
    counts = []
    for stage in stages:
        body = stage.removeprefix("E").removesuffix("L")
        assert re.fullmatch(r"(t\*\d+|t+)?", body), stage
        counts.append(int(body[2:]) if body.startswith("t*") else len(body))
    return counts


def megatron(text: str, facts: Facts) -> None:
    found = flags(text)
    tp = _number(found, "--tensor-model-parallel-size")
    pp = _number(found, "--pipeline-model-parallel-size")
    cp = _number(found, "--context-parallel-size")
    ep = _number(found, "--expert-model-parallel-size")
    gpus = facts["gpus"]
    assert gpus % (tp * pp * cp) == 0
    dp = gpus // (tp * pp * cp)
    etp = _number(found, "--expert-tensor-parallel-size", tp)
    assert gpus % (etp * ep * pp) == 0
    assert ep == 1 or facts["experts"] % ep == 0
    micro, batch = _number(found, "--micro-batch-size"), _number(found, "--global-batch-size")
    assert batch % (micro * dp) == 0
    count = batch // (micro * dp)
    seq = _number(found, "--seq-length")
    assert cp == 1 or seq % (2 * cp) == 0
    if "--sequence-parallel" in found:
        assert tp > 1
        assert seq % (tp * cp) == 0
    assert not (facts["experts"] and tp > 1) or "--sequence-parallel" in found
    # The pipeline.
    cuts = {
        "--num-layers-per-virtual-pipeline-stage",
        "--num-virtual-stages-per-pipeline-rank",
        "--pipeline-model-parallel-layout",
    } & set(found)
    assert len(cuts) <= 1
    virtual = _number(found, "--num-virtual-stages-per-pipeline-rank")
    if "--pipeline-model-parallel-layout" in found:
        counts = megatron_layers(found["--pipeline-model-parallel-layout"])
        assert sum(counts) == facts["layers"]
        assert len(counts) % pp == 0
        virtual = len(counts) // pp
    else:
        assert facts["layers"] % (pp * virtual) == 0
    if virtual > 1:
        assert pp > 1
        assert count >= pp
        assert count % pp == 0
    # State.
    fsdp = "--use-megatron-fsdp" in found
    assert ("--ckpt-format" in found) == fsdp
    assert not fsdp or found["--ckpt-format"] == "fsdp_dtensor"
    assert "--data-parallel-sharding-strategy" not in found or fsdp
    if "--overlap-param-gather" in found:
        assert "--overlap-grad-reduce" in found
        assert "--use-distributed-optimizer" in found or fsdp
    instances = _number(found, "--num-distributed-optimizer-instances")
    assert dp * cp % instances == 0
    assert (dp * cp * tp // (ep * etp)) % instances == 0
    # The environment.
    old = facts["capability"][0] < 10
    if fsdp:
        assert "CUDA_DEVICE_MAX_CONNECTIONS=1" not in found["environment"]
    elif old and (tp > 1 or cp > 1):
        assert found["environment"] == "export CUDA_DEVICE_MAX_CONNECTIONS=1"
    # The rest.
    if found.get("--recompute-granularity") == "full":
        assert found["--recompute-method"] in ("uniform", "block")
        assert int(found["--recompute-num-layers"]) >= 1
    else:
        assert not {"--recompute-method", "--recompute-num-layers"} & set(found)
    modules = set(found.get("--recompute-modules", "").split())
    assert modules <= {"layernorm", "moe_act", "mla_up_proj", "mlp"}
    assert not modules or found["--recompute-granularity"] == "selective"
    assert "moe_act" not in modules or "--moe-grouped-gemm" in found
    if {"layernorm", "moe_act"} & modules and "--fp8-format" in found:
        assert found.get("--fp8-recipe", "delayed") != "delayed"  # TransformerConfig.__post_init__
    assert not {"--fp8-format", "--fp4-format"} <= set(found)
    if "--optimizer-cpu-offload" in found:
        assert "--use-precision-aware-optimizer" in found
        assert "--use-distributed-optimizer" in found
    if "--use-tp-pp-dp-mapping" in found and pp > 1 and ep > 1:
        assert dp * cp * tp // (ep * etp) == dp


def _torchtitan(p: dict[str, Any], t: dict[str, Any], facts: Facts, head: str) -> None:
    replicate, shard = p["data_parallel_replicate_degree"], p["data_parallel_shard_degree"]
    tp, pp, cp = (p[f"{n}_parallel_degree"] for n in ("tensor", "pipeline", "context"))
    assert replicate * shard * cp * tp * pp == facts["gpus"]
    local, batch = t["local_batch_size"], t["global_batch_size"]
    assert batch % (local * replicate * shard) == 0
    parallel = p.get("enable_sequence_parallel", True)
    assert t["seq_len"] % ((tp if parallel else 1) * (2 * cp if cp > 1 else 1)) == 0
    if pp == 1:
        return
    size = p["pipeline_parallel_microbatch_size"]
    assert local % size == 0
    count = local // size
    assert batch == local * replicate * shard  # a step is one run of the pipeline
    parts = p["module_fqns_per_model_part"]
    assert len(parts) % pp == 0
    virtual = len(parts) // pp
    modules = [module for part in parts for module in part]
    layers = [f"layers.{i}" for i in range(facts["layers"])]
    assert modules == ["tok_embeddings", *layers, "norm", head]
    schedule = p["pipeline_parallel_schedule"]
    assert schedule in ("1F1B", "GPipe", "Interleaved1F1B", "ZBVZeroBubble")
    if schedule in ("1F1B", "GPipe"):
        assert virtual == 1
    if schedule == "1F1B":  # torch.distributed.pipelining.schedules.Schedule1F1B
        assert count >= pp
    if schedule == "Interleaved1F1B":
        assert virtual >= 2
        assert count % max(1, count // pp) == 0
    if schedule == "ZBVZeroBubble":
        assert virtual == 2


def torchtitan(text: str, facts: Facts) -> None:
    """Release 0.3.0."""
    found = flags(text)
    assert found["--module"]
    assert found["--config"]
    assert not any(name.startswith(("--activation_checkpoint", "--model.")) for name in found)
    last = [name for name in found if name.startswith("activation-checkpoint:")]
    assert last == [list(found)[-1]]
    assert last[0].partition(":")[2] in ("none", "full", "selective", "memory-budget")
    p: dict[str, Any] = {}
    t: dict[str, Any] = {}
    for name, value in found.items():
        section, _, key = name.removeprefix("--").partition(".")
        into = {"parallelism": p, "training": t}.get(section)
        if into is not None:
            into[key] = int(value) if value.isdigit() else value
    if "no-enable_sequence_parallel" in p:
        p["enable_sequence_parallel"] = False
    assert not {"expert_tensor_parallel_degree", "context_parallel_rotate_method"} & set(p)
    if "module_fqns_per_model_part" in p:
        stages = p["module_fqns_per_model_part"].split(" ")
        p["module_fqns_per_model_part"] = [stage.split(",") for stage in stages]
    ep, tp = p.get("expert_parallel_degree", 1), p["tensor_parallel_degree"]
    assert p["data_parallel_shard_degree"] * p["context_parallel_degree"] * tp % ep == 0
    if p["pipeline_parallel_degree"] > 1 or ep > 1:
        assert "disable_cuda_graphs" in t
    _torchtitan(p, t, facts, "lm_head")


def torchtitan_old(text: str, facts: Facts) -> None:
    """Release 0.2.2."""
    found = tomllib.loads(text)
    p, t = found["parallelism"], found["training"]
    ep, tp = p.get("expert_parallel_degree", 1), p["tensor_parallel_degree"]
    if ep > 1:
        assert p["expert_tensor_parallel_degree"] in (1, tp)
        whole = tp if p["expert_tensor_parallel_degree"] == 1 else 1
        assert p["data_parallel_shard_degree"] * p["context_parallel_degree"] * whole % ep == 0
    others = tp * p["pipeline_parallel_degree"] > 1
    sharded = p["data_parallel_shard_degree"] * p["context_parallel_degree"] > 1
    assert sharded or p["data_parallel_replicate_degree"] == 1 or not others
    assert found["activation_checkpoint"]["mode"] in ("none", "full", "selective")
    _torchtitan(p, t, facts, "output")


def deepspeed(text: str, facts: Facts) -> None:
    found = json.loads(text)
    tp = found.get("tensor_parallel", {}).get("autotp_size", 1)
    sp = found.get("sequence_parallel_size", 1)
    notes = " ".join(found["comment"])
    stages = int((re.search(r"num_stages=(\d+)", notes) or [0, "1"])[1])
    assert tp == 1 or stages == 1
    # The ranks that its batch equation counts.
    ranks = facts["gpus"] // (stages * sp)
    if sp > 1:
        ranks = found["data_parallel_size"]
        assert ranks * sp == facts["gpus"]
        assert facts["heads"] % sp == facts["seq_len"] % sp == 0
        assert tp == stages == 1
    micro = found["train_micro_batch_size_per_gpu"]
    steps = found["gradient_accumulation_steps"]
    if "train_batch_size" in found:
        assert found["train_batch_size"] == micro * steps * ranks
    assert micro * steps * ranks == facts["global_batch"] * tp
    assert not ("bf16" in found and "fp16" in found)
    state = found["zero_optimization"]
    known = {
        "stage", "overlap_comm", "contiguous_gradients", "offload_optimizer", "offload_param",
        "mics_shard_size",
    }  # fmt: skip
    assert set(state) <= known
    if stages > 1:
        assert state["stage"] <= 1
        assert facts["layers"] % stages == 0
    if "mics_shard_size" in state:
        assert state["stage"] == 3
        assert tp * sp * stages == 1
        assert facts["gpus"] % state["mics_shard_size"] == 0
    if "offload_param" in state:
        assert state["stage"] == 3
    if "tensor_parallel" in found:
        assert set(found["tensor_parallel"]) <= {"autotp_size", "preset_model"}
    expert = found.get("expert_parallel")
    if expert is not None:
        assert expert["enabled"]
        presets = ("mixtral", "qwen3_moe", "qwen3_5_moe", "deepseek_v2", "deepseek_v3")
        assert expert["preset_model"] in presets
        assert tp * sp * stages == 1
        assert facts["gpus"] % expert["autoep_size"] == 0
        assert facts["experts"] % expert["autoep_size"] == 0
    assert set(found) <= {
        "comment", "train_batch_size", "train_micro_batch_size_per_gpu", "expert_parallel",
        "gradient_accumulation_steps", "bf16", "fp16", "zero_optimization", "tensor_parallel",
        "sequence_parallel_size", "data_parallel_size", "pipeline",
    }  # fmt: skip


def accelerate(text: str, facts: Facts) -> None:
    found = yaml.safe_load(text)
    known = {
        "compute_environment", "distributed_type", "num_machines", "num_processes",
        "mixed_precision", "fsdp_config", "parallelism_config",
    }  # fmt: skip
    assert set(found) <= known
    assert found["distributed_type"] in ("FSDP", "MULTI_GPU", "NO")
    assert found["mixed_precision"] in ("no", "fp16", "bf16", "fp8")
    assert found["num_processes"] == facts["gpus"]
    if "parallelism_config" not in found:
        assert found["distributed_type"] != "FSDP"
        return
    assert found["fsdp_config"]["fsdp_version"] == 2
    sizes = {
        key.removeprefix("parallelism_config_").removesuffix("_size"): value
        for key, value in found["parallelism_config"].items()
    }
    assert set(sizes) == {"dp_replicate", "dp_shard", "tp", "cp"}
    total = 1
    for size in sizes.values():
        total *= size
    assert total == facts["gpus"]
    assert sizes["dp_shard"] > 1 or sizes["cp"] > 1
    if sizes["tp"] > 1 or sizes["cp"] > 1:
        assert sizes["dp_replicate"] == 1 or sizes["dp_shard"] > 1


def automodel(text: str, facts: Facts) -> None:
    found = yaml.safe_load(text)
    split, step = found["distributed"], found["step_scheduler"]
    assert split["strategy"] in ("fsdp2", "megatron_fsdp", "ddp")
    sizes = [split[f"{axis}_size"] for axis in ("dp", "tp", "pp", "cp")]
    total = 1
    for size in sizes:
        total *= size
    assert total == facts["gpus"]
    assert split["dp_size"] % split["dp_replicate_size"] == 0
    assert step["global_batch_size"] % (step["local_batch_size"] * split["dp_size"]) == 0
    if split["pp_size"] > 1:
        pipeline = split["pipeline"]
        stages, rest = divmod(facts["layers"], pipeline["layers_per_stage"])
        assert rest == 0
        assert stages % split["pp_size"] == 0
        assert step["local_batch_size"] % pipeline["pp_microbatch_size"] == 0


def bridge(text: str, facts: Facts) -> None:
    """The same values as Megatron's, under a ConfigContainer's names."""
    assigned = dict(re.findall(r"cfg\.([\w.]+) = (.+)", text))
    value = {name: json.loads(_json(text)) for name, text in assigned.items()}
    tp, pp = value["model.tensor_model_parallel_size"], value["model.pipeline_model_parallel_size"]
    cp = value["model.context_parallel_size"]
    dp = facts["gpus"] // (tp * pp * cp)
    assert dp * tp * pp * cp == facts["gpus"]
    assert value["train.global_batch_size"] % (value["train.micro_batch_size"] * dp) == 0
    layers, virtual = value["model.pipeline_model_parallel_layout"], None
    if layers is not None:
        assert value["model.virtual_pipeline_model_parallel_size"] is None
        assert sum(megatron_layers(layers)) == facts["layers"]
    else:
        virtual = value["model.virtual_pipeline_model_parallel_size"] or 1
        assert facts["layers"] % (pp * virtual) == 0
    assert not (facts["experts"] and tp > 1) or value["model.sequence_parallel"]
    if value.get("ddp.use_megatron_fsdp"):
        assert value["checkpoint.ckpt_format"] == "fsdp_dtensor"
        assert "dist.use_tp_pp_dp_mapping" not in value
        assert "CUDA_DEVICE_MAX_CONNECTIONS=1" not in text
    assert value["mixed_precision"] in ("bf16_mixed", "fp16_mixed")


def _json(text: str) -> str:
    words = {"True": "true", "False": "false", "None": "null"}
    return words.get(text, text.replace("'", '"'))


def _command(text: str) -> tuple[dict[str, str], dict[str, str], list[str]]:
    """Environment, flags and the words before them."""
    words = shlex.split("\n".join(x for x in text.splitlines() if x[0] != "#").replace("\\\n", " "))
    environment = {}
    while re.fullmatch(r"[A-Z_]+=.*", words[0]):
        name, _, value = words.pop(0).partition("=")
        environment[name] = value
    first = next(i for i, word in enumerate(words) if word.startswith("--"))
    found, name = {}, ""
    for word in words[first:]:
        if word.startswith("--"):
            name = word
            assert name not in found, name
            found[name] = ""
        else:
            found[name] = f"{found[name]} {word}".strip()
    return environment, found, words[:first]


def _partition(found: str | None, stages: int, layers: int) -> None:
    if found is None:
        assert layers % stages == 0
    else:
        counts = [int(n) for n in found.split(",")]
        assert len(counts) == stages
        assert sum(counts) == layers


def vllm(text: str, facts: Facts) -> None:
    environment, found, words = _command(text)
    assert words[:2] == ["vllm", "serve"]
    assert words[2] == "MODEL" or "/" in words[2]
    tp = _number(found, "--tensor-parallel-size")
    pp = _number(found, "--pipeline-parallel-size")
    dp = _number(found, "--data-parallel-size")
    assert facts["heads"] % tp == 0
    tokens = _number(found, "--max-num-batched-tokens")
    assert tokens == facts["tokens"]  # each data rank is an engine with limits of its own
    assert _number(found, "--max-num-seqs") == min(facts["sequences"], tokens)
    assert "--enable-chunked-prefill" in found or tokens >= _number(found, "--max-model-len")
    nodes = _number(found, "--nnodes")
    assert tp * pp <= facts["gpus_per_node"] or nodes > 1
    assert dp * tp * pp % nodes == 0
    assert dp * tp * pp // nodes <= facts["gpus_per_node"] or "--data-parallel-size-local" in found
    if "--data-parallel-size-local" in found:
        assert 1 <= int(found["--data-parallel-size-local"]) <= dp
        assert "--data-parallel-address" in found
        assert int(found["--data-parallel-size-local"]) * tp * pp <= facts["gpus_per_node"]
    if nodes > 1:
        assert {"--node-rank", "--master-addr"} <= set(found)
    # With experts, ranks of --data-parallel-size are one group, not replicas.
    assert not facts["experts"] or dp == facts["ep"]
    assert ("--enable-expert-parallel" in found) == (facts["ep"] > 1)
    assert found.get("--quantization") in (None, "fp8_per_tensor", "fp8_per_block")
    assert found.get("--kv-cache-dtype") in (None, "fp8", "auto", "bfloat16")
    assert 0 < float(found["--gpu-memory-utilization"]) <= 1
    _partition(environment.get("VLLM_PP_LAYER_PARTITION"), pp, facts["layers"])


def sglang(text: str, facts: Facts) -> None:
    environment, found, words = _command(text)
    assert words == ["python", "-m", "sglang.launch_server"]
    assert found["--model-path"] == "MODEL" or "/" in found["--model-path"]
    tp, pp = _number(found, "--tp-size"), _number(found, "--pp-size")
    # server_args: attention of data ranks divides the tensor ranks, and experts all of them;
    # --dp-size counts replicas, and with --enable-dp-attention is a deprecated spelling.
    together = "--attn-dp-size" in found
    dp = _number(found, "--attn-dp-size" if together else "--dp-size")
    nodes = _number(found, "--nnodes")
    assert "--enable-dp-attention" not in found
    assert not together or "--dp-size" not in found
    assert together == (facts["ep"] > 1) == ("--ep-size" in found)
    assert not together or (tp % dp == 0 and dp == facts["ep"] and int(found["--ep-size"]) == tp)
    assert facts["heads"] % (tp // dp if together else tp) == 0
    assert tp * pp % nodes == 0
    assert tp * pp // nodes <= facts["gpus_per_node"]
    assert together or dp == 1 or (nodes == 1 and dp * tp * pp <= facts["gpus_per_node"])
    assert nodes == 1 or {"--node-rank", "--dist-init-addr"} <= set(found)
    assert found.get("--kv-cache-dtype") in (None, "fp8_e4m3", "fp8_e5m2")
    assert 0 < float(found["--mem-fraction-static"]) <= 1
    # parallel_hook._handle_data_parallelism and pool_configurator: attention's data ranks divide
    # these; replicas do not.
    each = dp if together else 1
    assert _number(found, "--chunked-prefill-size") // each == facts["tokens"]
    assert _number(found, "--max-running-requests") // each == facts["sequences"]
    _partition(environment.get("SGLANG_PP_LAYER_PARTITION"), pp, facts["layers"])


SERVER_RULES = {"vllm": vllm, "sglang": sglang}

RULES = {
    "megatron": megatron,
    "megatron-bridge": bridge,
    "torchtitan": torchtitan,
    "torchtitan-0.2.2": torchtitan_old,
    "deepspeed": deepspeed,
    "accelerate": accelerate,
    "automodel": automodel,
}
