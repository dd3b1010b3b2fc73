"""Prefill and decode in pools of their own: each is a service that meets its part of the goals."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

import numpy as np
import pytest

from hocket.catalogue import shapes
from hocket.catalogue.hardware import cluster
from hocket.cli.main import main
from hocket.planning.service.plan import answer
from hocket.planning.service.pools import PooledForecast, pooled, transfer_seconds
from hocket.planning.service.problem import ServiceProblem
from hocket.planning.service.trace import RequestTrace
from hocket.simulation.traffic import poisson
from hocket.spec.service import Service

LONG = Service(
    prompt_len=8192, output_len=128, requests_per_second=10.0, ttft_ms=1700.0, tpot_ms=25.0
)


def problem(
    service: Service = LONG, model: str = "llama-3-70b", on: str = "8xH100", **more: object
) -> ServiceProblem:
    wanted = {"shape": shapes.shape(model), "cluster": cluster(on), "service": service, **more}
    return ServiceProblem(**wanted)  # type: ignore[arg-type]


def found(asked: ServiceProblem) -> PooledForecast:
    pools = pooled(asked)
    assert pools is not None
    return pools


def test_both_pools_carry_the_load_and_meet_the_goals() -> None:
    pools = found(problem())
    for pool in (pools.prefill, pools.decode):
        assert pool.meets
        assert pool.most_requests_per_second > LONG.requests_per_second
    assert pools.ttft <= LONG.ttft_ms / 1e3  # type: ignore[operator]
    assert pools.tpot <= LONG.tpot_ms / 1e3  # type: ignore[operator]
    assert pools.num_gpus == pools.prefill.num_gpus + pools.decode.num_gpus
    hourly = pools.num_gpus * (pools.prefill.price or 0.0)
    assert pools.dollars_per_hour == pytest.approx(hourly)


def test_no_prompt_delays_a_token() -> None:
    pools = found(problem())
    together = answer(problem(), top=1).best
    assert together is not None
    assert together.tpot is not None
    # Of one pool the same layout decodes more slowly, since chunks of prompts run in its steps.
    assert pools.decode.layout.tp == together.layout.tp == 8
    assert pools.tpot < 0.7 * together.tpot.at(90)
    assert pools.tpot < 1.5 * pools.decode.decode_seconds
    assert pools.num_gpus < together.num_gpus


def waiting(arrivals: Sequence[float], seconds: float) -> np.ndarray:
    """Seconds until the answer in a queue of one server that takes `seconds` for each (Lindley)."""
    free, waits = 0.0, []
    for came in arrivals:
        free = max(free, came) + seconds
        waits.append(free - came)
    return np.array(waits)


def test_prefill_is_a_queue_of_one_server() -> None:
    """Prompts of a whole chunk are taken one after the other: M/D/1, dealt in turn."""
    pools = found(problem())
    pool = pools.prefill
    assert pool.layout.pp == 2
    asked = problem().under(dataclasses.replace(LONG, output_len=1, ttft_ms=None, tpot_ms=None))
    begin = asked.begin_seconds(pool.layout.tp, 2, pool.max_num_batched_tokens)
    arrivals = poisson(LONG.requests_per_second, 20_000, seed=3, every=pool.replicas)
    own = waiting(arrivals, pool.prefill_seconds - begin) + begin
    assert pool.ttft is not None
    assert pool.ttft.p50 == pytest.approx(float(np.percentile(own, 50)), rel=0.15)
    assert pool.ttft.p90 == pytest.approx(float(np.percentile(own, 90)), rel=0.3)


def test_the_transfer_is_of_the_prompts_cache() -> None:
    asked = problem()
    node = asked.cluster.node
    held = asked.cache_per_token * LONG.prompt_len
    assert transfer_seconds(asked, 2, 8) == pytest.approx(held / (node.network * 2 / 8))
    assert transfer_seconds(asked, 16, 16) == pytest.approx(held / node.network)
    narrow = problem(cache_precision="fp8")
    assert transfer_seconds(narrow, 2, 8) == pytest.approx(transfer_seconds(asked, 2, 8) / 2)
    # In one node the keys and values go over its links.
    there = problem(bounded=True)
    assert transfer_seconds(there, 2, 4) == pytest.approx(held / (node.link.bandwidth * 2))
    latent = problem(model="deepseek-v3", on="8xH200")
    assert transfer_seconds(latent, 8, 8) < 0.25 * transfer_seconds(asked, 8, 8)


def test_what_the_network_takes_prefill_has_less_of() -> None:
    fast = found(problem())
    slow_node = dataclasses.replace(cluster("8xH100").node, network=15e9)
    slow = problem(cluster=dataclasses.replace(cluster("8xH100"), node=slow_node))
    assert found(slow).prefill.ttft.p90 < fast.prefill.ttft.p90  # type: ignore[union-attr]
    assert found(slow).transfer_seconds > 10 * fast.transfer_seconds
    assert found(slow).ttft <= LONG.ttft_ms / 1e3  # type: ignore[operator]
    crawling = dataclasses.replace(slow_node, network=1e8)
    assert pooled(problem(cluster=dataclasses.replace(slow.cluster, node=crawling))) is None


def test_pools_that_are_not_there() -> None:
    assert pooled(problem(bounded=True)) is None  # eight GPUs do not carry it
    room = problem(on="8x8xH100", bounded=True)
    assert found(room).num_gpus == found(problem()).num_gpus
    trace = RequestTrace(arrivals=(0.0, 1.0), prompts=(64, 64), outputs=(8, 8))
    assert pooled(problem(trace=trace)) is None
    assert pooled(problem(dataclasses.replace(LONG, ttft_ms=50.0))) is None


FLAGS = [
    "plan", "llama-3-70b", "--serve", "--cluster", "H100", "--prompt-len", "8064",
    "--output-len", "128", "--requests-per-second", "10", "--ttft-ms", "3000", "--tpot-ms",
]  # fmt: skip


def test_the_command_prints_pools_where_they_take_fewer(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*FLAGS, "25"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "Fewer GPUs with prefill and decode in pools of their own: " in said
    assert "vLLM and SGLang serve so, hocket's server does not." in said
    assert main([*FLAGS, "25", "--json"]) == 0
    kind = json.loads(capsys.readouterr().out)["kinds"][0]
    pools = kind["pools"]
    assert pools["num_gpus"] < kind["deployments"][0]["num_gpus"]
    assert pools["decode"]["layout"] == "tp8"
    assert f"pools of their own: {pools['num_gpus']}, " in said


def test_nothing_is_printed_where_they_take_as_many(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "llama-3-8b", "--serve", "--cluster", "8xH100"]) == 0
    assert "pools" not in capsys.readouterr().out


def test_goals_that_one_pool_cannot_meet_name_the_pools(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*FLAGS, "12"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "by no number of replicas under this load. vLLM and SGLang meet the goals" in said


@pytest.mark.parametrize(("prompt", "rate"), [(8064, 10.0), (4096, 4.0)])
def test_a_looser_goal_takes_no_more_gpus(prompt: int, rate: float) -> None:
    """Prompts in larger pieces carry more requests than the lower bound of small ones says."""
    counts = []
    for ttft in (1300.0, 1700.0, 2000.0, 3000.0, 6000.0):
        service = Service(
            prompt_len=prompt, output_len=128, requests_per_second=rate, ttft_ms=ttft, tpot_ms=30.0
        )
        found = pooled(problem(service=service))
        assert found is not None
        counts.append(found.num_gpus)
    assert counts == sorted(counts, reverse=True)
