"""Requests: what is refused, how they end, and that none of them leaves anything behind."""

from __future__ import annotations

import json
import pickle
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.serving.request import (
    MAX_BIASES,
    MAX_STOP_TOKENS,
    MAX_STRUCTURE,
    Output,
    Request,
    RequestRefused,
    SamplingParams,
    TokenLogprobs,
)
from hocket.serving.scheduling.limits import SchedulerLimits
from hocket.serving.scheduling.scheduler import Scheduler
from hocket.spec.errors import HocketError, OptionError
from tests.serving.test_scheduler import Replica, limits, request
from tests.serving.test_steps import samplings
from tests.serving.token_machine import continuation, following

# --- words --------------------------------------------------------------------------------------


@given(
    samplings(), st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=5), st.text(max_size=9)
)
@settings(max_examples=40)
def test_requests_come_back_from_json(
    sampling: SamplingParams, tokens: list[int], text: str
) -> None:
    asked = Request(
        id="a", tokens=tuple(tokens), sampling=sampling, index=3, user=text, salt=text, deadline=2.5
    )
    assert Request.from_json(json.loads(json.dumps(asked.to_json()))) == asked


def test_outputs_come_back_from_json() -> None:
    entry = TokenLogprobs(5, -0.25, ((5, -0.25), (7, -2.0)))
    for output in (
        Output(id="a"),
        Output(id="a", tokens=[5], logprobs=[entry], finish_reason="stop", stop_token=2, cached=16),
        Output(id="a", prompt_logprobs=[entry, entry], finish_reason="error", error="no"),
    ):
        assert Output.from_json(json.loads(json.dumps(output.to_json()))) == output
    assert Output(id="a", tokens=[1]).to_json() == {"id": "a", "tokens": [1]}


def test_only_what_differs_is_reported() -> None:
    assert SamplingParams(temperature=0.5).to_json() == {"temperature": 0.5}


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0; it must be at least 1"),
        ({"max_new_tokens": -1, "prompt_logprobs": 0}, "max_new_tokens is -1"),
        ({"max_new_tokens": 2**31}, "max_new_tokens is 2147483648"),
        ({"max_new_tokens": 4, "min_new_tokens": 5}, "min_new_tokens is 5; it must be from 0 to 4"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": -1.0}, "temperature is -1"),
        ({"top_k": 0}, "top_k is 0"),
        ({"top_p": 0.0}, "top_p is 0"),
        ({"min_p": 1.5}, "min_p is 1.5"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0"),
        ({"presence_penalty": 2.5}, "presence_penalty is 2.5"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty is nan"),
        ({"logit_bias": [[1, 101.0]]}, "logit_bias of token 1 is 101"),
        ({"logit_bias": [[-1, 1.0]]}, "a token of logit_bias is -1"),
        ({"logit_bias": [[1]]}, "pairs of token id and bias"),
        ({"logit_bias": [[1, 1.0]] * (MAX_BIASES + 1)}, "logit_bias has 1025 entries"),
        ({"stop_tokens": [1] * (MAX_STOP_TOKENS + 1)}, "stop_tokens has 257 token ids"),
        ({"stop": ["a"]}, "stop must be a list of token ids"),
        ({"stop": 5}, "stop must be a list of token ids"),
        ({"seed": 2**63}, "seed is 9223372036854775808"),
        ({"seed": True}, "seed is bool; it must be an integer"),
        ({"logprobs": 21}, "logprobs is 21; it must be from 0 to 20"),
        ({"ignore_eos": 1}, "ignore_eos is int; it must be true or false"),
        ({"structure": "x" * (MAX_STRUCTURE + 1)}, "structure has 65537 characters"),
        ({"temperature": None}, "temperature is NoneType; it must be a number"),
        ({"temperature": 10**400}, "temperature is int; it must be a number"),
        ({"top_kk": 1}, "unknown field of the sampling 'top_kk'"),
    ],
)
def test_sampling_that_cannot_be_is_refused(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(OptionError) as caught:
        SamplingParams.from_json(fields)
    assert why in str(caught.value)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ([], "the request is list; it must be a JSON object"),
        ({"id": "a", "tokens": [1]}, "the request has no 'sampling'"),
        ({"id": 1, "tokens": [1], "sampling": {}}, "id is int; it must be a text"),
        ({"id": "a", "tokens": [], "sampling": {}}, "the prompt is empty"),
        ({"id": "a", "tokens": "ab", "sampling": {}}, "tokens must be a list of token ids"),
        ({"id": "a", "tokens": [1.0], "sampling": {}}, "tokens must be a list of token ids"),
        ({"id": "a", "tokens": [-5], "sampling": {}}, "the prompt holds token -5"),
        ({"id": "a", "tokens": [2**40], "sampling": {}}, "the prompt holds token 1099511627776"),
        ({"id": "a" * 300, "tokens": [1], "sampling": {}}, "id has 300 characters; most: 256"),
        ({"id": "a", "tokens": [1], "sampling": {}, "deadline": 0}, "deadline is 0"),
        ({"id": "a", "tokens": [1], "sampling": {}, "index": -1}, "index is -1"),
        ({"id": "a", "tokens": [1], "sampling": {}, "x": 1}, "unknown field of the request 'x'"),
    ],
)
def test_requests_that_cannot_be_are_refused(given: Any, why: str) -> None:
    with pytest.raises(OptionError) as caught:
        Request.from_json(given)
    assert why in str(caught.value)


