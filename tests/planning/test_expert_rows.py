"""Mixtures of experts in tables: shapes made of columns, and how tokens are dispatched."""

from __future__ import annotations

import csv
import math
import operator
from pathlib import Path

import pytest

from hocket.catalogue import hardware
from hocket.catalogue.models import config
from hocket.catalogue.shapes import shape
from hocket.cost.constants import quantiles
from hocket.cost.terms import terms
from hocket.planning.expert_decoder import expert_decoder
from hocket.planning.layouts import layout_at
from hocket.planning.problem import Problem
from hocket.planning.table import PublishedRow, parse_training_row
from hocket.planning.validate import price_training_rows
from hocket.spec.model_shape import ModelShape
from tests.support.columns import legal_layouts

EXTRACT = Path(__file__).parent / "published_extract.csv"

GROK = {
    # NVIDIA/dgxc-benchmarking v25.02.02, grok1/README_314b.md: 24.0 s on 8 H100.
    "id": "grok", "source": "NVIDIA DGX Cloud Benchmarking recipes 25.02 (NeMo 24.12, DGX H100)",
    "model": "Grok-1 (2-layer proxy)", "layers": "2", "hidden": "6144", "heads": "48",
    "kv_heads": "8", "ffn": "32768", "seq": "4096", "global_batch": "1024", "micro_batch": "1",
    "gpu": "H100-80 SXM", "n_gpus": "8", "gpus_per_node": "8", "tp": "4", "pp": "1", "ep": "2",
    "dp": "2", "sp": "1", "zero_stage": "1", "recompute": "none", "precision": "bf16",
    "measured_iter_s": "24.0", "experts": "8", "top_k": "2", "moe_ffn": "32768",
    "shared_experts": "0", "dispatcher": "alltoall", "overlap": "dp", "cuda_graph": "none",
    "attention": "gqa",
}  # fmt: skip


def row(**changes: str) -> PublishedRow:
    found = parse_training_row(GROK | changes)
    assert isinstance(found, PublishedRow), found
    return found


def seconds(**changes: str) -> float:
    return price_training_rows([row(**changes)])[0].step


def flops(of: ModelShape) -> float:
    return sum(2 * p.n * p.k * p.count for k in of.layers for p in of.blocks[k].products)


@pytest.mark.parametrize("name", ["mixtral-8x7b", "mixtral-8x22b", "qwen3-30b-a3b"])
def test_a_made_mixture_is_the_traced_one(name: str) -> None:
    traced, said = shape(name), config(name)
    own = expert_decoder(
        layers=len(traced.layers),
        hidden=traced.hidden,
        heads=traced.heads,
        kv_heads=traced.kv_heads,
        experts=traced.experts,
        chosen=traced.experts_per_token,
        expert_ffn=said.get("moe_intermediate_size") or said["intermediate_size"],
        head_dim=said.get("head_dim"),
        vocab=traced.vocab,
    )
    assert own.num_parameters == pytest.approx(traced.num_parameters, rel=0.001)
    assert flops(own) == pytest.approx(flops(traced), rel=0.001)
    (_, left), (_, right) = terms(own).kinds[0], terms(traced).kinds[0]
    of_experts = [[w for w in block.weights if w.expert] for block in (left, right)]
    whole = [sum(float((w.stored * w.units)[0]) for w in own) for own in of_experts]
    assert whole[0] == pytest.approx(whole[1], rel=0.15)
    for field in ("forward.inside", "backward.outside", "saved.outside"):
        one, other = (float(operator.attrgetter(field)(block)[0]) for block in (left, right))
        near = 0.15 if name.startswith("mixtral") else 0.5  # no column tells of norms of q and k
        assert one == pytest.approx(other, rel=near), field
    assert left.sums[0] + left.expert_sums[0] == 2
    assert (left.sums, left.expert_sums) == (right.sums, right.expert_sums)


def test_latent_attention_is_that_of_deepseek() -> None:
    """DeepSeek-V3 from its columns: parameters as published (671B without MTP), traced FLOPs."""
    traced = shape("deepseek-v3")
    own = expert_decoder(
        layers=61, hidden=7168, heads=128, kv_heads=128, experts=256, chosen=8, expert_ffn=2048,
        shared_ffn=2048, dense_ffn=18432, dense_layers=3, vocab=129280, latent=True,
    )  # fmt: skip
    assert own.num_parameters == pytest.approx(671e9, rel=0.005)
    assert flops(own) == pytest.approx(flops(traced), rel=0.01)


