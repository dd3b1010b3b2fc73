"""Layouts as other tools' flags: what is printed, the tool accepts; what it lacks is an error."""

from __future__ import annotations

import dataclasses
import json
import random
from typing import Any

import pytest

from hocket.catalogue.hardware import cluster
from hocket.catalogue.shapes import shape
from hocket.cost.constants import stacks
from hocket.jobs.plan import plan_training
from hocket.planning.layouts import layout_at
from hocket.planning.plan import best_layouts, plan_one
from hocket.planning.problem import OWN, Problem
from hocket.planning.stacks import STACKS
from hocket.planning.tools.emit import TOOLS, emit, job, tool_reasons
from hocket.planning.tools.limits import division
from hocket.spec.errors import LayoutError, OptionError
from hocket.spec.layout import Layout
from tests.planning import tool_rules
from tests.rotation import part

DENSE = Problem(
    shape=shape("llama-3-8b"), cluster=cluster("4x8xH100-SXM"), seq_len=4096, global_batch=64
)
EXPERTS = dataclasses.replace(DENSE, shape=shape("qwen3-30b-a3b"))
MODERN = dataclasses.replace(DENSE, cluster=cluster("4x8xB200"))


def emitted(tool: str, text: str, problem: Problem = DENSE) -> str:
    return emit(tool, problem, plan_one(problem, Layout.parse(text)).best)


def facts(problem: Problem, layout: Layout) -> dict[str, Any]:
    return {
        "gpus": layout.world_size,
        "layers": problem.facts.layers,
        "heads": problem.facts.heads,
        "experts": problem.facts.experts,
        "seq_len": problem.seq_len,
        "global_batch": problem.global_batch,
        "capability": problem.facts.capability,
    }


def some_layouts(problem: Problem, seed: int, count: int) -> list[Layout]:
    """Legal layouts at random, some with another rank order, an uneven split or offload."""
    draw = random.Random(seed)
    rows = problem.legal(32)
    found = []
    for index in draw.sample(range(len(rows)), count):
        layout = layout_at(rows, index)
        changes: dict[str, Any] = {}
        if draw.random() < 0.2:
            changes["order"] = draw.choice([("tp", "cp", "pp", "dp"), ("dp", "tp", "cp", "pp")])
        if draw.random() < 0.2 and layout.zero == 1:
            changes["offload"] = "optimizer"
        found.append(dataclasses.replace(layout, **changes))
    return found


@pytest.mark.timeout(60)
@pytest.mark.parametrize("problem", part([DENSE, EXPERTS, MODERN], 3))
def test_whatever_is_emitted_keeps_the_rules_of_its_tool(problem: Problem) -> None:
    counts = dict.fromkeys(TOOLS, 0)
    layouts = some_layouts(problem, 7, 60)
    for name in TOOLS:  # and some that it can run, of which there may be few among all
        limits = TOOLS[name].limits
        bounded = dataclasses.replace(problem, limits=(limits,), division=division([limits]))
        rows = bounded.legal(32)
        draw = random.Random(3)
        for index in draw.sample(range(len(rows)), min(12, len(rows))):
            layout = layout_at(rows, index)
            if not limits.any_split and layout.pp > 1:
                layout = dataclasses.replace(layout, pipeline_split="even")
            layouts.append(layout)
    known = plan_one(problem, Layout(dp=32)).best
    for layout in layouts:
        size = 64 // layout.dp // (layout.microbatches or 1)
        context = random.Random(str(layout)).choice(["ring", "ulysses"]) if layout.cp > 1 else ""
        found = dataclasses.replace(known, layout=layout, microbatch=size, context=context)
        for name, tool in TOOLS.items():
            if tool_reasons(tool.limits, problem, found):
                with pytest.raises(LayoutError, match="cannot run"):
                    emit(name, problem, found)
                continue
            counts[name] += 1
            tool_rules.RULES[name](emit(name, problem, found), facts(problem, layout))
    assert min(counts.values()) >= 10, counts


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", part(list(STACKS), 3))
def test_every_ranked_layout_is_one_that_the_stack_can_run(name: str) -> None:
    stack = STACKS[name]
    for problem in (DENSE, EXPERTS):
        bounded = dataclasses.replace(
            problem, stack=name, limits=(stack.limits,), division=division([stack.limits])
        )
        for found in best_layouts(bounded, top=5, everything=True).layouts:
            assert not tool_reasons(stack.limits, bounded, found), found.layout
            if stack.tool:
                text = emit(stack.tool, bounded, found)
                tool_rules.RULES[stack.tool](text, facts(bounded, found.layout))


def test_schedules_are_those_that_each_software_has() -> None:
    """Narayanan et al. 2021 of Megatron, whose later versions have no other; DeepSpeed's
    PipelineEngine runs 1F1B alone; ZB-V is torchtitan's."""
    known = {
        name: set(stack.limits.schedules)
        for name, stack in STACKS.items()
        if "pp" in stack.limits.axes
    }
    assert {name for name in known if "zb-v" in known[name]} == {"fsdp", "fsdp-compiled"}
    assert known["deepspeed"] == {"1f1b"}
    for name in ("megatron", "megatron-2022", "megatron-core", "nemo", "megascale"):
        assert known[name] == {"1f1b", "interleaved"}


