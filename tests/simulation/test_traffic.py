"""Traffic: what one replica's requests meet with, against rounds simulated singly and by hand."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from hocket.simulation.traffic import (
    Floats,
    Latencies,
    LatencyLimits,
    RoundTable,
    latencies_of,
    play_requests,
    poisson,
    round_seconds,
    simulate_requests,
)


class Linear:
    """Prices that the table holds exactly: 10 ms, and something for each token and position."""

    def __init__(self, stages: int = 1, **rates: float) -> None:
        self.stages = stages
        self.rates = {"prompt": 2e-5, "read": 1e-9, "batch": 4e-5, "context": 3e-8, **rates}

    def step_seconds(self, n: Any, k: Any, b: Any, c: Any) -> Floats:
        r = self.rates
        found: Floats = (
            0.01 + n * (r["prompt"] + k * r["read"]) + b * (r["batch"] + c * r["context"])
        )
        return found

    def stage_seconds(self, n: Any, k: Any, b: Any, c: Any) -> Floats:
        found: Floats = self.step_seconds(n, k, b, c) / self.stages
        return found


def table(most: int = 64, chunk: int = 256, **rates: float) -> RoundTable:
    return RoundTable(Linear(**rates), chunk=chunk, longest=600, most=most)


def play(rounds: RoundTable, arrivals: list[float], **asked: Any) -> Latencies:
    found = simulate_requests(rounds, arrivals, **asked)
    assert found is not None
    return found


def one_by_one(
    rounds: RoundTable, arrivals: list[float], *, prompt: int, output: int, slots: int
) -> tuple[np.ndarray, np.ndarray]:
    """First and last token of each request, every round simulated: the definition."""
    left = [prompt] * len(arrivals)
    given = [0] * len(arrivals)
    first, done = np.full(len(arrivals), np.nan), np.full(len(arrivals), np.nan)
    running: list[int] = []
    waiting = list(range(len(arrivals)))
    now = arrivals[0]
    while np.isnan(done).any():
        while waiting and arrivals[waiting[0]] <= now and len(running) < slots:
            running.append(waiting.pop(0))
        if not running:
            now = arrivals[waiting[0]]
            continue
        decoding = [i for i in running if left[i] == 0]
        room, read, complete = max(rounds.chunk - len(decoding), 1), 0.0, []
        tokens = 0
        for i in running:
            take = min(left[i], room - tokens)
            if take:
                read += take * (prompt - left[i] + take / 2)
                tokens, left[i] = tokens + take, left[i] - take
                complete += [i] if left[i] == 0 else []
        low, slope, each = rounds.terms(tokens, len(decoding))
        context = np.mean([prompt + given[i] for i in decoding]) if decoding else 1.0
        now += low + slope * (context - 1) + (each * read / tokens if tokens else 0.0)
        for i in (*decoding, *complete):
            given[i] += 1
            first[i] = now if given[i] == 1 else first[i]
            if given[i] == output:
                done[i] = now
                running.remove(i)
    return first, done


@pytest.mark.parametrize(("rate", "slots"), [(1.0, 64), (8.0, 64), (20.0, 5), (40.0, 64)])
def test_events_are_the_rounds_one_by_one(rate: float, slots: int) -> None:
    rounds = table()
    arrivals = poisson(rate, 60, seed=3)
    first, done = one_by_one(rounds, arrivals, prompt=300, output=40, slots=slots)
    found = play(rounds, arrivals, prompt=300, output=40, capacity=340 * slots, most=64)
    came = np.array(arrivals)
    for name, values in (
        ("ttft", first - came),
        ("tpot", (done - first) / 39),
        ("end_to_end", done - came),
    ):
        expected = np.percentile(values, [50, 90, 99])
        mine = getattr(found, name)
        assert (mine.p50, mine.p90, mine.p99) == pytest.approx(expected, rel=1e-9), name


def test_a_request_alone_takes_its_prompt_and_its_tokens() -> None:
    rounds = table(chunk=1024)
    found = play(rounds, [0.0, 100.0], prompt=500, output=101, capacity=1e6, most=8)
    prompt = 0.01 + 500 * (2e-5 + 250 * 1e-9)
    # 100 tokens at contexts 501 to 600.
    tokens = 100 * (0.01 + 4e-5 + 550.5 * 3e-8)
    assert found.ttft.p50 == pytest.approx(prompt)
    assert found.tpot.p99 == pytest.approx(tokens / 100)
    assert found.end_to_end.p90 == pytest.approx(prompt + tokens)
    assert found.queue.p99 == 0
    assert found.batch_peak == 1
    later = found.later(0.25)
    assert later.ttft.p50 == pytest.approx(prompt + 0.25)
    assert later.tpot == found.tpot


def test_one_at_a_time_is_a_queue() -> None:
    """Three at once, room for one: the k-th ends after k times its own time."""
    rounds = table(chunk=1024, context=0.0, read=0.0)
    found = play(rounds, [0.0] * 3, prompt=100, output=11, capacity=111, most=8)
    each = (0.01 + 100 * 2e-5) + 10 * (0.01 + 4e-5)
    assert found.end_to_end.p50 == pytest.approx(2 * each)
    assert found.end_to_end.p99 == pytest.approx(each * (2 + 0.98))
    assert found.queue.p50 == pytest.approx(each)


def test_littles_law() -> None:
    """Sequences that decode on average = requests a second x seconds that each decodes."""
    rounds = table(most=256)
    rate, output = 10.0, 100
    arrivals = poisson(rate, 3000, seed=1)
    found = play(
        rounds, arrivals, prompt=200, output=output, capacity=1e6, most=256, warm_up=300, tail=300
    )
    mean_tpot = found.tpot.p50
    measured_rate = found.requests / found.simulated_seconds
    assert found.batch == pytest.approx(measured_rate * mean_tpot * (output - 1), rel=0.03)
    assert 0.99 < found.busy <= 1


def test_a_steady_state_carries_what_its_rounds_give() -> None:
    """All at once, so that the batch stays full: requests a second are batch / (output x round)."""
    rounds = table(most=32, chunk=512)
    count, output, prompt, slots = 800, 64, 128, 32
    found = play(
        rounds, [0.0] * count, prompt=prompt, output=output, capacity=slots * 192, most=slots
    )
    low, slope, each = rounds.terms(slots * prompt / output, slots)
    seconds = low + slope * (prompt + output / 2) + each * prompt / 2
    expected = slots / (output * seconds)
    assert count / found.end_to_end.p99 == pytest.approx(expected, rel=0.05)


def test_it_gives_up_once_too_many_are_slow() -> None:
    rounds, arrivals = table(), poisson(8.0, 300, seed=5)
    asked: dict[str, Any] = {"prompt": 300, "output": 40, "capacity": 1e5, "most": 64}
    whole = play(rounds, arrivals, **asked)
    for name in ("ttft", "tpot"):
        median = getattr(whole, name).p50
        limits = {"ttft": 1e9, "tpot": 1e9, name: median}
        assert (
            simulate_requests(
                rounds, arrivals, **asked, limits=LatencyLimits(**limits, exceptions=140)
            )
            is None
        )
        kept = simulate_requests(
            rounds, arrivals, **asked, limits=LatencyLimits(**limits, exceptions=160)
        )
        assert kept == whole


def test_more_requests_wait_longer() -> None:
    rounds = table(most=256)
    found = [
        play(
            rounds,
            poisson(rate, 600, seed=0),
            prompt=300,
            output=100,
            capacity=40_000,
            most=256,
            warm_up=100,
            tail=100,
        )
        for rate in (1.0, 10.0, 25.0)
    ]
    for less, more in itertools.pairwise(found):
        assert more.tpot.p90 > less.tpot.p90
        assert more.ttft.p90 > less.ttft.p90
        assert more.batch > less.batch
        assert more.cache > less.cache
    for one in found:
        for name in ("ttft", "tpot", "end_to_end"):
            values = getattr(one, name)
            assert values.p50 <= values.p90 <= values.p99
            assert values.at(90) == values.p90
        assert one.cache <= one.cache_peak <= 1


def test_arrivals_are_poisson_and_dealt_in_turn() -> None:
    whole = np.diff(poisson(5.0, 20_000, seed=2))
    assert whole.mean() == pytest.approx(1 / 5, rel=0.03)
    assert whole.std() == pytest.approx(1 / 5, rel=0.03)  # exponential: as wide as its mean
    fourth = np.diff(poisson(5.0, 20_000, seed=2, every=4))
    assert fourth.mean() == pytest.approx(4 / 5, rel=0.03)
    assert fourth.std() == pytest.approx(2 / 5, rel=0.03)  # the sum of four
    assert poisson(5.0, 10, seed=2) == poisson(5.0, 10, seed=2)
    assert poisson(5.0, 10, seed=3) != poisson(5.0, 10, seed=2)


def test_stages_work_at_once() -> None:
    """Four stages: a lone sequence passes through all; many keep them busy."""
    prices = Linear(stages=4)
    alone = float(round_seconds(prices, 0.0, 0.0, 1.0, 100.0, chunk=256))
    assert alone == pytest.approx(float(prices.step_seconds(0.0, 0.0, 1.0, 100.0)))
    many = float(round_seconds(prices, 0.0, 0.0, 64.0, 100.0, chunk=256))
    assert many == pytest.approx(float(prices.step_seconds(0.0, 0.0, 16.0, 100.0)))
    # A slowest stage that takes longer than a quarter decides.
    prices.stage_seconds = lambda n, k, b, c: prices.step_seconds(n, k, b, c) / 2  # type: ignore[method-assign]
    slow = float(round_seconds(prices, 0.0, 0.0, 64.0, 100.0, chunk=256))
    assert slow == pytest.approx(2 * many)
    # Prompts of four chunks go through the stages one behind the other.
    read = float(round_seconds(prices, 1024.0, 100.0, 0.0, 1.0, chunk=256))
    assert read == pytest.approx(2 * float(prices.step_seconds(256.0, 100.0, 0.0, 1.0)))


def test_a_tables_numbers_are_the_prices() -> None:
    prices = Linear()
    rounds = RoundTable(prices, chunk=512, longest=2048, most=100)
    for n, k, b, c in ((0, 0, 1, 1), (300, 70, 17, 900), (511, 0, 99, 2048), (33, 5, 0, 1)):
        low, slope, each = rounds.terms(n, b)
        mine = low + slope * (c - 1) + each * k
        exact = float(prices.step_seconds(n, k, b, c))
        assert mine == pytest.approx(exact, rel=1e-6), (n, k, b, c)


def test_a_trace_is_counted_to_its_last_token() -> None:
    """Little's law: sequences that decode, times seconds, are the seconds that each decoded.
    A burst decodes after its last arrival."""
    for arrivals in ([0.0] * 40, [0.1 * (i % 7) + i // 20 for i in range(40)]):
        arrivals.sort()
        times = play_requests(
            table(chunk=1024), arrivals, prompt=100, output=30, capacity=1e6, most=64
        )
        assert times is not None
        assert times.span == pytest.approx(times.done.max() - arrivals[0])
        assert times.batch_seconds == pytest.approx((times.done - times.first).sum())
        found = latencies_of([times])
        assert found.batch == pytest.approx(times.batch_seconds / times.span)
        assert 1 < found.batch <= found.batch_peak <= 40
        assert found.cache_peak >= 40 * 130 / 1e6 * (arrivals[-1] == 0)
        assert 0 < found.busy <= 1