def test_a_refusal_survives_the_way_between_processes() -> None:
    error = RequestRefused("no", kind="full", retry_after=2.0, hint="later")
    again = pickle.loads(pickle.dumps(error))
    assert isinstance(again, HocketError)
    assert (again.message, again.kind, again.retry_after, again.hint) == (
        "no",
        "full",
        2.0,
        "later",
    )


def test_limits_that_cannot_be_are_refused() -> None:
    for name in ("num_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens", "depth"):
        with pytest.raises(OptionError, match=f"{name} is 0"):
            limits(**{name: 0})


# --- refused by the scheduler -------------------------------------------------------------------


def refused(replica: Replica, asked: Request) -> RequestRefused:
    """Why it is refused; and a normal request still succeeds."""
    found = replica.refusal(asked)
    assert found is not None
    replica.add(request(f"normal{len(replica.asked)}", [1, 2, 3]))
    replica.run()
    return found


def test_what_can_never_be_computed_is_refused_with_the_numbers() -> None:
    replica = Replica(limits(num_blocks=10, max_model_len=60))
    long = refused(replica, request("a", [1] * 60))
    assert (long.kind, long.retry_after) == ("too_long", None)
    assert "60 tokens and at least 1 new ones need 61 positions; a request has 60" in long.message
    assert refused(replica, request("a", [1] * 50, new=20, min_new_tokens=11)).kind == "too_long"
    large = refused(replica, request("a", [1] * 41, new=1))
    assert large.kind == "never_fits"
    assert "10 blocks of 4: 40" in large.message
    assert refused(replica, request("a", [1] * 30, new=12)).kind == "never_fits"
    word = refused(replica, request("a", [1, 97]))
    assert (word.kind, word.message) == ("bad", "token 97 is not one of the model's 97")
    assert refused(replica, request("a", [1], logit_bias=((500, 1.0),))).kind == "bad"
    assert refused(replica, request("a", [1], stop_tokens=(500,))).kind == "bad"
    assert refused(replica, request("a", [1], seed=None)).kind == "bad"
    replica.add(request("twice", [1]))
    assert refused(replica, request("twice", [1])).kind == "bad"
    kinds = replica.scheduler.stats().refused_by
    assert kinds == {"too_long": 2, "never_fits": 2, "bad": 5}


def test_what_just_fits_is_computed() -> None:
    replica = Replica(limits(num_blocks=10, max_model_len=60, max_num_seqs=3))
    replica.add(request("a", [1] * 30, new=11), request("b", [2] * 40, new=1))
    replica.add(request("c", [3] * 40, new=0, prompt_logprobs=0))
    replica.run()


