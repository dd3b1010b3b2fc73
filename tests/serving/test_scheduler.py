"""The scheduler against workers that hold every plan to the rules, under whatever load."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.serving.request import Output, Request, RequestRefused, SamplingParams
from hocket.serving.scheduling.limits import SchedulerLimits
from hocket.serving.scheduling.scheduler import Scheduler
from hocket.serving.scheduling.step import NONE, StepPlan
from tests.serving.token_machine import (
    VOCABULARY,
    TokenMachine,
    continuation,
    following,
    logprob,
)

LONGEST = 40


def limits(**given: Any) -> SchedulerLimits:
    fields: dict[str, Any] = {
        "num_blocks": 64, "block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 16,
        "max_model_len": 200, "vocab_size": VOCABULARY,
    }  # fmt: skip
    return SchedulerLimits(**{**fields, **given})


def request(id: str, tokens: Any, *, new: int = 4, **given: Any) -> Request:
    """A request; names of SamplingParams's fields go there."""
    own = {f.name for f in dataclasses.fields(Request)}
    asked = {name: value for name, value in given.items() if name not in own}
    rest = {name: value for name, value in given.items() if name in own}
    sampling = SamplingParams(max_new_tokens=new, **asked)
    return Request(id=id, tokens=tuple(tokens), sampling=sampling, **rest)


class Replica:
    """A scheduler and its workers; plans stay in flight until `result` or `run`."""

    def __init__(self, bounds: SchedulerLimits, secret: bytes | None = None) -> None:
        self.limits = bounds
        self.scheduler = Scheduler(bounds, secret=secret)
        self.machine = TokenMachine(bounds)
        self.plans: list[StepPlan] = []
        self.asked: dict[str, Request] = {}
        self.tokens: dict[str, list[int]] = defaultdict(list)
        self.prompt: dict[str, list[Any]] = defaultdict(list)
        self.ended: dict[str, Output] = {}
        self.now = 0.0

    def add(self, *requests: Request) -> None:
        for one in requests:
            self.scheduler.add(one, self.now)
            self.asked[one.id] = one

    def refusal(self, one: Request) -> RequestRefused | None:
        """Why a request is not taken; None where it is."""
        try:
            self.add(one)
        except RequestRefused as refused:
            return refused
        return None

    def plan(self) -> StepPlan | None:
        self.now += 1.0
        plan = self.scheduler.plan(self.now)
        if plan is not None:
            self.machine.receive(plan)
            self.plans.append(plan)
        return plan

    def result(self) -> list[Output]:
        return self.take(self.scheduler.apply(self.machine.finish(), self.now))

    def take(self, outputs: list[Output]) -> list[Output]:
        for output in outputs:
            assert output.id not in self.ended, "nothing comes after the end"
            self.tokens[output.id] += output.tokens
            self.prompt[output.id] += output.prompt_logprobs or []
            if self.asked[output.id].sampling.logprobs is not None:
                logprobs = [] if output.logprobs is None else output.logprobs
                assert [one.token for one in logprobs] == output.tokens
            if output.finish_reason is not None:
                self.ended[output.id] = output
        return outputs

    def step(self) -> StepPlan | None:
        """Fill what may be in flight, then take the oldest result; the first plan made."""
        first = self.plan()
        while self.plan() is not None:
            pass
        if self.scheduler.outstanding:
            self.result()
        return first

    def run(self, most: int = 2000) -> None:
        """Until nothing is left to do."""
        for _ in range(most):
            if self.scheduler.idle:
                break
            self.step()
        assert self.scheduler.idle, "every request ends"
        self.check()

    def check(self) -> None:
        """Everything was answered as it should be, and everything was given back."""
        for id, asked in self.asked.items():
            right, why = continuation(
                asked.tokens, asked.sampling, self.limits.max_model_len, asked.index
            )
            end = self.ended[id]
            if end.finish_reason in ("abort", "deadline"):
                assert self.tokens[id] == right[: len(self.tokens[id])]
                continue
            assert (self.tokens[id], end.finish_reason) == (right, why)
            assert (end.stop_token is None) == (why == "length")
            if asked.sampling.prompt_logprobs is not None:
                assert [(one.token, one.logprob) for one in self.prompt[id]] == [
                    (token, logprob(asked.tokens[: k + 1], token))
                    for k, token in enumerate(asked.tokens[1:])
                ]
        stats = self.scheduler.stats()
        assert (stats.running, stats.waiting, stats.waiting_tokens, stats.users) == (0, 0, 0, 0)
        assert stats.blocks_used == stats.in_flight == 0
        assert stats.finished == len(self.asked) == sum(stats.finished_by.values())
        memory = self.scheduler._memory
        assert memory.pool.free == self.limits.num_blocks
        assert sorted(memory.slots) == list(range(self.limits.max_num_seqs))
        assert set(self.machine.tables) <= set(memory.released)
        assert memory.coming == 0
        assert not {*memory.ready, *memory.prefilling, *memory.again}


