"""Request traces: what a file may hold, and what its requests meet with, in closed form."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from hocket.catalogue.hardware import cluster
from hocket.catalogue.shapes import shape
from hocket.planning.service.plan import answer_one
from hocket.planning.service.problem import ServiceProblem
from hocket.planning.service.search import search_deployments
from hocket.planning.service.trace import RequestTrace, read_trace
from hocket.spec.errors import OptionError
from hocket.spec.layout import Layout
from hocket.spec.service import Service

PROMPT, OUTPUT = 1000, 101


def problem(trace: RequestTrace, **goals: Any) -> ServiceProblem:
    service = Service(
        prompt_len=trace.prompt_len,
        output_len=trace.output_len,
        requests_per_second=trace.rate,
        **goals,
    )
    return ServiceProblem(
        shape=shape("llama-3-8b"), cluster=cluster("8xH100-SXM"), service=service, trace=trace
    )


def equal(count: int, gap: float) -> RequestTrace:
    return RequestTrace(tuple(gap * i for i in range(count)), (PROMPT,) * count, (OUTPUT,) * count)


def alone(asked: ServiceProblem) -> tuple[float, float]:
    """Seconds of a prompt and of a token of a request that is alone, from the step's prices."""
    prices = asked.prices(1, 1)
    first = float(prices.step_seconds(PROMPT, PROMPT / 2, 0.0, 0.0)[0])
    tokens = sum(
        float(prices.step_seconds(0.0, 0.0, 1.0, PROMPT + 1 + i)[0]) for i in range(OUTPUT - 1)
    )
    return first + asked.begin_seconds(1, 1, 2048), tokens / (OUTPUT - 1)


def test_requests_far_apart_do_not_queue() -> None:
    asked = problem(equal(20, 60.0))
    (found,) = answer_one(asked, Layout()).deployments
    assert found.ttft is not None
    assert found.tpot is not None
    assert found.queue is not None
    assert found.request_tokens_per_second is not None
    first, token = alone(asked)
    assert found.queue.p99 == 0
    # Steps are interpolated between few sizes.
    assert found.ttft.p50 == pytest.approx(found.ttft.p99)
    assert found.ttft.p50 == pytest.approx(first, rel=0.05)
    assert found.tpot.p50 == pytest.approx(found.tpot.p99)
    assert found.tpot.p50 == pytest.approx(token, rel=0.01)
    whole = first + (OUTPUT - 1) * token
    assert found.request_tokens_per_second.p99 == pytest.approx(OUTPUT / whole, rel=0.05)
    assert found.output_tokens_per_second == pytest.approx(
        20 * OUTPUT / (19 * 60 + whole), rel=0.01
    )


def test_overload_saturates_at_what_the_engine_gives() -> None:
    """4 and 40 times faster than it answers: as many tokens a second, longer waits."""
    calm = problem(equal(2000, 1.0))
    most = answer_one(calm, Layout()).deployments[0].most_output_tokens_per_second
    rates, waits = [], []
    for times in (4.0, 40.0):
        gap = OUTPUT / (times * most)
        (found,) = answer_one(problem(equal(2000, gap)), Layout()).deployments
        assert found.queue is not None
        assert not found.meets
        rates.append(found.output_tokens_per_second)
        waits.append(found.queue.p50)
    assert rates[0] == pytest.approx(rates[1], rel=0.05)
    assert rates[1] == pytest.approx(most, rel=0.2)
    assert waits[1] > waits[0] > 1.0
    # The thousandth waits for those before it, less the places that are free when it comes.
    slots = found.max_sequences
    assert (1000 - slots) * OUTPUT / rates[1] < waits[1] < 1000 * OUTPUT / rates[1]


def test_replicas_are_added_until_a_trace_meets_the_goals() -> None:
    gap = 1 / 120
    asked = problem(equal(1500, gap), ttft_ms=300.0, tpot_ms=12.0)
    best = search_deployments(
        asked, top=1, pins={"tp": 1, "pp": 1, "max_num_batched_tokens": 2048}
    )[0]
    assert best.replicas > 1
    fewer = answer_one(asked, Layout(dp=best.replicas - 1)).deployments[0]
    enough = answer_one(asked, Layout(dp=best.replicas)).deployments[0]
    assert enough.meets
    assert not fewer.meets


