"""The serving benchmark's own arithmetic, its reading of streams, and its client against a server
that computes nothing."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.serve.client import Ask, Exchange, ServerError, drive, read, unchunked
from benchmarks.serve.contenders import EVERY, REFERENCE, chosen
from benchmarks.serve.figures import Measured, percentile, ratio, spread, tables
from benchmarks.serve.processes import Running, Turn, free_port
from benchmarks.serve.ratios import GOALS, ratios
from benchmarks.serve.roofline import SHAPES, Device, share
from benchmarks.serve.workload import (
    LARGER,
    MODELS,
    TINY,
    VOCAB,
    Load,
    loads,
    prompts,
    text,
    tokens,
    write_tokenizer,
)

ONE = Load(clients=1, repeats=2)
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def event(written: str, reason: str | None = None) -> bytes:
    choice = {"index": 0, "text": written, "finish_reason": reason}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def exchange(*pieces: tuple[float, bytes]) -> Exchange:
    async def make() -> Exchange:
        return Exchange(b"")

    made = asyncio.run(make())
    made.pieces, made.sent, made.ended = list(pieces), 1.0, 9.0
    return made


def test_a_stream_is_read_with_its_times() -> None:
    answer = read(
        exchange(
            (1.5, CHUNKED),
            (2.0, chunk(event("00a"))),
            (3.0, chunk(event("fff"))),
            (5.0, chunk(event("001") + event("", "length"))),
            (6.0, chunk(b"data: [DONE]\n\n") + chunk(b"")),
        )
    )
    assert answer.tokens == [10, 4095, 1]
    assert (answer.first, answer.last, answer.done) == (1.0, 4.0, 8.0)
    assert answer.per_token == 1.5


@pytest.mark.parametrize(
    ("pieces", "why"),
    [
        ([(2.0, b"HTTP/1.1 429 Too Many Requests\r\n\r\nfull")], "full"),
        ([(2.0, CHUNKED + chunk(event("00a", "stop")) + chunk(b""))], "stop"),
        ([(2.0, CHUNKED + chunk(event("00a")) + chunk(b""))], "finished by"),
        ([(2.0, CHUNKED + chunk(event("00a", "length")))], "cut off"),
        ([(2.0, CHUNKED + chunk(b'data: {"error": "gone"}\n\n') + chunk(b""))], "gone"),
        ([], "without an answer"),
    ],
)
def test_what_is_no_whole_answer_counts_as_none(
    pieces: list[tuple[float, bytes]], why: str
) -> None:
    with pytest.raises(ServerError, match=why):
        read(exchange(*pieces))


def test_chunks_are_put_together() -> None:
    assert unchunked(b"3\r\nabc\r\n2;x=y\r\nde\r\n0\r\n\r\n") == b"abcde"


def test_the_client_counts_what_a_server_streams() -> None:
    port = free_port()
    server = subprocess.Popen([sys.executable, "-m", "benchmarks.serve.null_server", str(port)])
    try:
        asks = [Ask("/v1/completions", {"max_tokens": 7})] * 6
        for _ in range(100):
            try:
                seconds, answers = drive(port, asks, clients=3)
                break
            except ConnectionRefusedError:
                time.sleep(0.05)
    finally:
        server.kill()
        server.wait()
    assert [answer.tokens for answer in answers] == [[0] * 7] * 6
    assert all(0 < a.first <= a.last <= a.done <= seconds for a in answers)


def test_prompts_are_a_function_of_the_turn() -> None:
    shared = Load(clients=8, repeats=2, shared=True)
    one, again, next_turn = (prompts(TINY, shared, turn) for turn in (1, 1, 2))
    assert one == again
    assert len(one) == 16
    assert {len(p) for p in one} == {TINY.prompt}
    assert len({tuple(p[: TINY.prefix]) for p in one + next_turn}) == 1
    assert len({tuple(p) for p in one + next_turn}) == 32
    own = prompts(TINY, Load(clients=8, repeats=2), 1)
    assert len({tuple(p[:16]) for p in own}) == 16


def test_text_and_tokens_say_the_same(tmp_path: Path) -> None:
    every = list(range(VOCAB))
    assert tokens(text(every)) == every
    with pytest.raises(ValueError, match="whole tokens"):
        tokens("0000")
    write_tokenizer(tmp_path)
    vocabulary = json.loads((tmp_path / "tokenizer.json").read_text())["model"]["vocab"]
    assert {name: token for name, token in vocabulary.items() if text([token]) != name} == {}


def test_models_are_as_large_as_they_are_said_to_be() -> None:
    assert TINY.parameters == 4_999_424
    assert LARGER.parameters == 81_808_128
    for model in MODELS.values():
        assert model.prompt + model.new <= model.positions


def test_few_clients_ask_more_often() -> None:
    assert [load.requests for load in loads([1, 8, 64], ["own"])] == [4, 16, 64]
    assert [load.shared for load in loads([1], ["own", "shared"])] == [False, True]


def test_spread_and_percentile() -> None:
    assert spread([10.0, 10.0, 10.0]) == 0
    assert spread([8.0, 9.0, 10.0, 11.0, 12.0]) == pytest.approx(0.1)
    assert percentile([4.0, 1.0, 3.0, 2.0], 0.95) == 4.0
    assert percentile([4.0, 1.0, 3.0, 2.0], 0.5) == 2.0
    assert percentile(list(range(1, 101)), 0.95) == 95


def test_a_ratio_is_taken_turn_by_turn() -> None:
    assert ratio([2.0, 40.0, 6.0], [1.0, 10.0, 2.0]) == (3.0, pytest.approx(1 / 6))
    assert ratio([], [1.0]) is None


def measured(name: str, seconds: list[float], per_token: float) -> Measured:
    (contender,) = (c for c in EVERY if c.name == name)
    turns = [Turn(s, [[1] * 10, [2] * 10], [0.1, 0.2], [per_token] * 2) for s in seconds]
    return Measured(contender, turns={ONE: turns})


def test_goals_are_met_or_not() -> None:
    found = ratios(
        [
            measured("hocket serve dp1, 1 thread a rank", [2.0, 2.0], 0.2),
            measured("hocket serve dp1, 2 threads a rank", [1.0, 1.0], 0.1),
            measured("hocket serve tp2, 1 thread a rank", [1.5, 1.5], 0.125),
            measured("vLLM serve, 1 thread", [1.25, 1.25], 0.1),
        ],
        [ONE],
    )
    rows = {row["title"]: row for row in found.rows}
    assert rows["hocket serve / vLLM serve"]["ratio"] == pytest.approx(1.25)
    assert rows["hocket serve / vLLM serve"]["one"].startswith("hocket serve dp1, 2")
    assert rows["hocket serve / vLLM serve"]["met"]
    decode = rows["tp2 / one rank, decode"]
    assert decode["ratio"] == pytest.approx(1.6)
    assert decode["met"]
    assert "pp2 / one rank, throughput" not in rows
    assert "met" in found.text()


def test_who_computes_something_else_is_compared_with_nobody() -> None:
    off = measured("vLLM serve, 1 thread", [0.1], 0.1)
    off.gap = 0.5
    ours = measured("hocket serve dp1, 1 thread a rank", [2.0], 0.2)
    assert ratios([ours, off], [ONE]).rows == []
    assert "NOT THE SAME TOKENS" in tables([ours, off], [ONE], "")
    assert off.report()["status"] == "computes something else"


def test_every_goal_names_contenders() -> None:
    for goal in GOALS:
        for name in (goal.one, goal.other):
            assert any(c.name.startswith(name) for c in EVERY), name


def test_the_reference_is_always_there() -> None:
    assert [c.name for c in chosen(["null"])] == ["null server", REFERENCE]
    with pytest.raises(ValueError, match="no contender"):
        chosen(["nobody"])


def test_a_contender_that_answers_too_little_has_failed(tmp_path: Path) -> None:
    null = next(c for c in EVERY if c.name == "null server")
    with Running(null, TINY, tmp_path, sys.executable, tmp_path / "log") as running:
        running.ready()
        turn = running.turn(ONE, prompts(TINY, ONE, 0))
        assert [len(made) for made in turn.tokens] == [TINY.new] * 2
        assert turn.processor_seconds >= 0
        pid = running.process.pid
    assert not Path(f"/proc/{pid}").exists()


def test_the_roofline_counts_what_a_step_reads_and_computes() -> None:
    shape = SHAPES["larger"]
    assert shape.read + VOCAB * shape.hidden + (2 * shape.layers + 1) * shape.hidden == (
        LARGER.parameters
    )
    assert SHAPES["llama-8b"].read == 8_030_261_248 - 128256 * 4096 - 65 * 4096
    assert shape.cache_bytes(1, 4) == 2 * 12 * 4 * 64 * 4
    assert shape.decode_bytes(2, 10.0, 4) == 4 * shape.read + 20 * shape.cache_bytes(1, 4)
    one, two = shape.prefill_operations(100), shape.prefill_operations(200)
    attention = 2.0 * 100 * 100 * 12 * 64 * 12
    assert two - 2 * one == 2 * attention - 2 * VOCAB * shape.hidden
    row = {"what": "decode, batch 1", "amount": 40.0, "seconds": [3.0, 2.0, 1.0]}
    assert share(row, Device("d", bandwidth=80.0, rate=10.0)) == (20.0, 0.25)
    assert share({**row, "what": "prefill, 8 tokens"}, Device("d", 80.0, 10.0)) == (20.0, 2.0)