@st.composite
def loads(
    draw: st.DrawFn,
) -> tuple[SchedulerLimits, list[tuple[int, Request, int | None]], list[int]]:
    """Limits; requests with the step they come at and the step they are aborted at; and how many
    results are taken after each step."""
    depth, lookahead = draw(
        st.sampled_from([(1, False), (2, False), (3, False), (4, False), (2, True), (2, True)])
    )
    bounds = SchedulerLimits(
        num_blocks=draw(st.integers(6, 30)),
        block_size=draw(st.sampled_from([1, 2, 4])),
        max_num_seqs=draw(st.integers(1, 6)),
        max_num_batched_tokens=draw(st.sampled_from([1, 2, 3, 8, 16, 64])),
        max_model_len=LONGEST,
        depth=depth,
        lookahead=lookahead,
        max_queue=draw(st.integers(1, 20)),
        max_waiting_tokens=draw(st.integers(1, 300)),
        max_logit_rows=draw(st.integers(1, 8)),
        prefix_cache=draw(st.booleans()),
        vocab_size=VOCABULARY,
    )
    asked = []
    for k in range(draw(st.integers(1, 14))):
        shared = draw(st.integers(0, 20))
        own = draw(st.lists(st.integers(0, 3), min_size=0 if shared else 1, max_size=8))
        logprobs = draw(st.sampled_from([None, None, 0]))
        new = draw(st.sampled_from([1, 2, 5, 12, 30] if logprobs is None else [0, 1, 5]))
        one = request(
            f"r{k}",
            [draw(st.integers(0, 1))] * shared + own,
            new=new,
            min_new_tokens=draw(st.integers(0, min(new, 4))),
            prompt_logprobs=logprobs,
            logprobs=draw(st.sampled_from([None, 0])),
            seed=draw(st.integers(0, 2)),
            stop=(1, 2, 3),
            stop_tokens=(4,),
            ignore_eos=draw(st.booleans()),
            user=draw(st.sampled_from("abc")),
            salt=draw(st.sampled_from(["", "", "x"])),
            deadline=draw(st.none() | st.none() | st.floats(1, 60)),
        )
        abort = draw(st.none() | st.none() | st.integers(0, 60))
        asked.append((draw(st.integers(0, 40)), one, abort))
    return bounds, asked, draw(st.lists(st.integers(0, 4), min_size=1, max_size=8))


def drive(
    load: tuple[SchedulerLimits, list[tuple[int, Request, int | None]], list[int]], secret: bytes
) -> Replica:
    bounds, asked, taken = load
    replica = Replica(bounds, secret)
    scheduler = replica.scheduler
    for step in range(3000):
        for when, one, _ in asked:
            if when == step:
                why = replica.refusal(one)
                assert why is None or why.kind in ("never_fits", "full")
                assert why is None or (why.retry_after is None) == (why.kind == "never_fits")
        for _, one, abort in asked:
            if abort == step:
                aborted = scheduler.abort(one.id)
                assert [o.finish_reason for o in aborted] in ([], ["abort"])
                replica.take(aborted)
        replica.take(scheduler.expire(replica.now))
        stats = scheduler.stats()
        assert stats.waiting <= bounds.max_queue + bounds.max_num_seqs
        assert stats.running <= bounds.max_num_seqs
        made = replica.plan()
        for _ in range(taken[step % len(taken)] if made is not None else bounds.depth):
            if scheduler.outstanding:
                replica.result()
        if step > 60 and scheduler.idle:
            replica.check()
            return replica
    raise AssertionError("it does not end")


