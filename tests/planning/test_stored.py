"""Weights of a service plan as their checkpoint is published, or quantized as asked."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest

from hocket.catalogue import hardware, models
from hocket.catalogue.hardware import cluster
from hocket.catalogue.shapes import shape, shape_names
from hocket.cost.serving import WEIGHT_BYTES
from hocket.jobs.plan_from import serve_from
from hocket.jobs.planner_problem import published_quantization
from hocket.jobs.serving.deployment import emitted_deployment, serve_command
from hocket.jobs.serving.plan import serve_plan
from hocket.jobs.serving.table import plans_text
from hocket.planning.reading import servers
from hocket.planning.service.problem import ServiceProblem
from hocket.planning.service.stored import QUANTIZATIONS, stored_weights
from hocket.spec.errors import HocketError, LayoutError, OptionError
from hocket.spec.service import Service
from tests.planning.tool_rules import flags

GIB = 1 << 30


def _problem(name: str, precision: str = "bf16", experts: str | None = None) -> ServiceProblem:
    return ServiceProblem(
        shape=shape(name), cluster=cluster("8xH200-SXM"), service=Service(), precision=precision,
        expert_precision=experts,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "gib", "error"),
    [("gpt-oss-120b", 60.8, 0.005), ("gpt-oss-20b", 12.8, 0.05)],
)
def test_a_published_checkpoint_has_its_published_size(name: str, gib: float, error: float) -> None:
    """OpenAI 2025, gpt-oss model card, table 1: bytes of the checkpoints."""
    stored = stored_weights(
        shape(name), dtype="bf16", quantization=None, published=models.entry(name).quantized
    )
    found = _problem(name, stored.precision, stored.expert_precision).weights
    assert found == pytest.approx(gib * GIB, rel=error)


@pytest.mark.parametrize("name", shape_names())
def test_embeddings_keep_16_bits(name: str) -> None:
    counted = shape(name).num_parameters
    assert _problem(name).weights == pytest.approx(2 * counted, rel=2e-4)
    ends = sum(w.elements for w in shape(name).blocks["embedding"].weights)
    least = counted + ends
    assert least * (1 - 2e-4) <= _problem(name, "fp8").weights <= 2 * counted


def test_every_quantization_has_bytes() -> None:
    for precision, experts in QUANTIZATIONS.values():
        assert {precision, experts} - {""} <= set(WEIGHT_BYTES)
    published = {models.entry(name).quantized for name in models.model_names()} - {""}
    assert published <= set(QUANTIZATIONS)


def test_a_published_quantization_is_the_default() -> None:
    (eight,) = serve_plan("deepseek-v3", cluster="8xH200-SXM")
    assert (eight.stored.quantization, eight.stored.published) == ("fp8", True)
    assert eight.best is not None
    assert eight.best.num_gpus <= 8
    text = plans_text([eight])
    assert text.startswith("deepseek-v3, fp8, as published: ")
    assert "--emit vllm or sglang prints" in text
    assert serve_command([eight]) is None  # hocket's server reads them into 16 bits
    assert "--quantization" not in emitted_deployment(eight, "vllm")
    with pytest.raises(OptionError, match="the plan is of fp8, as published") as caught:
        emitted_deployment(eight, "hocket")
    assert "--quantization none" in str(caught.value.hint)
    (one,) = serve_plan("gpt-oss-120b", cluster="H100")
    assert one.best is not None
    assert one.best.num_gpus == 1
    assert plans_text([one]).startswith("gpt-oss-120b, bf16, experts in mxfp4, as published: ")
    data = json.loads(json.dumps(one.to_json()))
    assert data["stored"] == {"quantization": "mxfp4", "dtype": "bf16", "published": True}
    assert [other["stored"]["quantization"] for other in data["others"]] == ["none"]


def test_what_other_weights_take_is_listed() -> None:
    (plan,) = serve_plan("llama-3-70b", cluster="H100")
    assert [other.stored.quantization for other in plan.others] == ["int4", "fp8"]
    for other in plan.others:
        (asked,) = serve_plan(
            "llama-3-70b", cluster="H100", quantization=other.stored.quantization, top=1
        )
        assert other.best is not None
        assert asked.best is not None
        assert (other.best.layout, other.best.num_gpus) == (asked.best.layout, asked.best.num_gpus)
        assert other.weight_bytes == asked.weight_bytes < plan.weight_bytes
    assert "\nint4  " in plans_text([plan])


def test_emitted_weights_that_are_not_the_checkpoints_own() -> None:
    for name, text in (
        ("fp8", "--quantization fp8_per_tensor"),
        ("int4", "for int4 weights: give"),
    ):
        (plan,) = serve_plan("llama-3-8b", cluster="H100", quantization=name)
        assert text in emitted_deployment(plan, "vllm")
    (plan,) = serve_plan("gpt-oss-20b", cluster="H100", quantization="none")
    assert "for bf16 weights: give a checkpoint made so" in emitted_deployment(plan, "vllm")


def test_a_dense_model_in_8_bits_is_served_here() -> None:
    (plan,) = serve_plan("llama-3-8b", cluster="H100", quantization="fp8", cache_precision="bf16")
    words = serve_command([plan])
    assert words is not None
    assert words[words.index("--quantization") + 1] == "fp8"
    assert words[words.index("--dtype") + 1] == "bf16"
    assert "--emit hocket, vllm or sglang" in plans_text([plan])
    assert "--kv-cache-dtype" not in words
    (few,) = serve_plan("llama-3-8b", cluster="H100", cache_precision="fp8")
    words = serve_command([few])
    assert words is not None
    assert words[words.index("--kv-cache-dtype") + 1] == "fp8"


def test_too_few_gpus_name_weights_that_fit() -> None:
    with pytest.raises(LayoutError) as caught:
        serve_plan("llama-3-70b", cluster="1xH100")
    assert "--quantization int4 takes 1 GPU (dp1)" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"quantization": "fp9"}, "unknown quantization 'fp9'"),
        ({"quantization": "mxfp4"}, "llama-3-8b has none"),
        ({"quantization": "int4", "precision": "fp8"}, "--quantization is int4"),
    ],
)
def test_weights_that_cannot_be(options: dict[str, str], match: str) -> None:
    with pytest.raises(OptionError, match=match):
        serve_plan("llama-3-8b", cluster="H100", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("how", "name"),
    [
        ({"quant_method": "gptq", "bits": 4}, "int4"),
        ({"quant_method": "gptq", "bits": 8}, "int8"),
        ({"quant_method": "awq", "bits": 4}, "int4"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8"),
        ({"quant_method": "mxfp4"}, "mxfp4"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "int4"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "int8"),
        (
            {"quant_method": "compressed-tensors", "format": "float-quantized",
             "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float"}}}},
            "fp8",
        ),
        (
            {"quant_method": "compressed-tensors", "format": "int-quantized",
             "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "int"}}}},
            "int8",
        ),
        (None, ""),
    ],
)  # fmt: skip
def test_the_quantization_of_a_directory(
    tmp_path: Path, how: dict[str, object] | None, name: str
) -> None:
    config = models.config("tiny-llama")
    more = {} if how is None else {"quantization_config": how}
    (tmp_path / "config.json").write_text(json.dumps({**config, **more}))
    assert published_quantization(str(tmp_path)) == name


def test_gpus_without_rates_of_few_bits_widen_them() -> None:
    few = dataclasses.replace(_problem("llama-3-8b", "int4"), cluster=cluster("8xA100-80-SXM"))
    wide = dataclasses.replace(_problem("llama-3-8b"), cluster=cluster("8xA100-80-SXM"))
    alone = [p.prices(1, 1).decode_seconds(1, 2048)[0] for p in (few, wide)]
    assert alone[0] < alone[1]  # bytes of weights
    many = [p.prices(1, 1).prefill_seconds(8192)[0] for p in (few, wide)]
    assert many[0] == pytest.approx(many[1], rel=0.02)  # products in bf16
    with pytest.raises(HocketError):
        _problem("llama-3-8b", "int5")


@pytest.mark.parametrize(
    ("line", "title"),
    [
        ("vllm serve deepseek-ai/DeepSeek-V3 --tensor-parallel-size 8", "fp8, as published"),
        ("vllm serve openai/gpt-oss-20b", "bf16, experts in mxfp4, as published"),
        ("vllm serve meta-llama/Meta-Llama-3-8B --quantization awq", "int4"),
        ("vllm serve meta-llama/Meta-Llama-3-8B --quantization fp8", "fp8"),
        ("python -m sglang.launch_server --model-path openai/gpt-oss-20b --quantization gguf",
         "bf16, experts in mxfp4, as published"),
    ],
)  # fmt: skip
def test_a_servers_command_is_read_with_its_weights(tmp_path: Path, line: str, title: str) -> None:
    file = tmp_path / "serve.sh"
    file.write_text(f"{line}\n")
    name = next(n for n in shape_names() if (models.entry(n).hub_id or "\n") in line)
    said = serve_from(str(file), model=name, cluster="H200-SXM-141")
    assert f"\n{name}, {title}: " in said
    assert ("estimated as the checkpoint is stored" in said) is ("gguf" in line)


def test_limits_of_a_servers_command_are_part_of_its_prediction(tmp_path: Path) -> None:
    """Sequences at once, memory and the cache's precision are read; what a request may be long is
    never cut by the changed command."""

    def said(*flags: str) -> str:
        file = tmp_path / "serve.sh"
        line = "vllm serve meta-llama/Meta-Llama-3-70B-Instruct -tp 8 --max-model-len 4096"
        file.write_text(" ".join((line, *flags)) + "\n")
        return serve_from(
            str(file), cluster="1x8xH100-SXM", prompt_len=1000, output_len=300,
            requests_per_second=8,
        )  # fmt: skip

    def fitting(text: str) -> int:
        match = re.search(r"\n +\d+ of (\d+) ", text)
        assert match is not None, text
        return int(match[1])

    many = "--max-num-seqs 8000"
    usual = said("--gpu-memory-utilization 0.9", many)
    assert fitting(said("--gpu-memory-utilization 0.5", many)) < 0.5 * fitting(usual)
    fp8 = said("--gpu-memory-utilization 0.9", many, "--kv-cache-dtype fp8")
    assert fitting(fp8) == pytest.approx(2 * fitting(usual), rel=0.1)
    few = said("--max-num-seqs 8")
    assert fitting(few) == 8
    assert "it cannot keep up" in few
    assert "where the command is silent: --gpu-memory-utilization 0.92, --max-num-batched" in few
    assert "silent: --max-num-batched-tokens 8192." in usual
    assert "--max-model-len 4096" in usual.partition("+++")[2].partition("\n+")[2]
    with pytest.raises(HocketError, match="must be a fraction"):
        said("--gpu-memory-utilization 90")


@pytest.mark.parametrize(
    ("kind", "given", "seqs", "tokens"),
    [
        ("H100-SXM-80", "", 1024, 8192), ("H200-SXM-141", "", 1024, 8192),
        ("B200-SXM-180", "", 1024, 16384), ("A100-SXM-80", "", 256, 2048),
        ("L40S-48", "", 256, 2048), ("H100-SXM-80", "--max-num-batched-tokens 512", 512, 512),
        ("A100-SXM-80", "--max-num-seqs 2000", 2000, 2048),
    ],
)  # fmt: skip
def test_vllms_own_limits_are_those_of_the_gpu(
    kind: str, given: str, seqs: int, tokens: int
) -> None:
    """The table of its `test_defaults_with_usage_context`: by memory, an A100 excepted."""
    read = servers.vllm_defaults(servers.vllm(f"vllm serve a/b {given}"), hardware.gpu(kind))
    assert (read.server["max_num_seqs"], read.microbatch) == (seqs, tokens)
    assert read.server["gpu_memory_utilization"] == 0.92
    assert kind in read.notes[-1]
    assert servers.vllm_defaults(read, hardware.gpu("L4-24")) is read


def test_flags_of_servers_count_sequences_of_a_data_rank() -> None:
    (found,) = serve_plan(
        "deepseek-v3", cluster="1x8xH200-SXM-141", layout="dp8.ep8", prompt_len=2000,
        output_len=500, requests_per_second=5,
    )  # fmt: skip
    assert found.best is not None
    fit, tokens = found.best.max_sequences, found.best.max_num_batched_tokens
    vllm, sglang = (emitted_deployment(found, tool) for tool in ("vllm", "sglang"))
    assert fit <= 8 * int(flags(vllm)["--max-num-seqs"]) < fit + 8
    assert int(flags(vllm)["--max-num-batched-tokens"]) == tokens
    assert fit <= int(flags(sglang)["--max-running-requests"]) < fit + 8
    assert int(flags(sglang)["--chunked-prefill-size"]) == 8 * tokens