def test_a_long_request_needs_room_for_itself() -> None:
    short = equal(10, 1.0)
    one = dataclasses.replace(short, prompts=(*short.prompts[:-1], 5_000_000))
    assert problem(short).sequences(1, 1) > 0
    assert problem(one).sequences(1, 1) == 0


def test_cached_prefixes_are_not_computed_again() -> None:
    trace = equal(5, 60.0)
    times = []
    for rate in (0.0, 0.5, 1.0):
        service = dataclasses.replace(problem(trace).service, prefix_cache_hit_rate=rate)
        (found,) = answer_one(problem(trace).under(service), Layout()).deployments
        assert found.ttft is not None
        times.append(found.ttft.p50)
        drawn = dataclasses.replace(problem(trace).under(service), trace=None)
        assert answer_one(drawn, Layout()).deployments[0].prefill_seconds == pytest.approx(
            found.ttft.p50
        )
    assert times[0] > times[1] > times[2]


@pytest.mark.parametrize("form", ["csv", "jsonl", "azure"])
def test_files_are_read(tmp_path: Path, form: str) -> None:
    rows = [(3.5, 7, 9), (1.0, 100, 20)]
    names = ("arrival", "prompt_tokens", "output_tokens")
    if form == "azure":
        names = ("arrival_seconds", "ContextTokens", "GeneratedTokens")
    path = tmp_path / "trace"
    if form == "jsonl":
        lines = [json.dumps(dict(zip(names, row, strict=True))) for row in rows]
        path.write_text("\n".join([*lines, ""]))
    else:
        path.write_text("\n".join([",".join(names), *(f"{a},{b},{c}" for a, b, c in rows)]))
    found = read_trace(path)
    assert found == RequestTrace((0.0, 2.5), (100, 7), (20, 9))
    assert found.rate == 2 / 2.5
    assert found.longest == 120


GOOD = '{"arrival": 1, "prompt_tokens": 2, "output_tokens": 3}\n'
HEADER = "arrival,prompt_tokens,output_tokens\n"


def second(arrival: str = "1", prompt: str = "2", output: str = "3") -> str:
    return f'{GOOD}{{"arrival": {arrival}, "prompt_tokens": {prompt}, "output_tokens": {output}}}\n'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no column arrival"),
        (HEADER, "holds no requests"),
        ("arrival,prompt_tokens\n1,2\n", "no column output_tokens"),
        (HEADER + "1,2,3\n1,2\n", "line 3: it has no output_tokens"),
        (HEADER + "1,2,x\n", "line 2: output_tokens is 'x'"),
        (HEADER + "9" * 200_000 + ",1,1\n", "line"),
        (GOOD + "{", "line 2: it is not JSON"),
        (GOOD + "[1]", "line 2: it is list, not an object"),
        (GOOD + "[" * 100_000, "line 2: it is not JSON"),
        (second(arrival="true"), "line 2: arrival is 'True', not a number"),
        (second(arrival="-1"), "line 2: arrival is -1"),
        (second(arrival="NaN"), "line 2: arrival is nan"),
        (second(prompt="0"), "line 2: prompt_tokens is 0"),
        (second(prompt="2.5"), "line 2: prompt_tokens is 2.5"),
        (second(output="1e99"), "line 2: output_tokens is 1e+99"),
        (GOOD * 200_001, "more than 200,000 requests"),
    ],
)
def test_a_bad_file_names_its_line(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(OptionError) as raised:
        read_trace(path)
    assert said in raised.value.message


def test_files_that_are_none(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    for make, said in (
        (lambda: None, "No such file"),
        (lambda: path.write_bytes(b"\xff\xfe\x00"), "not UTF-8"),
        (lambda: path.write_bytes(b"\n" * 64_000_001), "at most 64,000,000"),
    ):
        make()
        with pytest.raises(OptionError, match=said):
            read_trace(path)
    with pytest.raises(OptionError, match="not a regular file"):
        read_trace("/dev/null")