@given(loads())
@settings(max_examples=150)
def test_every_plan_keeps_the_rules_and_every_request_ends_right(load: Any) -> None:
    drive(load, b"one")


@given(loads())
@settings(max_examples=15)
def test_plans_depend_on_requests_alone(load: Any) -> None:
    one, two = drive(load, b"one"), drive(load, b"two")
    assert [p.encode() for p in one.plans] == [p.encode() for p in two.plans]
    assert one.ended == two.ended


# --- lookahead ----------------------------------------------------------------------------------


def test_decoding_goes_on_while_the_result_before_is_in_flight() -> None:
    """One plan is always under way while the next one is made; the last token, which ends the
    request, costs one row that is dropped."""
    replica = Replica(limits(depth=2, lookahead=True))
    replica.add(request("a", [5, 6, 7], new=6, ignore_eos=True), request("b", [9], new=3))
    made = [replica.plan(), replica.plan()]
    assert [None if plan is None else plan.tokens for plan in made] == [[9, 5, 6, 7], [-1, -1]]
    assert replica.plan() is None, "no more than the depth"
    steps = 0
    while not replica.scheduler.idle:
        replica.result()
        steps += replica.plan() is not None
    replica.check()
    assert replica.machine.unknown == 5 + 2
    assert steps == 4  # six tokens are six plans: length is known before


def test_a_stop_token_that_comes_late_costs_one_row() -> None:
    prompt = next(
        [k] for k in range(40)
        if following([k]) not in (1, 2) and following([k, following([k])]) in range(50)
    )  # fmt: skip
    second = following([*prompt, following(prompt)])
    replica = Replica(limits(depth=2, lookahead=True))
    replica.add(request("a", prompt, new=9, stop=(second,), seed=0))
    rows = 0
    while not replica.scheduler.idle:
        while replica.plan() is not None:
            rows += 1
        replica.result()
    replica.check()
    assert replica.tokens["a"] == [following(prompt)]
    assert rows == 3  # the prompt, its first token, and one that was dropped


def test_a_structure_is_not_looked_ahead_of() -> None:
    replica = Replica(limits(depth=2, lookahead=True))
    replica.add(request("a", [5], new=4, structure='{"type": "object"}'))
    assert replica.plan() is not None
    assert replica.plan() is None, "its mask follows from a token that the host does not know"
    while not replica.scheduler.idle:
        replica.result()
        replica.plan()
    replica.check()
    assert replica.machine.unknown == 0


def test_answers_are_shared_with_lookahead_too() -> None:
    """Blocks whose last token was unknown when they were planned are found all the same."""
    replica = Replica(limits(depth=2, lookahead=True))
    replica.add(request("a", range(6), new=13, ignore_eos=True))
    replica.run()
    whole = [*range(6), *replica.tokens["a"]]
    replica.add(request("b", whole, new=1))
    replica.run()
    assert replica.scheduler.stats().prefix_hits == 16


# --- preemption ---------------------------------------------------------------------------------


def test_the_latest_gives_way_and_is_computed_again() -> None:
    replica = Replica(limits(num_blocks=12, max_num_seqs=4, prefix_cache=False))
    replica.add(*(request(f"r{k}", [k] * 8, new=24) for k in range(4)))
    replica.run()
    stats = replica.scheduler.stats()
    assert stats.preempted > 0
    assert stats.recomputed_tokens > 0
    assert stats.generated_tokens == 4 * 24
    assert list(replica.ended) == ["r0", "r1", "r2", "r3"]
    slot_of_first = replica.plans[0].admitted[0].slot
    again = [one.slot for plan in replica.plans[1:] for one in plan.admitted]
    assert slot_of_first not in again[: again.index(slot_of_first)] if slot_of_first in again else 1
    assert replica.plans[-1].rows[0].start == 8 + 24 - 2  # the last token is never computed


def test_what_is_recomputed_is_found_in_the_cache_where_it_still_is() -> None:
    replica = Replica(limits(num_blocks=13, max_num_seqs=2, max_model_len=50))
    replica.add(request("a", range(8), new=30), request("b", range(20, 28), new=30))
    replica.run()
    stats = replica.scheduler.stats()
    assert stats.preempted >= 1
    assert stats.prompt_tokens < 16 + 40