def test_a_full_queue_says_when_to_come_again() -> None:
    replica = Replica(limits(max_queue=8, max_num_seqs=1, num_blocks=16))
    assert replica.refusal(request("r", [1])) is None
    replica.step()
    for k in range(8):
        replica.add(request(f"r{k}", [k, 5], new=10))
    found = replica.refusal(request("more", [1]))
    assert found is not None
    assert found.kind == "full"
    assert found.message == "8 requests wait already"
    for _ in range(30):
        replica.step()
    found = None
    k = 8
    while found is None:
        k += 1
        found = replica.refusal(request(f"r{k}", [k, 5], new=10))
    # one request takes 11 steps of a second, and a quarter of the queue is waited for
    assert found.retry_after is not None
    assert 8 < found.retry_after < 60
    replica.run()


def test_who_finds_a_free_place_does_not_wait() -> None:
    replica = Replica(limits(max_queue=0, max_num_seqs=3, num_blocks=16))
    for k in range(3):  # all of them between two steps
        assert replica.refusal(request(f"r{k}", [k, 5], new=2)) is None
    found = replica.refusal(request("more", [1]))
    assert found is not None
    assert found.kind == "full"
    replica.run()
    assert replica.refusal(request("later", [1])) is None
    replica.run()


def test_waiting_tokens_are_bounded_but_one_prompt_is_always_taken() -> None:
    replica = Replica(limits(max_waiting_tokens=20, max_num_seqs=1, num_blocks=40))
    replica.add(request("a", [1] * 50))
    found = replica.refusal(request("b", [2] * 5))
    assert found is not None
    assert found.kind == "full"
    assert found.message.startswith("50 prompt tokens wait already; with 5 more")
    replica.step()
    assert replica.refusal(request("c", [2] * 15)) is None
    assert replica.refusal(request("d", [2] * 6)) is not None
    replica.run()


# --- ends ---------------------------------------------------------------------------------------


def stopping(prompt: list[int], after: int) -> int:
    """The token that comes after so many others."""
    tokens = list(prompt)
    for _ in range(after):
        tokens.append(following(tokens))
    return following(tokens)


def test_how_requests_end() -> None:
    prompt = [1, 2, 3]
    stop = stopping(prompt, 4)
    first = [stopping(prompt, k) for k in range(4)]
    assert stop not in first
    replica = Replica(limits(max_model_len=20, num_blocks=100))
    replica.add(
        request("stop", prompt, new=10, stop=(stop,)),
        request("user", prompt, new=10, stop_tokens=(stop,), ignore_eos=True),
        request("eos", prompt, new=10, stop=(stop,), ignore_eos=True),
        request("least", prompt, new=10, stop=(stop,), min_new_tokens=5),
        request("context", prompt, new=500),
        request("one", prompt, new=1),
    )
    replica.run()
    ends = {id: (len(replica.tokens[id]), end.finish_reason) for id, end in replica.ended.items()}
    assert ends["stop"] == (4, "stop")
    assert replica.ended["stop"].stop_token == stop
    assert ends["user"] == (4, "stop")
    assert ends["eos"] == (10, "length")
    assert ends["least"][0] >= 5
    assert ends["context"] == (17, "length")
    assert ends["one"] == (1, "length")


def test_deadlines_count_from_arrival_wherever_a_request_is() -> None:
    replica = Replica(limits(max_num_seqs=2, num_blocks=100))
    replica.add(
        request("runs", [1] * 4, new=100, deadline=8.0),
        request("long", [2] * 4, new=30),
        request("waits", [3] * 4, deadline=5.0),
    )
    for _ in range(12):
        replica.step()
        replica.take(replica.scheduler.expire(replica.now))
    ends = {id: end.finish_reason for id, end in replica.ended.items()}
    assert ends == {"waits": "deadline", "runs": "deadline"}
    assert replica.tokens["runs"]
    assert replica.tokens["waits"] == []
    replica.run()


def test_an_aborted_request_keeps_its_blocks_while_they_are_in_use() -> None:
    replica = Replica(limits(depth=2, num_blocks=100))
    replica.add(request("a", [1] * 30, new=5))
    replica.plan()
    replica.plan()
    used = replica.scheduler.stats().blocks_used
    assert used == 8
    [end] = replica.take(replica.scheduler.abort("a"))
    assert end.finish_reason == "abort"
    assert replica.scheduler.abort("a") == []
    assert not replica.scheduler.idle
    assert replica.scheduler.stats().blocks_used == used
    assert replica.result() == []
    assert replica.scheduler.stats().blocks_used == used
    assert replica.result() == []
    assert replica.scheduler.stats().blocks_used == 0
    replica.check()