def test_every_stack_has_a_version_and_years() -> None:
    assert {*STACKS, OWN} == set(stacks())
    for stack in STACKS.values():
        assert stack.years[:2] == "20"
        assert stack.software
        assert stack.tool in ("", *TOOLS)


def test_every_emitted_text_names_the_version() -> None:
    for name, tool in part(list(TOOLS.items()), 3):
        limits = tool.limits
        bounded = dataclasses.replace(DENSE, limits=(limits,), division=division([limits]))
        assert limits.software in emit(
            name, bounded, best_layouts(bounded, top=1, everything=True).best
        )


# --- one test for each defect --------------------------------------------------------------------


def test_the_balanced_split_is_printed() -> None:
    text = "dp4.pp4.tp2:microbatches=4,zero=1,sequence_parallel=true"
    found = tool_rules.flags(emitted("megatron", text))
    counts = tool_rules.megatron_layers(found["--pipeline-model-parallel-layout"])
    layout = plan_one(DENSE, Layout.parse(text)).best.layout
    assert tuple(counts) == DENSE.cut(layout) == (9, 9, 8, 6)
    stages = tool_rules.flags(emitted("torchtitan", text.replace("zero=1", "zero=2")))
    parts = stages["--parallelism.module_fqns_per_model_part"].split()
    assert [part.count("layers.") for part in parts] == [9, 9, 8, 6]
    with pytest.raises(LayoutError, match="layers per stage 9-9-8-6"):
        emitted("deepspeed", "dp8.pp4:microbatches=4,zero=1")
    assert "num_stages=4" in emitted(
        "deepspeed", "dp8.pp4:microbatches=4,zero=1,pipeline_split=even"
    )


@pytest.mark.parametrize(
    ("tool", "text", "why"),
    [
        ("megatron", "dp4.pp4.tp2:schedule=zb-v,microbatches=8,virtual_stages=2", "schedule zb-v"),
        ("megatron", "dp8.pp4:schedule=zero-bubble,microbatches=8", "schedule zero-bubble"),
        ("deepspeed", "dp8.pp4:schedule=zb-v,microbatches=8,virtual_stages=2", "schedule zb-v"),
        ("torchtitan", "dp8.pp4:schedule=zero-bubble,microbatches=8", "schedule zero-bubble"),
        ("torchtitan", "dp32:microbatches=2,zero=1", "zero 1"),
        ("torchtitan", "dp32:zero=3,recompute=selective", "recompute selective"),
        ("torchtitan-0.2.2", "dp16.tp2:zero=3", "sequence_parallel False"),
        ("torchtitan-0.2.2", "dp16.tp2:sequence_parallel=true", "DDP takes no other axis"),
        (
            "deepspeed",
            "dp8.pp2.tp2:microbatches=4,zero=1,pipeline_split=even",
            "builds no pipeline",
        ),
        ("deepspeed", "dp8.pp4:microbatches=4,zero=2,pipeline_split=even", "takes ZeRO-0 and 1"),
        ("deepspeed", "dp32:microbatches=2,zero=1,shard=8", "MiCS"),
        ("deepspeed", "dp32:zero=3,recompute=selective", "recompute selective"),
        ("deepspeed", "dp16.tp2:zero=1,sequence_parallel=true", "sequence_parallel True"),
        ("accelerate", "dp8.pp4:microbatches=4", "pipeline parallelism"),
        ("accelerate", "dp16.tp2", "zero 0"),
        ("automodel", "dp32:zero=1", "zero 1"),
        ("megatron", "dp16.tp2:order=dp-tp-cp-pp", "rank order"),
        ("megatron", "dp32:zero=3,offload=params", "offload params"),
        ("megatron-bridge", "dp32:zero=1,offload=optimizer", "offload optimizer"),
        ("torchtitan", "dp32:zero=3,offload=optimizer", "offload optimizer"),
        ("torchtitan", "dp2.pp4.tp4:microbatches=2,zero=3,sequence_parallel=true", "PyTorch's"),
        ("megatron", "dp32:zero=1,recompute=modules", "recompute activation of a dense model"),
        *(
            (tool, "dp32:zero=3,recompute=modules", "recompute norm.*: it has")
            for tool in ("torchtitan", "torchtitan-0.2.2", "deepspeed", "accelerate", "automodel")
        ),
    ],
)
def test_what_a_tool_lacks_is_an_error_by_name(tool: str, text: str, why: str) -> None:
    with pytest.raises(LayoutError, match=why):
        emitted(tool, text)


def test_experts() -> None:
    with pytest.raises(LayoutError, match="without sequence parallelism"):
        emitted("megatron", "dp16.tp2:zero=1", EXPERTS)
    with pytest.raises(LayoutError, match="keeps experts whole"):
        emitted("torchtitan", "dp16.tp2.ep8:zero=3,sequence_parallel=true", EXPERTS)
    old = emitted("torchtitan-0.2.2", "dp16.tp2.ep8:zero=3,sequence_parallel=true", EXPERTS)
    assert "expert_tensor_parallel_degree = 2" in old
    found = json.loads(emitted("deepspeed", "dp32.ep8:zero=2", EXPERTS))
    assert found["expert_parallel"] == {
        "enabled": True, "autoep_size": 8, "preset_model": "qwen3_moe",
    }  # fmt: skip