def test_preempted_while_in_flight() -> None:
    for depth in (2, 3, 4):
        replica = Replica(limits(num_blocks=14, max_num_seqs=6, depth=depth, prefix_cache=False))
        replica.add(*(request(f"r{k}", [k] * 8, new=20) for k in range(6)))
        replica.run()
        assert replica.scheduler.stats().preempted > 0


def test_penalties_get_their_history_again() -> None:
    replica = Replica(limits(num_blocks=10, max_num_seqs=3, prefix_cache=False))
    replica.add(*(request(f"r{k}", [k] * 8, new=20, repetition_penalty=1.5) for k in range(2)))
    replica.add(request("p", [7] * 8, new=20, presence_penalty=0.5))
    replica.run()
    assert replica.scheduler.stats().preempted > 0
    admitted = [one for plan in replica.plans for one in plan.admitted]
    assert len(admitted) > 3
    for one in admitted:
        wants = one.sampling.repetition_penalty != 1
        assert len(one.prompt) == (8 if wants else 0)
    assert any(one.generated for one in admitted)


# --- several plans in flight --------------------------------------------------------------------


def test_decoding_rows_are_spread_evenly_over_the_plans_in_flight() -> None:
    replica = Replica(limits(depth=4, max_num_batched_tokens=64, num_blocks=400))
    replica.add(*(request(f"r{k}", [k] * 4, new=40) for k in range(8)))
    for _ in range(12):
        replica.step()
    counts = [len(plan.rows) for plan in replica.plans[-12:]]
    assert counts == [2] * 12
    one = Replica(limits(depth=4))
    one.add(request("a", [1] * 4, new=9))
    one.plan()
    assert one.plan() is None  # its token is not known yet


def test_plans_of_much_that_waits_are_equal_and_no_larger_for_what_is_left() -> None:
    """A stage waits for the larger of two plans in a row: in all, for what the sizes differ by."""
    wide = limits(
        depth=2, max_num_batched_tokens=4096, num_blocks=4000, max_model_len=4000, max_num_seqs=64
    )
    replica = Replica(wide)
    replica.add(request("first", [k % 97 for k in range(96)], new=2))
    replica.plan()
    for k in range(1, 32):
        replica.add(request(f"r{k}", [(k + j) % 97 for j in range(96)], new=2))
    replica.run()
    read = [sum(row.count for row in p.rows if row.count > 1) for p in replica.plans]
    assert [count for count in read if count] == [96, 331, 331, 331, 331, 331, 331, 330, 330, 330]


SIZES = [
    (2, 32, [152, 152, 151]),
    (4, 32, [76] * 5 + [75]),
    (2, 256, [455]),
    (4, 256, [228, 227]),
    (4, 4096, [455]),
]


@pytest.mark.parametrize(("depth", "plan_tokens", "sizes"), SIZES)
def test_what_a_plan_costs_and_the_stages_say_how_large_plans_are(
    depth: int, plan_tokens: int, sizes: list[int]
) -> None:
    given = limits(
        depth=depth, plan_tokens=plan_tokens, max_num_batched_tokens=512, num_blocks=400,
        max_model_len=1000,
    )  # fmt: skip
    replica = Replica(given)
    replica.add(request("a", [k % 97 for k in range(455)], new=2))
    replica.run()
    assert [len(p.tokens) for p in replica.plans][:-1] == sizes


def test_chunks_of_one_prompt_are_in_flight_together() -> None:
    replica = Replica(
        limits(depth=4, max_num_batched_tokens=128, num_blocks=400, max_model_len=1000)
    )
    replica.add(request("a", [k % 97 for k in range(900)], new=2))
    plans = [replica.plan() for _ in range(4)]
    assert [(p.rows[0].start, p.rows[0].count) for p in plans if p] == [
        (0, 100), (100, 100), (200, 100), (300, 100),
    ]  # fmt: skip
    assert all(p.rows[0].logits == NONE for p in plans if p)
    assert replica.plan() is None
    replica.run()


def test_a_short_prompt_is_cut_so_that_every_stage_has_work() -> None:
    replica = Replica(
        limits(depth=4, max_num_batched_tokens=512, num_blocks=400, max_model_len=1000)
    )
    replica.add(request("a", [k % 97 for k in range(400)], new=2))
    plans = [replica.plan() for _ in range(4)]
    assert [p.rows[0].count for p in plans if p] == [67] * 4
    replica.run()
    alone = Replica(limits(depth=1, max_num_batched_tokens=512, num_blocks=400, max_model_len=1000))
    alone.add(request("a", [k % 97 for k in range(400)], new=2))
    plan = alone.plan()
    assert plan is not None
    assert plan.rows[0].count == 400


