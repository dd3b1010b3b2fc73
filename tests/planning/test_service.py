"""The search for a service: goals are met with the fewest GPUs, and every word is computed."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest

from hocket.catalogue.hardware import cluster
from hocket.catalogue.shapes import shape
from hocket.jobs.serving.plan import serve_plan
from hocket.planning.service import models
from hocket.planning.service.explain import _bound, explain_deployment, winner
from hocket.planning.service.forecast import ServiceForecast, misses, nodes
from hocket.planning.service.need import need_map
from hocket.planning.service.plan import answer, answer_one, most_rate, service_pins
from hocket.planning.service.problem import ServiceProblem
from hocket.planning.service.search import (
    Candidate,
    candidate,
    candidate_replicas,
    deploy,
    forecast_of,
    most_replicas,
    search_deployments,
    simulated_latencies,
    with_copies,
)
from hocket.spec.errors import LayoutError, OptionError
from hocket.spec.layout import Layout
from hocket.spec.service import Service

SERVICE = Service(requests_per_second=5.0, ttft_ms=2000.0, tpot_ms=50.0)
SEVENTY = ServiceProblem(shape=shape("llama-3-70b"), cluster=cluster("8xH100-SXM"), service=SERVICE)
EIGHT = ServiceProblem(
    shape=shape("llama-3-8b"),
    cluster=cluster("8xA100-80-SXM"),
    service=Service(requests_per_second=20.0, ttft_ms=1000.0, tpot_ms=30.0),
)


@pytest.mark.parametrize("problem", [SEVENTY, EIGHT], ids=["70b", "8b"])
def test_what_is_found_meets_the_goals_and_fits(problem: ServiceProblem) -> None:
    found = search_deployments(problem, top=4)
    assert found
    assert [one.gpus for one in found] == sorted(one.gpus for one in found)
    for one in found:
        forecast = forecast_of(problem, one)
        assert forecast.meets
        assert not forecast.misses
        assert forecast.ttft is not None
        assert forecast.tpot is not None
        assert forecast.ttft.p90 <= problem.service.ttft_ms / 1e3  # type: ignore[operator]
        assert forecast.tpot.p90 <= problem.service.tpot_ms / 1e3  # type: ignore[operator]
        assert forecast.load < 1
        assert sum(forecast.memory_by_kind.values()) <= forecast.memory * 1.001
        layout = forecast.layout
        assert forecast.num_gpus == layout.world_size == one.gpus
        assert forecast.batch <= forecast.batch_peak <= forecast.max_sequences


@pytest.mark.parametrize("problem", [SEVENTY, EIGHT], ids=["70b", "8b"])
def test_nothing_smaller_would_do(problem: ServiceProblem) -> None:
    """Every replica, simulated with as many as fit in fewer GPUs than the answer, misses a goal."""
    (best,) = search_deployments(problem, top=1)
    for one in candidate_replicas(problem):
        for count in range(1, (best.gpus - 1) // one.size + 1):
            latencies = simulated_latencies(problem, one, count)
            assert latencies is None or misses(problem, latencies), (one, count)


def test_the_steady_state_is_where_traffic_saturates() -> None:
    """Just below its most a replica keeps up, whereas above it requests wait ever longer."""
    one = candidate(SEVENTY, 4, 1, 2048)
    service = dataclasses.replace(SERVICE, ttft_ms=None, tpot_ms=None)
    for share, keeps_up in ((0.9, True), (1.15, False)):
        loaded = SEVENTY.under(dataclasses.replace(service, requests_per_second=share * one.most))
        # Let it through although it is above: as a replica that saturates later.
        generous = dataclasses.replace(one, most=10 * one.most)
        short, long = (simulated_latencies(loaded, generous, 1, counted=n) for n in (400, 2400))
        assert short is not None
        assert long is not None
        grows = long.queue.p90 > 2 * short.queue.p90 + 0.5
        assert grows != keeps_up, (share, short.queue, long.queue)


def test_more_load_and_tighter_goals_need_no_fewer() -> None:
    found = need_map(SEVENTY, rates=(2.0, 8.0, 32.0), tpots=(25.0, 50.0, 100.0))
    for row in found.gpus:
        known = [math.inf if gpus is None else gpus for gpus in row]
        assert known == sorted(known, reverse=True)
    for column in zip(*found.gpus, strict=True):
        known = [math.inf if gpus is None else gpus for gpus in column]
        assert known == sorted(known)
    assert found.to_json()["gpus"] == found.gpus
    # The number in the map is the one that the search gives.
    assert need_map(SEVENTY, rates=(5.0,), tpots=(50.0,)).gpus == (
        (search_deployments(SEVENTY)[0].gpus,),
    )


def test_topology_decides() -> None:
    """A lone token of Llama 70B gains by tp8 where NVLink carries the sums, hardly over PCIe."""
    gains = {}
    for name in ("8xA100-80-SXM", "8xA100-80-PCIe"):
        problem = dataclasses.replace(SEVENTY, cluster=cluster(name))
        four, eight = (candidate(problem, tp, 1, 2048) for tp in (4, 8))
        gains[name] = eight.most / four.most
    assert gains["8xA100-80-SXM"] > 1.5
    assert gains["8xA100-80-PCIe"] < 0.75 * gains["8xA100-80-SXM"]


def test_a_pinned_axis_stays() -> None:
    for one in search_deployments(SEVENTY, top=3, pins={"tp": 2}):
        assert one.candidate.tp == 2
    assert service_pins(["tp=4", "max-num-batched-tokens=512"]) == {
        "tp": 4,
        "max_num_batched_tokens": 512,
    }
    (found,) = search_deployments(
        SEVENTY, top=1, pins={"tp": 4, "pp": 1, "max_num_batched_tokens": 512}
    )
    assert (found.candidate.tp, found.candidate.pp, found.candidate.chunk) == (4, 1, 512)
    three = search_deployments(SEVENTY, top=1, pins={"tp": 4, "pp": 1, "dp": 3})
    assert [one.replicas for one in three] == [3]
    for bad in ("tpp=4", "tp=0", "tp", "tp=x", "tp=²", "tp=\x1d4"):
        with pytest.raises(OptionError):
            service_pins([bad])


def test_gpus_that_there_are_bound_the_answer() -> None:
    eight = dataclasses.replace(SEVENTY, bounded=True)
    assert {one.gpus <= 8 for one in search_deployments(eight)} == {True}
    four = candidate(SEVENTY, 4, 1, 2048)
    assert most_replicas(eight, four) == 2
    # Replicas of three GPUs leave two of eight idle; of twelve they fill two nodes.
    assert nodes(SEVENTY, 3, 5) == 3
    assert nodes(SEVENTY, 12, 2) == 4
    crowded = dataclasses.replace(
        eight, service=dataclasses.replace(SERVICE, requests_per_second=60.0)
    )
    found = answer(crowded)
    assert found.best is None
    assert "there are 8" in found.reason
    carried = most_rate(crowded)
    assert 0 < carried < 60
    loaded = eight.under(dataclasses.replace(SERVICE, requests_per_second=carried))
    assert any(deploy(loaded, one) for one in candidate_replicas(loaded))


def test_a_goal_below_the_floor_says_what_the_floor_is() -> None:
    hasty = SEVENTY.under(dataclasses.replace(SERVICE, tpot_ms=2.0))
    found = answer(hasty)
    assert found.best is None
    assert found.floor_tpot is not None
    assert found.floor_tpot > 0.002
    assert f"at least {found.floor_tpot * 1e3:,.0f} ms" in found.reason
    slow = answer(SEVENTY.under(dataclasses.replace(SERVICE, ttft_ms=1.0)))
    assert slow.reason.startswith("TTFT of a request alone is at least")


def test_a_goal_that_nothing_meets_has_one_that_something_does() -> None:
    asked = {"cluster": "H100", "ttft_ms": 1.0}
    with pytest.raises(LayoutError) as found:
        serve_plan("llama-3-8b", **asked)
    flag, goal = (found.value.hint or "").partition(";")[0].split()
    assert flag == "--ttft-ms"
    assert serve_plan("llama-3-8b", **{**asked, "ttft_ms": float(goal)})


def test_one_layout_is_estimated_whatever_it_gives() -> None:
    two = answer_one(SEVENTY, Layout(dp=2, tp=4)).best
    assert two is not None
    assert two.meets
    crowded = SEVENTY.under(dataclasses.replace(SERVICE, requests_per_second=200.0))
    one = answer_one(crowded, Layout(tp=4)).best
    assert one is not None
    assert not one.meets
    assert one.ttft is None
    assert one.load > 1
    for layout, match in (
        (Layout(tp=3), "does not divide"),
        (Layout(pp=200), "more stages than the 80 layers"),
        (Layout(tp=1), "weights take 141"),
        (Layout(dp=2, zero=1), "replicas"),
    ):
        with pytest.raises(LayoutError, match=match):
            answer_one(SEVENTY, layout)
    over_context = answer_one(SEVENTY, Layout(tp=4, cp=2)).best
    assert over_context is not None
    assert (over_context.num_gpus, over_context.layout.cp) == (8, 2)
    assert over_context.cached_tokens == pytest.approx(2 * two.cached_tokens, rel=0.2)
    with pytest.raises(LayoutError, match="holds 2 of its replicas"):
        answer_one(dataclasses.replace(SEVENTY, bounded=True), Layout(dp=3, tp=4))


def test_dollars_are_the_price_of_the_gpus() -> None:
    best = answer(SEVENTY, top=1).best
    assert best is not None
    assert best.price == SEVENTY.gpu.price
    assert "quotes read 20" in best.price_source
    hourly = best.num_gpus * best.price  # type: ignore[operator]
    assert best.dollars_per_hour == pytest.approx(hourly)
    tokens = 5.0 * 512 * 3600
    assert best.dollars_per_million_output_tokens == pytest.approx(hourly / tokens * 1e6)
    full = best.full_dollars_per_million_output_tokens
    assert full == pytest.approx(best.load * best.dollars_per_million_output_tokens)  # type: ignore[operator]
    assert json.loads(json.dumps(best.to_json()))["layout"] == str(best.layout)


def test_the_explanation_says_why_and_what_would_change_it() -> None:
    kind = answer(SEVENTY, top=1)
    assert kind.best is not None
    explanation = explain_deployment(SEVENTY, kind.best, [kind])
    text = "\n".join(explanation)
    assert explanation[0].startswith(str(kind.best.layout))
    assert "A prompt alone takes" in text
    assert "PCIe instead of NVLink" in text
    assert "at best" in text
    assert "10 requests/s" in text
    assert "fp8" in text
    layout = dataclasses.replace(kind.best.layout, dp=kind.best.layout.dp + 1)
    larger = dataclasses.replace(kind.best, layout=layout)
    assert _bound(SEVENTY, larger) == "One replica fewer meets the goals too."


def test_hypotheses_are_labelled_and_of_their_size() -> None:
    found = models.hypotheses("gpt-4")
    sizes = [one.shape.num_parameters for one in found]
    assert sizes == sorted(sizes)
    for one, billions in zip(found, (75, 100, 175, 1800), strict=True):
        assert one.shape.num_parameters == pytest.approx(billions * 1e9, rel=0.01)
        assert one.claim
        assert one.source
    mixture = found[-1].shape
    assert (mixture.experts, mixture.experts_per_token, len(mixture.layers)) == (16, 2, 120)
    block = mixture.blocks[mixture.layers[0]]
    experts = sum(w.elements for w in block.weights if w.split == "expert")
    attention = sum(w.elements for w in block.weights if w.split in ("column", "row"))
    # As reported: 16 experts of 111 billion parameters, 55 billion in attention.
    assert experts * 120 / 16 == pytest.approx(111e9, rel=0.02)
    assert attention * 120 == pytest.approx(55e9, rel=0.05)
    # A token passes about 280 billion parameters: two experts of a layer and attention.
    active = mixture.flops_per_token(1, backward=False) / 2
    assert active == pytest.approx(280e9, rel=0.03)


@pytest.mark.parametrize("gigabytes", [16, 140, 180, 810])
def test_a_model_of_bytes_has_them(gigabytes: int) -> None:
    for precision, each in (("bf16", 2), ("fp8", 1)):
        made = models.of_bytes(gigabytes * 10**9, precision=precision)
        ends = sum(w.elements for w in made.blocks["embedding"].weights)  # in 16 bits
        held = (made.num_parameters - ends) * each + 2 * ends
        assert held == pytest.approx(gigabytes * 1e9, rel=0.01)
        asked = dataclasses.replace(SEVENTY, shape=made, precision=precision)
        assert asked.weights == pytest.approx(gigabytes * 1e9, rel=0.01)
    with pytest.raises(OptionError, match="too little"):
        models.of_bytes(1000)


def test_llama_is_what_its_bytes_make() -> None:
    """16 GB are drawn as Llama 3 8B: 32 layers of 4,096, feed-forward 14,336."""
    made, real = models.of_bytes(16_060_000_000), shape("llama-3-8b")
    assert (made.hidden, len(made.layers), made.heads, made.kv_heads) == (4096, 32, 32, 8)
    mine, theirs = (
        ServiceProblem(shape=s, cluster=cluster("1xA100-80-SXM"), service=EIGHT.service)
        for s in (made, real)
    )
    assert mine.cache_per_token == theirs.cache_per_token
    a, b = (candidate(p, 1, 1, 2048) for p in (mine, theirs))
    assert a.most == pytest.approx(b.most, rel=0.05)
    assert a.floor_tpot == pytest.approx(b.floor_tpot, rel=0.05)


@pytest.mark.parametrize(
    "changes",
    [
        {"ttft_ms": 0.0},
        {"tpot_ms": -1.0},
        {"tpot_ms": math.nan},
        {"requests_per_second": 0.0},
        {"requests_per_second": math.inf},
        {"prompt_len": 0},
        {"output_len": -3},
        {"percentile": 95},
    ],
)
def test_numbers_that_cannot_be(changes: dict[str, float]) -> None:
    (name,) = changes
    with pytest.raises(OptionError, match=name):
        Service(**changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "hint"),
    [
        ({"precision": "fp9"}, "fp8"),
        ({"engine": "vlm"}, "vllm"),
        ({"cache_precision": "bf61"}, "bf16"),
        ({"usable": 90.0}, "0.9"),
    ],
)
def test_unknown_words_name_the_nearest(changes: dict[str, object], hint: str) -> None:
    with pytest.raises(OptionError) as caught:
        dataclasses.replace(SEVENTY, **changes)
    assert caught.value.hint is not None
    assert hint in caught.value.hint


def test_a_card_without_bf16_says_so() -> None:
    with pytest.raises(OptionError, match="does not compute in bf16"):
        dataclasses.replace(EIGHT, cluster=cluster("8xT4"))
    half = dataclasses.replace(EIGHT, cluster=cluster("8xT4"), precision="fp16")
    assert candidate_replicas(half)


def test_tensor_parallelism_reaches_the_nvlink_domain() -> None:
    trays = dataclasses.replace(
        SEVENTY, shape=shape("deepseek-v3"), cluster=cluster("18x4xGB200"), precision="fp8"
    )
    degrees = {tp for tp, _ in trays.splits()}
    assert trays.cluster.node.link.domain == 72
    assert trays.cluster.node.num_gpus == 4
    assert {4, 8, 16, 32, 64} <= degrees
    hopper = dataclasses.replace(trays, cluster=cluster("8xH100-SXM"))
    over_nodes = {tp for tp, _ in hopper.splits()}
    assert {8, 16, 32} <= over_nodes


def test_the_number_of_sequences_follows_memory_and_tokens_of_a_step() -> None:
    node = SEVENTY.cluster.node
    vast = dataclasses.replace(node.gpu, memory=1 << 50, usable=1 << 50)
    machines = dataclasses.replace(SEVENTY.cluster, node=dataclasses.replace(node, gpu=vast))
    unlimited = dataclasses.replace(SEVENTY, cluster=machines)
    assert unlimited.sequences(8, 1, 2048) == 2048
    assert unlimited.sequences(8, 1, 8192) == 8192
    assert unlimited.sequences(8, 2, 8192) == 2 * 8192
    assert SEVENTY.sequences(8, 1, 8192) < 8192  # its memory holds fewer


MIXTURE = dataclasses.replace(
    SEVENTY, shape=shape("qwen3-30b-a3b"), cluster=cluster("8xH100-SXM"),
    service=Service(requests_per_second=60.0, ttft_ms=2000.0, tpot_ms=25.0),
)  # fmt: skip


def test_data_ranks_inside_a_replica_divide_its_experts() -> None:
    """Attention under data parallelism: a group holds its experts once."""
    group = MIXTURE.grouped(4)
    assert group.ep == 4
    assert group is MIXTURE.grouped(4)
    alone, four = MIXTURE.prices(1, 1), group.prices(1, 1)
    assert four.gpus == 4
    experts = sum(
        w.elements
        for kind in MIXTURE.shape.layers
        for w in MIXTURE.shape.blocks[kind].weights
        if "experts" in w.name
    )
    # Each rank has all of attention and a quarter of the experts, at 2 bytes.
    assert alone.weight_bytes - four.weight_bytes == pytest.approx(2 * experts * 3 / 4, rel=0.01)
    assert group.cached_tokens(1, 1) > 4 * MIXTURE.cached_tokens(1, 1)
    assert {one.ep for one in MIXTURE.groups()} == {1, 2, 4, 8}
    assert [one.ep for one in SEVENTY.groups()] == [1]  # a dense model has no experts


def test_a_deployment_of_groups_is_found_and_written() -> None:
    found = answer_one(MIXTURE, Layout.parse("dp8.ep4")).deployments[0]
    assert (found.num_gpus, found.replicas) == (8, 2)
    best = [forecast_of(MIXTURE, one) for one in search_deployments(MIXTURE, top=5, pins={"ep": 4})]
    assert best
    assert all(one.layout.ep == 4 and one.layout.dp % 4 == 0 for one in best)
    (again,) = answer_one(MIXTURE, best[0].layout, best[0].max_num_batched_tokens).deployments
    assert again.most_requests_per_second == pytest.approx(best[0].most_requests_per_second)
    with pytest.raises(LayoutError, match="expert"):
        answer_one(SEVENTY, Layout.parse("dp8.ep4"))


def test_copies_of_experts_are_proposed_where_they_pay() -> None:
    """With even routing none; their memory is taken from the cache, and their gain is that of the
    placement which a server makes."""
    group = MIXTURE.grouped(8)
    even = dataclasses.replace(group, expert_imbalance=1.0)
    one = with_copies(group, 1, 1, 2048)
    assert one.redundant in {8, 16}
    assert one.good > candidate(group, 1, 1, 2048).good
    assert with_copies(even, 1, 1, 2048).redundant == 0
    copied = MIXTURE.grouped(8, 1, one.redundant)
    more, least = copied.prices(1, 1), group.prices(1, 1)
    experts = sum(w.elements for b in group.shape.layers for w in group.shape.blocks[b].weights
                  if w.split == "expert")  # fmt: skip
    added = 2 * experts * one.redundant / group.shape.experts / 8
    assert more.weight_bytes - least.weight_bytes == pytest.approx(added, rel=1e-6)
    assert copied.cached_tokens(1, 1) < group.cached_tokens(1, 1)
    found = answer_pinned(MIXTURE, one)
    assert found.redundant_experts == one.redundant
    assert found.title == f"dp16.ep8 + {one.redundant} copies"
    assert f"{one.redundant} copies of experts" in " ".join(winner(MIXTURE, found))


def answer_pinned(problem: ServiceProblem, one: Candidate) -> ServiceForecast:
    (found,) = search_deployments(
        problem, top=1, pins={"ep": 8, "tp": 1, "pp": 1, "dp": 16, "max_num_batched_tokens": 2048}
    )
    assert found.candidate == one
    return forecast_of(problem, found)


LONG = dataclasses.replace(
    EIGHT,
    shape=shape("qwen3-8b"),
    service=Service(prompt_len=32768, output_len=256, requests_per_second=0.05, ttft_ms=8000.0),
)


def test_long_prompts_are_tried_over_context_ranks() -> None:
    """They share a prompt, its time and the cache; each holds the weights."""
    assert {group.cp for group in LONG.groups()} == {1, 2, 4, 8}
    assert all(group.ep == 1 or group.cp == 1 for group in LONG.groups())
    one, four = LONG, LONG.grouped(1, 4)
    assert four is LONG.grouped(1, 4)
    assert four.prices(1, 1).gpus == 4
    assert four.prices(1, 1).weight_bytes == one.prices(1, 1).weight_bytes
    assert four.cached_tokens(1, 1) > 3.5 * one.cached_tokens(1, 1)
    alone, split = (candidate(group, 1, 1, 2048).floor_ttft for group in (one, four))
    assert 0.2 * alone < split < 0.5 * alone
    short = LONG.under(dataclasses.replace(LONG.service, prompt_len=4096))
    assert {group.cp for group in short.groups()} == {1}
    cached = LONG.under(dataclasses.replace(LONG.service, prefix_cache_hit_rate=0.9))
    assert {group.cp for group in cached.groups()} == {1}


def test_a_deployment_over_context_ranks_is_found_and_estimated_the_same() -> None:
    found = answer(LONG, top=8, pins={"cp": 2})
    assert found.deployments
    for one in found.deployments:
        assert one.layout.cp == 2
        assert one.num_gpus == one.layout.world_size
        (again,) = answer_one(LONG, one.layout, one.max_num_batched_tokens).deployments
        assert again.ttft == one.ttft
        assert again.memory_by_kind == one.memory_by_kind
    best = found.deployments[0]
    assert any(line.startswith("tp2 at best") for line in explain_deployment(LONG, best))
    table = need_map(LONG, rates=(0.05,), tpots=(100.0,), pins={"cp": 2})
    assert table.layouts[0][0] is not None
    assert "cp2" in table.layouts[0][0]


def test_serve_takes_every_layout_that_is_proposed() -> None:
    from hocket.jobs.serving.context import require_divided_blocks
    from hocket.jobs.serving.request import legal_server_layout
    from hocket.models.source import resolve_model
    from hocket.spec.serving import BLOCK_SIZE

    names = ("qwen3-8b", "mixtral-8x7b", "gpt-oss-20b")
    seen = set()
    for name in names:
        problem = dataclasses.replace(
            LONG, shape=shape(name), service=dataclasses.replace(LONG.service, prompt_len=16384)
        )
        source = resolve_model(name)
        for one in candidate_replicas(problem):
            layout = Layout(dp=one.ep, pp=one.pp, cp=one.cp, tp=one.tp, ep=one.ep)
            legal_server_layout(source, layout, "cpu")
            require_divided_blocks(BLOCK_SIZE, layout, "cpu")
            seen.add((name, one.cp))
    assert seen == {(name, cp) for name in names for cp in (1, 2, 4, 8)}


def test_the_command_of_another_server_has_no_context_ranks() -> None:
    from hocket.jobs.serving.deployment import pins_of

    assert pins_of("vllm", None, ("tp=2",)) == ("tp=2", "cp=1")
    assert pins_of("hocket", None, ("tp=2",)) == ("tp=2",)
    assert pins_of(None, None, ()) == ()
    assert pins_of("sglang", "tp4.cp2", ()) == ()