def test_a_row_of_experts_needs_its_columns() -> None:
    found = parse_training_row(GROK | {"experts": ""})
    assert isinstance(found, PublishedRow) is False or found.shape.experts == 0
    assert "moe_ffn" in str(parse_training_row(GROK | {"moe_ffn": ""}))


def test_a_published_mixture_is_predicted() -> None:
    one = row()
    assert one.shape.experts == 8
    assert one.shape.num_parameters == pytest.approx(2 * 4.92e9 + 2 * 131072 * 6144, rel=0.01)
    assert price_training_rows([one])[0].step == pytest.approx(24.0, rel=0.15)


def test_overlap_hides_dispatching_and_flex_sends_once_to_each_node() -> None:
    far = {"n_gpus": "64", "dp": "16", "ep": "8", "experts": "64", "top_k": "8", "moe_ffn": "4096"}
    plain = seconds(**far, overlap="no EP overlap")
    assert seconds(**far, overlap="EP a2a") < plain
    assert seconds(**far, dispatcher="flex-hybridep", overlap="no EP overlap") < plain


def test_flex_sends_once_to_each_rank_of_a_node() -> None:
    """Of eight choices at most four can be on another rank of four; one choice is one copy."""
    near = {"n_gpus": "8", "dp": "8", "tp": "1", "ep": "4", "experts": "64", "moe_ffn": "4096"}
    for chosen, fewer in (("8", True), ("1", False)):
        copies = seconds(**near, top_k=chosen, overlap="no EP overlap")
        once = seconds(**near, top_k=chosen, dispatcher="flex-deepep", overlap="no EP overlap")
        assert (once < copies) is fewer
        assert fewer or once == pytest.approx(copies)


def test_whole_experts_need_no_tensor_collectives() -> None:
    """etp 1 sends each row once; etp 4 gathers all rows of an expert on four ranks."""
    assert seconds(etp="1", ep="8") < seconds(etp="4", ep="2")
    assert row().layout["etp"] == 4


def test_folded_experts_are_proposed_and_written() -> None:
    found = legal_layouts(
        shape("mixtral-8x7b"), 8, 4096, 64, pins={"tp": 2, "pp": 1, "cp": 1, "ep": 8}
    )
    assert set(found.etp) == {1.0}
    texts = {str(layout_at(found, i)).partition(":")[0] for i in range(len(found))}
    assert texts == {"dp4.tp2.ep8.etp1"}
    some = legal_layouts(
        shape("mixtral-8x7b"), 8, 4096, 64, pins={"tp": 2, "pp": 1, "cp": 1, "ep": 2}
    )
    assert set(some.etp) == {1.0, 2.0}


def test_dense_rows_do_not_know_the_columns_of_experts() -> None:
    with EXTRACT.open() as file:
        dense = next(r for r in csv.DictReader(file) if "8x" not in r["model"])
    one, other = (
        parse_training_row(dense),
        parse_training_row(dense | {"dispatcher": "alltoall", "etp": "1"}),
    )
    assert isinstance(one, PublishedRow)
    assert isinstance(other, PublishedRow)
    times = [price_training_rows([r])[0].step for r in (one, other)]
    assert math.isclose(*times)


def test_a_mixture_has_the_wider_interval() -> None:
    """Its error was measured on families of models that were left out."""
    low, high = quantiles()
    wide_low, wide_high = quantiles(experts=True)
    assert low < 1 < high
    assert wide_low < 1 < wide_high
    assert wide_high / wide_low > high / low
    for name, expected in (("llama-3-8b", (low, high)), ("mixtral-8x7b", (wide_low, wide_high))):
        problem = Problem(
            shape=shape(name), cluster=hardware.cluster("1x8xH100-SXM-80"), seq_len=4096,
            global_batch=64, precision="bf16", stack="megatron-core",
        )  # fmt: skip
        assert problem.time_range == expected
