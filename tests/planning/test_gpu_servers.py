"""Servers on GPUs are predicted by the service planner's constants, with the engine's own sizes."""

from __future__ import annotations

import dataclasses

import pytest

from hocket.catalogue.hardware import cluster
from hocket.catalogue.shapes import shape
from hocket.planning import machine_serving as planning
from hocket.planning.gpu_servers import GpuServers
from hocket.planning.machine_serving import EngineSizes
from hocket.planning.service.problem import ServiceProblem
from hocket.spec.errors import OptionError
from hocket.spec.layout import Layout
from hocket.spec.service import Service
from hocket.spec.serving_forecast import ServingForecast

SIZES = EngineSizes(batch_tokens=2048, rows=64, longest=4096, dtype="bf16")
EIGHT = GpuServers(shape("llama-3-8b"), cluster("8xH100-SXM"))
EXPERTS = GpuServers(shape("qwen3-30b-a3b"), cluster("8xH100-SXM"))


def planner(servers: GpuServers, **groups: int) -> ServiceProblem:
    service = Service(prompt_len=512, output_len=128)
    return ServiceProblem(
        shape=servers.shape, cluster=servers.gpus, service=service, bounded=True, **groups
    )


@pytest.mark.parametrize("text", ["tp1", "tp2", "tp2.pp2", "dp4.tp2"])
def test_steps_are_those_of_the_service_planner(text: str) -> None:
    layout = Layout.parse(text)
    found = planning.server_forecast(EIGHT, layout, SIZES)
    prices = planner(EIGHT).prices(layout.tp, layout.pp, SIZES.batch_tokens)
    assert found.cluster == "1x8xH100-SXM-80"
    assert found.measured == ""
    for one in found.decode:
        assert one.seconds == pytest.approx(prices.decode_seconds(one.batch, one.context).item())
    for read in found.prefill:
        assert read.seconds == pytest.approx(
            prices.prefill_seconds(read.tokens, chunk=SIZES.batch_tokens).item()
        )
    assert len(found.memory) == layout.tp * layout.pp
    # Every weight is on a rank of the replica, those that tensor ranks do not divide on each.
    kinds = (*EIGHT.shape.layers, "embedding", "head")
    weights = [w for kind in kinds for w in EIGHT.shape.blocks[kind].weights]
    copies = sum(w.elements for w in weights if w.split == "outside") * (layout.tp - 1)
    total = sum(row["weights"] for row in found.memory)
    assert total == 2 * (EIGHT.shape.num_parameters + copies)
    process = prices.replica.constants.overhead_bytes
    room = []
    for row in found.memory:
        assert row["total"] == row["weights"] + row["step"] + row["cache"] <= found.capacity
        assert row["step"] > process
        left = found.capacity - row["weights"] - row["step"]
        room.append(left * found.cache_tokens // row["cache"])
    most = 2 * SIZES.rows * SIZES.longest  # as `hocket serve` allocates
    assert 0 <= min(most, *room) - found.cache_tokens < SIZES.block_size
    assert found.cache_bytes * found.cache_tokens == max(row["cache"] for row in found.memory)
    assert found.loads
    assert found.needs
    assert any("no run of hocket" in note for note in found.notes)
    assert ServingForecast.from_json(found.to_json()) == found


def test_a_cache_of_a_given_size() -> None:
    by_bytes = planning.server_forecast(
        EIGHT, Layout(tp=2), dataclasses.replace(SIZES, cache=4 * 10**9)
    )
    by_tokens = planning.server_forecast(
        EIGHT, Layout(tp=2), dataclasses.replace(SIZES, tokens=4096)
    )
    assert by_bytes.memory[0]["cache"] == pytest.approx(4e9, rel=1e-3)
    assert by_tokens.cache_tokens == 4096


def test_data_ranks_over_experts_are_one_replica() -> None:
    """`dp8.ep8` is one replica of eight data ranks, each with steps of its own."""
    whole = planning.server_forecast(EXPERTS, Layout(dp=8, ep=8), SIZES)
    apart = planning.server_forecast(EXPERTS, Layout(dp=8), SIZES)
    assert len(whole.memory) == 8
    assert len(apart.memory) == 1
    assert whole.memory[0]["weights"] < apart.memory[0]["weights"] / 3
    prices = planner(EXPERTS, ep=8).prices(1, 1, SIZES.batch_tokens)
    assert whole.memory[0]["weights"] == pytest.approx(prices.weight_bytes, abs=16)
    rows = {
        one.layout: one
        for _, one in planning.evaluate_servers(
            EXPERTS, SIZES, [Layout(dp=8, ep=8), Layout(dp=8), Layout(dp=4, ep=2)]
        )
    }
    assert whole.cache_tokens == 8 * whole.memory[0]["cache"] // whole.cache_bytes
    assert rows["dp8.ep8"].ranks == 8
    assert rows["dp8.ep8"].tokens_per_second == pytest.approx(whole.tokens_per_second)
    assert rows["dp8"].tokens_per_second == pytest.approx(8 * apart.tokens_per_second)
    assert rows["dp4.ep2"].ranks == 4


def test_more_replicas_answer_more() -> None:
    rows = planning.evaluate_servers(EIGHT, SIZES, [Layout(dp=n) for n in (1, 2, 4, 8)])
    rates = {one.layout: one.tokens_per_second for _, one in rows}
    assert rates["dp8"] == pytest.approx(8 * rates["dp1"])
    assert rows[0][1].layout == "dp8"


def test_what_does_not_fit_is_rejected_with_numbers() -> None:
    little = GpuServers(shape("llama-3-70b"), cluster("2xA100-40-SXM"))
    with pytest.raises(OptionError, match=r"llama-3-70b fits in no layout of 1x2xA100") as caught:
        planning.choose_server(little, SIZES, [Layout(tp=2), Layout(pp=2)])
    assert "a rank may hold 3" in caught.value.message
