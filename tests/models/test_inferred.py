"""Tensor rules that the tiny proxy model shows, of families whose plans are known by their code."""

# ruff: noqa: E402

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from hocket.models import skeleton
from hocket.models.plans import plan_for
from hocket.models.proxy import proxy_of
from hocket.models.samples import sample_config
from hocket.spec.plan import ParallelPlan
from tests.models.cases import stages_verdict

pytestmark = pytest.mark.torch

COLUMNS = {
    # Query, key and value by themselves; fc1 and fc2 lie in the layer itself.
    "bart": {"q_proj": [64], "k_proj": [64], "v_proj": [64], "fc1": [96]},
    # One key and one value for all heads, fused behind the queries.
    "gpt_bigcode": {"c_attn": [64, 16, 16], "c_fc": [256]},
    # Fused head by head.
    "persimmon": {"query_key_value": [192], "dense_h_to_4h": [96]},
    # Its linear layer is a class of its own, which writes into what it computes.
    "falcon": {"query_key_value": [64, 16, 16], "dense_h_to_4h": [96]},
    # Projections and their way back are in different modules.
    "bert": {"query": [64], "key": [64], "value": [64], "intermediate.dense": [96]},
}


def plan_of(kind: str, **changes: Any) -> ParallelPlan:
    proxy = proxy_of(skeleton.config_of({**sample_config(kind), **changes}, dropout=0.0))
    return plan_for(skeleton.build_skeleton(proxy.config))


@pytest.mark.parametrize("kind", COLUMNS)
def test_columns_fall_into_heads_and_units(kind: str) -> None:
    plan = plan_of(kind)
    assert plan.tensor is not None, plan.reasons
    assert plan.inferred
    columns = {
        name: [segment.rows for segment in split.segments]
        for name, split in plan.tensor.splits.items()
        if split.style == "column"
    }
    assert len(columns) == len(COLUMNS[kind])
    for end, rows in COLUMNS[kind].items():
        assert [found for name, found in columns.items() if name.endswith(end)] == [rows]
    rows_back = [s for s in plan.tensor.splits.values() if s.style == "row"]
    assert len(rows_back) == 2
    assert {s.segments[0].what for s in rows_back} == {"attention heads", "feed-forward units"}


def test_a_norm_over_all_that_would_be_split_is_reported() -> None:
    plan = plan_of("bitnet")
    assert plan.tensor is None
    assert "attn_sub_norm spans all that would be split" in plan.reasons["tensor"]
    assert "ffn_sub_norm spans all that would be split" in plan.reasons["tensor"]


def test_norms_of_single_heads_are_summed_and_sinks_are_split() -> None:
    splits = plan_of("lfm2").tensor.splits  # type: ignore[union-attr]
    assert splits["model.layers.*.self_attn.q_layernorm"].style == "sum_grad"
    sinks = plan_of("gpt_oss").tensor.splits["model.layers.*.self_attn"]  # type: ignore[union-attr]
    assert dict(sinks.dims) == {"sinks": 0}
    assert [segment.units for segment in sinks.segments] == [4]


def test_heads_may_vary_by_layer() -> None:
    plan = plan_of("gemma4_unified_text")
    assert plan.tensor is not None, plan.reasons
    queries = {n: s for n, s in plan.tensor.splits.items() if n.endswith("q_proj")}
    assert {(s.segments[0].units, s.segments[0].size) for s in queries.values()} == {
        (4, 16), (4, 32),
    }  # fmt: skip


def test_fused_experts_are_halves_where_their_plan_does_not_say_so() -> None:
    plan = plan_of("inkling_text")
    assert plan.tensor is not None, plan.reasons
    fused = plan.tensor.splits["model.layers.*.mlp.experts"].parameter_segments["gate_up_proj"]
    assert [segment.units for segment in fused] == [32, 32]


def test_what_has_no_attention_is_asked_for_units_only() -> None:
    plan = plan_of("rwkv")
    assert plan.tensor is None or plan.inferred
    assert "AttributeError" not in plan.reasons.get("tensor", "")


@pytest.mark.parametrize("kind", ["bart", "gpt_bigcode", "mixtral", "bloom", "mamba"])
def test_a_plan_reads_back_equal(kind: str) -> None:
    plan = plan_of(kind)
    assert ParallelPlan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("codegen", "h.0.attn is replicated on every rank and works on whole sequences"),
        ("qwen3_next", "layers.0.linear_attn gathers the outputs of its split matmuls"),
        ("roberta", "roberta.embeddings counts positions from token ids"),
        ("gemma4_text", "embed_tokens_per_layer embeds the tokens"),
        ("roformer", "makes for as many tokens as a sequence shard has"),
        ("xlnet", "receives [sequence, rows, hidden size]"),
        ("ctrl", "transformer combines values at the positions of whole sequences"),
    ],
)
def test_why_a_model_does_not_run_on_slices_is_said_of_the_module(kind: str, said: str) -> None:
    proxy = proxy_of(skeleton.config_of(sample_config(kind), dropout=0.0))
    plan = plan_for(skeleton.build_skeleton(proxy.config), sequence=True)
    assert plan.sequence is None
    assert said in plan.reasons["sequence"]
    assert "Error" not in plan.reasons["sequence"]


@pytest.mark.parametrize(
    ("kind", "embedders", "positions"),
    [
        ("bert", ("bert.embeddings",), ()),
        ("bart", (), ("model.decoder.embed_positions",)),
    ],
)
def test_positions_are_reported_to_what_adds_them(
    kind: str, embedders: tuple[str, ...], positions: tuple[str, ...]
) -> None:
    proxy = proxy_of(skeleton.config_of(sample_config(kind), dropout=0.0))
    plan = plan_for(skeleton.build_skeleton(proxy.config), sequence=True).sequence
    assert plan is not None
    assert (plan.embedders, plan.positions) == (embedders, positions)
    assert not any(plan.sees_slices(f"{name}.decoder") for name in plan.replicated)


@pytest.mark.ranks
@pytest.mark.timeout(120)
def test_models_that_add_positions_in_their_own_way_run_on_slices(ranks: Any) -> None:
    kinds = ("bert", "bart", "marian", "whisper", "git", "falcon")
    configs = {kind: sample_config(kind) for kind in kinds}
    (found, _) = ranks.run("tests.models.cases:tensors", 2, configs=configs, slices=True)
    assert {kind: reason for kind, (reason, _) in found.items()} == dict.fromkeys(kinds, "")


@pytest.mark.parametrize("kind", ["reformer", "hy_v4", "gemma4_text"])
def test_what_layers_hand_on_next_to_the_hidden_state_is_named(kind: str) -> None:
    assert (
        "its layers hand on more than the hidden state ("
        in stages_verdict(sample_config(kind)).reason
    )
