"""Deployments as other servers' commands, by those servers' rules restated."""

from __future__ import annotations

import dataclasses
import random

import pytest

from hocket.catalogue import models
from hocket.planning.service.emit import SERVERS, Deployment, server_command
from hocket.spec.errors import OptionError
from tests.planning import tool_rules

LLAMA = Deployment(
    model="meta-llama/Llama-3.1-405B", tp=8, pp=1, replicas=1, gpu="H100-SXM-80", gpus_per_node=8,
    tokens=8192, max_sequences=900, max_num_batched_tokens=512, usable=0.9, precision="bf16",
    cache_precision="bf16", heads=128, layers=126,
)  # fmt: skip


@pytest.mark.parametrize("server", SERVERS)
def test_every_command_keeps_the_rules_of_its_server(server: str) -> None:
    draw = random.Random(11)
    accepted = 0
    for _ in range(400):
        one = dataclasses.replace(
            LLAMA,
            tp=draw.choice([1, 2, 4, 8, 16]),
            pp=draw.choice([1, 2, 3, 4, 6]),
            replicas=draw.choice([1, 2, 3, 8]),
            gpus_per_node=draw.choice([4, 8]),
            max_num_batched_tokens=draw.choice([512, 2048]),
            max_sequences=draw.choice([3, 256, 1024, 4000]),
            precision=draw.choice(["bf16", "fp16", "fp8"]),
            cache_precision=draw.choice(["bf16", "fp8"]),
            experts=draw.choice([0, 128]),
        )
        one = dataclasses.replace(one, ep=draw.choice([1, 2, 8]) if one.experts else 1)
        facts = {
            "heads": one.heads, "layers": one.layers, "experts": one.experts, "ep": one.ep,
            "gpus_per_node": one.gpus_per_node, "tokens": one.max_num_batched_tokens,
            "sequences": one.max_sequences,
        }  # fmt: skip
        try:
            text = server_command(server, one)
        except OptionError:
            assert one.tp * one.pp % one.nodes or (one.ep > 1 and one.nodes > 1)
            continue
        accepted += 1
        tool_rules.SERVER_RULES[server](text, facts)
    assert accepted > 200


def test_sequences_never_exceed_the_tokens_of_a_step() -> None:
    assert "--max-num-seqs 512" in server_command("vllm", LLAMA)


def test_replicas_of_a_mixture_are_servers_of_their_own() -> None:
    copies = dataclasses.replace(LLAMA, tp=1, ep=8, experts=128, redundant=16)
    assert "--enable-eplb \\\n  --eplb-config.num_redundant_experts 16" in server_command(
        "vllm", copies
    )
    assert "--enable-eplb \\\n  --ep-num-redundant-experts 16" in server_command("sglang", copies)
    text = server_command("vllm", dataclasses.replace(LLAMA, replicas=4, experts=128))
    assert "start 4 of these" in text
    assert "--data-parallel-size" not in text.splitlines()[-1]


def test_weights_are_quantised_only_where_the_checkpoint_is_not() -> None:
    one = dataclasses.replace(LLAMA, precision="fp8")
    assert "--quantization fp8_per_tensor" in server_command("vllm", one)
    assert "--quantization" not in server_command("vllm", dataclasses.replace(one, quantized=True))


def test_names_of_the_catalogue_have_their_name_on_the_hub() -> None:
    found = {name: models.entry(name).hub_id for name in models.model_names()}
    assert found["llama-3-8b"] == "meta-llama/Meta-Llama-3-8B"
    assert found["deepseek-v3"] == "deepseek-ai/DeepSeek-V3"
    missing = {name for name, hub_id in found.items() if hub_id is None}
    assert missing == {
        *(name for name in found if name.startswith("tiny-")), "gpt3-175b", "opt-175b",
        *(name for name in ("gpt2", "gpt2-large", "gpt2-xl") if found[name] is None),
    }  # fmt: skip
    assert all(hub_id.count("/") == 1 for hub_id in found.values() if hub_id)


def test_a_path_that_needs_quotes_is_quoted() -> None:
    for server in SERVERS:
        assert "'/my models/a; b'" in server_command(
            server, dataclasses.replace(LLAMA, model="/my models/a; b")
        )
