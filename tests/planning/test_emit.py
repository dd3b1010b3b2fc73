"""A plan as other tools' flags."""

from __future__ import annotations

import json

import pytest

from hocket.catalogue.hardware import cluster
from hocket.catalogue.shapes import shape
from hocket.planning.emit import TOOLS, emit
from hocket.planning.plan import plan_one
from hocket.planning.problem import Problem
from hocket.spec.errors import OptionError
from hocket.spec.layout import Layout

PROBLEM = Problem(
    shape=shape("llama-3-8b"), cluster=cluster("4x8xH100-SXM"), seq_len=4096, global_batch=64
)


def flags(tool: str, text: str) -> str:
    found = plan_one(PROBLEM, Layout.parse(text)).best
    return emit(tool, found, seq_len=4096, global_batch=64, model="llama-3-8b")


def words(text: str) -> dict[str, str]:
    lines = [line.rstrip(" \\").split() for line in text.splitlines() if line[0] != "#"]
    return {line[0]: " ".join(line[1:]) for line in lines}


def test_megatron() -> None:
    found = words(
        flags(
            "megatron",
            "dp4.pp4.tp2:schedule=interleaved,microbatches=8,virtual_stages=2,zero=1,"
            "recompute=full,sequence_parallel=true",
        )
    )
    assert found["--tensor-model-parallel-size"] == "2"
    assert found["--pipeline-model-parallel-size"] == "4"
    assert found["--num-virtual-stages-per-pipeline-rank"] == "2"
    assert found["--micro-batch-size"] == "2"
    assert found["--global-batch-size"] == "64"
    assert found["--recompute-granularity"] == "full"
    assert {"--sequence-parallel", "--use-distributed-optimizer", "--bf16"} <= set(found)


def test_torchtitan() -> None:
    found = words(flags("torchtitan", "dp8.tp4:microbatches=2,zero=3,shard=4,recompute=selective"))
    p = "--parallelism."
    assert found[f"{p}data_parallel_replicate_degree"] == "2"
    assert found[f"{p}data_parallel_shard_degree"] == "4"
    assert found[f"{p}tensor_parallel_degree"] == "4"
    assert found["--training.local_batch_size"] == "4"
    assert found["--activation_checkpoint.mode"] == "selective"


def test_deepspeed_is_a_configuration_whose_batch_adds_up() -> None:
    found = json.loads(flags("deepspeed", "dp8.pp2.tp2:microbatches=4,zero=1"))
    assert found["train_batch_size"] == 64
    assert found["train_micro_batch_size_per_gpu"] * found["gradient_accumulation_steps"] * 8 == 64
    assert found["zero_optimization"]["stage"] == 1
    assert found["pipeline"] == {"stages": 2}


def test_vllm() -> None:
    text = flags("vllm", "dp2.pp2.tp8:microbatches=4")
    assert "vllm serve llama-3-8b" in text
    assert "--tensor-parallel-size 8" in text
    assert "--pipeline-parallel-size 2" in text


def test_what_a_tool_lacks_is_said() -> None:
    text = flags("megatron", "dp8.pp4:schedule=zero-bubble,microbatches=8")
    assert text.startswith("# Megatron-LM has no zero-bubble schedule")
    assert "always sequence parallel" in flags("torchtitan", "dp16.tp2")


def test_zb_v_is_torchtitans_own_and_said_of_others() -> None:
    text = "dp4.pp4.tp2:schedule=zb-v,microbatches=8,virtual_stages=2"
    found = words(flags("torchtitan", text))
    assert found["--parallelism.pipeline_parallel_schedule"] == "ZBVZeroBubble"
    assert "no zb-v schedule" in flags("megatron", text)
    assert "no zb-v schedule" in json.loads(flags("deepspeed", text))["comment"][0]


def test_context_parallelism_is_named() -> None:
    found = words(flags("megatron", "dp2.cp16:microbatches=8"))
    assert found["--context-parallel-size"] == "16"
    assert found["--cp-comm-type"] in ("p2p", "a2a")
    assert "--cp-comm-type" not in words(flags("megatron", "dp8.tp4:microbatches=8"))


def test_a_shard_and_a_precision() -> None:
    found = plan_one(PROBLEM, Layout.parse("dp32:microbatches=2,zero=1,shard=8")).best
    asked = {"seq_len": 4096, "global_batch": 64, "model": "llama-3-8b"}
    told = words(emit("megatron", found, precision="fp8", **asked))
    assert told["--num-distributed-optimizer-instances"] == "4"
    assert told["--fp8-format"] == "hybrid"
    assert json.loads(emit("deepspeed", found, precision="fp16", **asked))["fp16"]["enabled"]
    text = flags("deepspeed", "dp32:microbatches=2,zero=3,shard=8")
    assert json.loads(text)["zero_optimization"]["mics_shard_size"] == 8


def test_an_unknown_tool_gets_the_nearest_name() -> None:
    with pytest.raises(OptionError, match="unknown tool") as caught:
        flags("megatrn", "dp32")
    assert "megatron" in (caught.value.hint or "")
    assert set(TOOLS) == {"torchtitan", "megatron", "deepspeed", "vllm"}


@pytest.mark.parametrize("tool", ["megatron", "torchtitan", "deepspeed"])
def test_a_cut_by_hand_is_said_to_be_lost(tool: str) -> None:
    assert "14-6-6-6 layers a stage" in flags(tool, "dp2.pp4.tp4:cut=14-6-6-6")
    assert "layers a stage" not in flags(tool, "dp2.pp4.tp4")


def test_a_model_whose_path_needs_quotes_is_quoted() -> None:
    found = plan_one(PROBLEM, Layout.parse("dp16.tp2")).best
    said = emit("vllm", found, seq_len=4096, global_batch=64, model="/my models/a; b")
    assert "vllm serve '/my models/a; b' " in said


def test_megatron_takes_lighter_ends_and_modules() -> None:
    layout = "dp4.pp2.tp4:cut=light-ends,recompute=modules,microbatches=4"
    found = words(flags("megatron", layout))
    assert "--account-for-embedding-in-pipeline-split" in found
    assert "--account-for-loss-in-pipeline-split" in found
    assert found["--recompute-granularity"] == "selective"
    assert found["--recompute-modules"] == "layernorm moe_act mla_up_proj"
    other = flags("torchtitan", layout)
    assert "one layer fewer" in other
    assert words(other)["--activation_checkpoint.mode"] == "none"