def test_an_aborted_name_can_be_used_again_at_once() -> None:
    scheduler = Scheduler(limits())
    replica = Replica(limits())
    replica.scheduler = scheduler
    replica.add(request("a", [1, 2, 3]))
    replica.plan()
    scheduler.abort("a")
    replica.add(request("a", [4, 5, 6]))
    replica.step()
    while not scheduler.idle:
        replica.step()
    right, _ = continuation([4, 5, 6], replica.asked["a"].sampling, 200)
    assert replica.tokens["a"] == right


def test_a_row_that_fails_ends_its_own_request_only() -> None:
    replica = Replica(limits())
    replica.add(request("a", [1, 2]), request("b", [3, 4]))
    replica.plan()
    result = replica.machine.finish()
    result.failed[0] = "the pattern allows no token"
    replica.take(replica.scheduler.apply(result, 1.0))
    assert replica.ended["a"].finish_reason == "error"
    assert replica.ended["a"].error == "the pattern allows no token"
    while not replica.scheduler.idle:
        replica.step()
    assert replica.ended["b"].finish_reason == "length"
    assert replica.scheduler.stats().blocks_used == 0


def test_results_come_in_the_order_of_their_plans() -> None:
    replica = Replica(limits(depth=2))
    replica.add(request("a", [1] * 40))
    replica.plan()
    replica.plan()
    replica.machine.finish()
    with pytest.raises(AssertionError):
        replica.scheduler.apply(replica.machine.finish(), 0.0)


# --- nothing is left behind ---------------------------------------------------------------------


def sizes(scheduler: Scheduler) -> dict[str, int]:
    """Entries of everything that grows."""
    memory, waiting = scheduler._memory, scheduler._waiting
    return {
        "ids": len(scheduler._by_id),
        "deadlines": len(scheduler._deadlines),
        "turns": len(waiting._heap),
        "digests": len(memory.pool._found),
        "kept": memory.pool.kept,
        "released": len(memory.released),
        "again": len(memory.again),
    }


def test_requests_that_come_and_go_leave_nothing() -> None:
    replica = Replica(limits(max_num_seqs=1, num_blocks=20))
    scheduler = replica.scheduler
    replica.add(request("blocks", [1], new=70))
    replica.step()
    for k in range(3000):
        scheduler.add(request(f"r{k}", [k % 90], user=f"u{k}", deadline=1e9), 0.0)
        scheduler.abort(f"r{k}")
    found = sizes(scheduler)
    assert found["ids"] == 1
    assert max(found.values()) <= 40, found
    while not scheduler.idle:
        replica.step()
    assert replica.ended["blocks"].finish_reason == "length"


def test_users_are_forgotten_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hocket.serving.scheduling.waiting.REMEMBERED", 10)
    replica = Replica(limits())
    for k in range(100):
        replica.add(request(f"r{k}", [k % 90], user=f"u{k}", new=1))
        replica.step()
    replica.run()
    assert len(replica.scheduler._waiting._users) <= 10


def test_long_use_keeps_to_the_cache() -> None:
    replica = Replica(limits(num_blocks=24, max_num_batched_tokens=64))
    for k in range(60):
        replica.add(request(f"r{k}", [k % 90, k % 7, *range(20)], new=6))
        replica.step()
    replica.run()
    assert sizes(replica.scheduler)["digests"] <= 24


def test_recursion_and_size_of_a_large_prompt() -> None:
    bounds = SchedulerLimits(
        num_blocks=5000,
        block_size=16,
        max_num_seqs=4,
        max_num_batched_tokens=4096,
        max_model_len=70000,
    )
    scheduler = Scheduler(bounds)
    scheduler.add(request("a", range(65536), new=1), 0.0)
    plan = scheduler.plan(0.0)
    assert plan is not None
    assert len(plan.rows[0].new_blocks) == 4096
    assert sys.getsizeof(plan.encode()) < 4 * (4096 + 4096) + 400