def test_modules_that_are_recomputed() -> None:
    text = "dp32.ep8:zero=1,recompute=modules"
    found = tool_rules.flags(emitted("megatron", text, EXPERTS))
    assert found["--recompute-granularity"] == "selective"
    assert found["--recompute-modules"] == "layernorm moe_act"
    bridge = emitted("megatron-bridge", text, EXPERTS)
    assert "cfg.model.recompute_modules = ['layernorm', 'moe_act']\n" in bridge
    latent = dataclasses.replace(EXPERTS, shape=shape("deepseek-v3"))
    assert "layernorm moe_act mla_up_proj" in emitted("megatron", text, latent)
    dense = tool_rules.flags(emitted("megatron", "dp32:zero=1,recompute=norm+mlp"))
    assert dense["--recompute-modules"] == "layernorm mlp"
    eight = tool_rules.flags(
        emitted("megatron", text, dataclasses.replace(EXPERTS, precision="fp8"))
    )
    assert eight["--fp8-recipe"] == "tensorwise"
    four = dataclasses.replace(EXPERTS, cluster=MODERN.cluster, precision="fp4")
    with pytest.raises(LayoutError, match="recompute norm or activation with precision fp4"):
        emitted("megatron", text, four)


def test_megatron_fsdp_and_the_environment() -> None:
    found = tool_rules.flags(emitted("megatron", "dp32:zero=3"))
    assert found["--ckpt-format"] == "fsdp_dtensor"
    assert found["environment"] == "unset CUDA_DEVICE_MAX_CONNECTIONS"
    text = "dp16.tp2:zero=1,sequence_parallel=true"
    assert tool_rules.flags(emitted("megatron", text))["environment"].endswith("=1")
    assert tool_rules.flags(emitted("megatron", text, MODERN))["environment"] == ""
    alone = tool_rules.flags(emitted("megatron", "dp1.cp8:zero=1"))
    assert "--overlap-grad-reduce" in alone


def test_precisions() -> None:
    fp8 = dataclasses.replace(DENSE, precision="fp8")
    assert "--fp8-format hybrid" in emitted("megatron", "dp32:zero=1", fp8)
    fp4 = dataclasses.replace(MODERN, precision="fp4")
    assert "--fp4-format e2m1" in emitted("megatron", "dp32:zero=1", fp4)
    with pytest.raises(LayoutError, match="precision fp8"):
        emitted("deepspeed", "dp32:zero=1", fp8)
    with pytest.raises(OptionError, match="--emit writes leaves gradients in fp32"):
        plan_training(
            "llama-3-8b", cluster="8xH100-SXM", seq_len=2048, global_batch=8, emit="megatron",
            grad_dtype="bf16",
        )  # fmt: skip
    fp16 = dataclasses.replace(DENSE, precision="fp16")
    assert json.loads(emitted("deepspeed", "dp32:zero=1", fp16))["fp16"]["enabled"]


def test_offload_and_order() -> None:
    found = tool_rules.flags(emitted("megatron", "dp32:zero=1,offload=optimizer"))
    assert {"--optimizer-cpu-offload", "--use-precision-aware-optimizer"} <= set(found)
    state = json.loads(emitted("deepspeed", "dp32:zero=3,offload=params"))["zero_optimization"]
    assert state["offload_param"] == {"device": "cpu"}
    assert "fsdp_offload_params: true" in emitted("accelerate", "dp32:zero=3,offload=params")
    moved = "dp4.pp4.tp2:microbatches=4,zero=1,order=tp-cp-pp-dp,sequence_parallel=true"
    assert "--use-tp-pp-dp-mapping" in emitted("megatron", moved)
    assert "--use-tp-pp-dp-mapping" not in emitted("megatron", moved.replace("pp-dp,", "dp-pp,"))


def test_half_of_the_layers_are_recomputed_only_under_the_stack_that_does_so() -> None:
    text = "dp32:zero=3,recompute=selective"
    with pytest.raises(LayoutError, match="every second layer"):
        emitted("torchtitan-0.2.2", text)
    fsdp = dataclasses.replace(DENSE, stack="fsdp")
    assert 'selective_ac_option = "2"' in emitted("torchtitan-0.2.2", text, fsdp)


def test_an_unknown_tool_gets_the_nearest_name_and_a_server_its_verb() -> None:
    with pytest.raises(OptionError, match="unknown tool") as caught:
        emitted("megatrn", "dp32")
    assert "megatron" in (caught.value.hint or "")
    with pytest.raises(OptionError, match="serves") as caught:
        emitted("vllm", "dp32")
    assert "--serve" in (caught.value.hint or "")


def test_a_job_has_its_split_in_numbers() -> None:
    found = plan_one(DENSE, Layout.parse("dp8.pp4:microbatches=8")).best
    assert job(DENSE, found).cut == (9, 9, 8, 6)