# --- shared prefixes ----------------------------------------------------------------------------


def test_equal_beginnings_are_computed_once() -> None:
    replica = Replica(limits())
    replica.add(request("a", range(10)))
    replica.run()
    replica.add(request("b", range(10)))
    replica.run()
    assert replica.ended["b"].cached == 8
    replica.add(request("c", range(8)))  # the block of the last token is computed again
    replica.run()
    assert replica.ended["c"].cached == 4
    stats = replica.scheduler.stats()
    assert (stats.prefix_queries, stats.prefix_hits) == (28, 12)
    replica.add(request("d", range(10), salt="other"))
    replica.run()
    assert replica.ended["d"].cached == 0


def test_answers_are_shared_too() -> None:
    replica = Replica(limits())
    replica.add(request("a", range(10), new=10))
    replica.run()
    replica.add(request("b", [*range(10), *replica.tokens["a"], 5]))
    replica.run()
    assert replica.ended["b"].cached == 16  # of 19 that were computed, whole blocks


def test_equal_prompts_at_once_wait_for_the_first() -> None:
    prompt = [k % 7 for k in range(60)]
    for depth in (1, 3):
        replica = Replica(limits(num_blocks=200, depth=depth))
        replica.add(*(request(f"r{k}", prompt, index=k, seed=9) for k in range(6)))
        replica.run()
        assert replica.scheduler.stats().prompt_tokens == 60 + 5 * 4
        assert len({tuple(tokens) for tokens in replica.tokens.values()}) == 6


def test_nothing_waits_for_one_that_never_comes() -> None:
    replica = Replica(limits(num_blocks=200, max_num_batched_tokens=2, max_num_seqs=4))
    replica.add(request("a", [1] * 100), request("b", [1] * 100))
    replica.plan()
    replica.take(replica.scheduler.abort("a"))
    replica.result()
    replica.run()
    assert replica.ended["b"].finish_reason == "length"


def test_what_was_used_last_is_kept_longest() -> None:
    replica = Replica(limits(num_blocks=12))
    for id, first in (("a", 0), ("b", 20), ("a2", 0), ("c", 40), ("d", 60)):
        replica.add(request(id, range(first, first + 16), new=1))
        replica.run()
    replica.add(request("a3", range(16), new=1))
    replica.run()
    replica.add(request("b2", range(20, 36), new=1))
    replica.run()
    assert replica.ended["a3"].cached == 12
    assert replica.ended["b2"].cached == 0


def test_without_the_prefix_cache_nothing_is_shared() -> None:
    replica = Replica(limits(prefix_cache=False))
    for id in "ab":
        replica.add(request(id, range(10)))
        replica.run()
    assert replica.scheduler.stats().prefix_hits == 0
    assert replica.scheduler.stats().prefix_queries == 0


# --- log-probabilities --------------------------------------------------------------------------


def test_log_probabilities_of_prompts_come_in_bounded_parts() -> None:
    replica = Replica(limits(max_logit_rows=5, max_num_batched_tokens=32))
    replica.add(request("warm", range(30)))
    replica.run()
    replica.add(request("a", range(30), new=0, prompt_logprobs=2))
    replica.add(request("b", range(12), new=3, prompt_logprobs=0))
    replica.add(request("c", [9], new=2, prompt_logprobs=0))
    replica.run()
    assert replica.ended["a"].cached == 0
    assert replica.tokens["a"] == []
    assert len(replica.prompt["a"]) == 29
    assert replica.prompt["c"] == []
    assert replica.machine.largest["logits"] <= 5 + 3


def test_what_was_sent_before_a_preemption_is_not_sent_again() -> None:
    replica = Replica(
        limits(num_blocks=12, max_num_batched_tokens=6, max_logit_rows=2, max_num_seqs=3)
    )
    replica.add(request("a", range(16), new=24))
    replica.add(request("b", range(50, 70), new=20, prompt_logprobs=0))
    replica.run()
    assert replica.scheduler.stats().preempted > 0
    assert len(replica.prompt["b"]) == 19
