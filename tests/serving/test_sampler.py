"""The sampler: its processors against transformers', its plans, and split vocabularies."""

from __future__ import annotations

import math
from typing import Any

import pytest

from hocket.serving.request import SamplingParams
from hocket.serving.scheduling.admission import Admission
from hocket.serving.scheduling.step import LAST, NONE, BatchRow, StepPlan
from tests.serving import sampler_cases as cases

V = 3000

KIND = "host"


@pytest.fixture(autouse=True, params=["host", "device"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The sampler of a CPU, and that of a device, whose tensors here are on the CPU: whatever a
    test says holds for both."""
    monkeypatch.setattr("tests.serving.test_sampler.KIND", request.param)
    return str(request.param)


def a_sampler(vocabulary: int = V, rows: int = 64, **more: Any) -> Any:
    from hocket.runtime.mesh import Axis
    from hocket.runtime.record import Recorder
    from hocket.serving.engine.device_sampler import DeviceSampler
    from hocket.serving.engine.sampler import Sampler
    from hocket.serving.engine.vocabulary import Vocabulary

    made: Any = Sampler if KIND == "host" else DeviceSampler
    return made(Vocabulary(axis=Axis("tp")), vocabulary, "cpu", Recorder(), rows, **more)


def chosen(sampler: Any, logits: Any, slots: list[int], length: int) -> list[int]:
    result = sampler.sample(logits, cases.decode_plan(0, slots, length))
    assert not result.failed
    return result.tokens


@pytest.mark.torch
def test_processors_are_those_of_transformers() -> None:
    """Bias, repetition penalty and barred stop tokens, alone and together, against the list that
    transformers would make; the scores themselves."""
    import torch
    from transformers import (
        LogitsProcessorList,
        MinNewTokensLengthLogitsProcessor,
        RepetitionPenaltyLogitsProcessor,
        SequenceBiasLogitsProcessor,
    )

    bias = ((3, 100.0), (17, -4.5), (V - 1, 0.25))
    generated = (5, 9, 5, 5, 2999, 17)
    ids = torch.tensor([[*cases.PROMPT, *generated]])
    processors = {
        "logit_bias": (bias, SequenceBiasLogitsProcessor([[[t], b] for t, b in bias])),
        "repetition_penalty": (1.7, RepetitionPenaltyLogitsProcessor(1.7)),
        "min_new_tokens": (
            20,
            MinNewTokensLengthLogitsProcessor(len(cases.PROMPT), 20, [4, 17, 2000]),
        ),
    }
    logits = cases.logits_of(1, V, 3)
    for names in (*((name,) for name in processors), tuple(processors)):
        wanted = LogitsProcessorList([processors[name][1] for name in names])(ids, logits)
        options = {name: processors[name][0] for name in names}
        found = edited(logits, generated, stop=(4, 17, 2000), **options)
        assert torch.equal(found, wanted), names


def edited(logits: Any, generated: tuple[int, ...], **options: Any) -> Any:
    """What the sampler makes of one row of logits."""
    from hocket.serving.engine.asked import TokenRequest
    from hocket.serving.engine.sampling_step import SamplingStep

    sampler = a_sampler()
    sampling = SamplingParams(max_new_tokens=100, **options)
    admission = Admission(
        slot=2, sampling=sampling, prompt_length=len(cases.PROMPT),
        prompt=cases.PROMPT, generated=generated,
    )  # fmt: skip
    sampler.begin(StepPlan(0, [], [], [admission]))
    position = len(cases.PROMPT) + len(generated)
    asked = TokenRequest(0, 0, 2, sampler._slots[2], position)
    rows = logits.clone()
    if KIND == "device":
        part = sampler._sliced([asked])
        step = SamplingStep([asked], [part], [], sampler._staging, samples=True)
        sampler._edit(rows, part, step, 0, 0)
    elif asked.edited:
        sampler._edit(rows, [asked], [0])
    return rows


@pytest.mark.torch
def test_presence_and_frequency_penalties_count_the_answer_only() -> None:
    import torch

    logits = cases.logits_of(1, V, 4)
    generated = (5, 9, 5, 5, 2999)  # 5 and 9 are in the prompt too
    found = edited(logits, generated, presence_penalty=0.5, frequency_penalty=0.25)
    wanted = logits.clone()
    for token, times in {5: 3, 9: 1, 2999: 1}.items():
        wanted[0, token] -= 0.5 + 0.25 * times
    assert torch.allclose(found, wanted, atol=1e-6)
    changed = (found != logits).nonzero()[:, 1].tolist()
    assert changed == [5, 9, 2999]
    assert torch.equal(edited(logits, (), presence_penalty=2.0), logits)


@pytest.mark.torch
def test_penalties_follow_the_tokens_and_survive_preemption() -> None:
    """Step by step, and taken up again in the middle with what was said so far."""
    import torch
    from transformers import RepetitionPenaltyLogitsProcessor

    options = {"repetition_penalty": 1.8, "frequency_penalty": 0.7, "presence_penalty": 0.2}
    sampler, resumed = a_sampler(), a_sampler()
    settings = cases.admissions([options, {}, options])
    for admission in settings:
        sampler.admit(admission)
    said: list[int] = []
    other: list[int] = []
    for step in range(150):
        # few tokens, so that they come again
        logits = cases.logits_of(3, V, step)
        logits[:, 100:] -= 8
        length = len(cases.PROMPT) + step
        ids = torch.tensor([[*cases.PROMPT, *said]])
        wanted = RepetitionPenaltyLogitsProcessor(1.8)(ids, logits[2:])
        for token in set(said):
            wanted[0, token] -= 0.2 + 0.7 * said.count(token)
        if step == 70:
            sampler.release(2)
            sampler.admit(Admission(
                slot=2, sampling=SamplingParams(**options), prompt_length=len(cases.PROMPT),
                prompt=cases.PROMPT, generated=tuple(said),
            ))  # fmt: skip
            resumed.admit(Admission(
                slot=9, sampling=SamplingParams(**options), prompt_length=len(cases.PROMPT),
                prompt=cases.PROMPT, generated=tuple(other),
            ))  # fmt: skip
        found = chosen(sampler, logits, [0, 1, 2], length)
        assert found[2] == int(wanted.argmax())
        said.append(found[2])
        if step >= 70:
            assert chosen(resumed, logits[:1], [9], length) == [found[0]]
        other.append(found[0])
    assert len(set(said)) > 64  # the history has grown
    assert max(said.count(token) for token in said) > 1


@pytest.mark.torch
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_plain_greedy_rows_are_argmax(dtype: str) -> None:
    import torch

    for vocabulary in (3, 100, V):
        logits = cases.logits_of(64, vocabulary, 1, dtype)
        before = logits.clone()
        sampler = a_sampler(vocabulary)
        for admission in cases.admissions([{}] * 64):
            sampler.admit(admission)
        wanted = logits.float().sort(dim=-1, descending=True, stable=True).indices[:, 0].tolist()
        assert chosen(sampler, logits, list(range(64)), 40) == wanted
        some = [5, 9, 60]
        assert chosen(sampler, logits[some], some, 40) == [wanted[i] for i in some]
        assert torch.equal(logits, before)


@pytest.mark.torch
def test_a_request_is_sampled_identically_alone_and_among_63_others() -> None:
    import torch

    generator = torch.Generator().manual_seed(1)
    options = [cases.MIXED[i % len(cases.MIXED)] for i in range(64)]
    settings = cases.admissions(options)
    logits = cases.logits_of(64, V, 2)
    kept = logits.clone()
    alone = []
    for i, admission in enumerate(settings):
        sampler = a_sampler()
        sampler.admit(admission)
        alone.append(cases.plain(sampler.sample(logits[i : i + 1], cases.decode_plan(0, [i], 60))))
    for _ in range(2):
        order = torch.randperm(64, generator=generator).tolist()
        sampler = a_sampler()
        for i in order:
            sampler.admit(settings[i])
        result = sampler.sample(logits[order], cases.decode_plan(0, order, 60))
        assert not result.failed
        for place, i in enumerate(order):
            assert result.tokens[place] == alone[i][1][0]
            mine = [result.logprobs[place].to_json()] if place in result.logprobs else []
            assert mine == [one for _, one in alone[i][2]]
    assert torch.equal(logits, kept)


@pytest.mark.torch
def test_seed_index_and_position_each_change_the_draws_and_nothing_else_does() -> None:
    logits = cases.logits_of(1, V, 2) * 0

    def draws(slot: int, seed: int, index: int, start: int) -> list[int]:
        sampler = a_sampler()
        sampling = SamplingParams(temperature=1.0, seed=seed)
        sampler.admit(Admission(slot=slot, sampling=sampling, index=index, prompt_length=10))
        return [chosen(sampler, logits, [slot], start + i)[0] for i in range(5)]

    first = draws(0, 1, 0, 20)
    assert len(set(first)) > 1
    assert first == draws(31, 1, 0, 20)
    assert first[1:] == draws(0, 1, 0, 21)[:-1]
    assert first != draws(0, 2, 0, 20)
    assert first != draws(0, 1, 1, 20)


@pytest.mark.torch
def test_stop_tokens_come_from_the_position_of_the_least_tokens_on() -> None:
    sampler = a_sampler(100)
    options = {"min_new_tokens": 3, "stop": (7,), "stop_tokens": (8,)}
    for admission in cases.admissions([options, {**options, "ignore_eos": True}]):
        sampler.admit(admission)
    logits = cases.logits_of(2, 100, 3) - 50
    logits[:, 7], logits[:, 8] = 50, 40
    for length in range(len(cases.PROMPT), len(cases.PROMPT) + 3):
        found = chosen(sampler, logits, [0, 1], length)
        assert found[0] not in (7, 8)
        assert found[1] == 7  # does not end it: it may come
    assert chosen(sampler, logits, [0, 1], len(cases.PROMPT) + 3) == [7, 7]


@pytest.mark.torch
def test_log_probabilities_are_those_of_log_softmax_of_the_raw_logits() -> None:
    sampler = a_sampler()
    count = 6
    options = {"logit_bias": ((11, 100.0),), "repetition_penalty": 1.5, "temperature": 2.0}
    settings = [{"logprobs": n, **(options if n % 2 else {})} for n in (0, 1, 2, 5, 20, 3)]
    for admission in cases.admissions(settings):
        sampler.admit(admission)
    logits = cases.logits_of(count, V, 8)
    logits[4, 10:] = -math.inf
    result = sampler.sample(logits, cases.decode_plan(0, list(range(count)), 50))
    wanted = logits.double().log_softmax(-1)
    for place, options in enumerate(settings):
        one = result.logprobs[place]
        assert one.token == result.tokens[place]
        assert one.logprob == pytest.approx(float(wanted[place, one.token]), abs=2e-6)
        order = logits[place].sort(descending=True, stable=True).indices[: options["logprobs"]]
        assert [token for token, _ in one.top] == order.tolist()
        assert [p for _, p in one.top] == pytest.approx(wanted[place, order].tolist(), abs=2e-6)
    assert result.logprobs[1].token == 11  # chosen for its bias, told without


@pytest.mark.torch
def test_prompt_log_probabilities_are_reported_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    from hocket.serving.engine import device_sampler, logprobs

    monkeypatch.setattr(device_sampler, "_SLICE_BYTES", 2**21)  # a GPU takes more at once

    most = 0
    summary = logprobs.logits_summary

    def measured(logits: Any, *more: Any) -> Any:
        nonlocal most
        most = max(most, logits.numel() * 4)
        return summary(logits, *more)

    monkeypatch.setattr(logprobs, "logits_summary", measured)
    for dtype in ("float32", "bfloat16"):
        sampler = a_sampler(50_000)
        settings = [{}, {"prompt_logprobs": 3}, {"prompt_logprobs": 0}, {}]
        for admission in cases.admissions(settings):
            sampler.admit(admission)
        rows = [
            BatchRow(0, 50, 1, LAST),
            BatchRow(1, 0, 30, 2, next_token=9),
            BatchRow(2, 5, 4, 2),
            BatchRow(3, 0, 3, NONE),
        ]
        tokens = [8, *range(20, 50), *range(60, 64), 1, 2, 3]
        plan = StepPlan(4, rows, tokens)
        assert plan.num_logits == 35
        logits = cases.logits_of(35, 50_000, 9, dtype)
        result = sampler.sample(logits, plan)
        wanted = logits.double().log_softmax(-1)
        assert result.tokens == [int(logits[0].argmax()), int(logits[34].argmax())]
        assert sorted(result.prompt_logprobs) == [1, 2]
        assert result.logprobs == {}
        first, second = result.prompt_logprobs[1], result.prompt_logprobs[2]
        assert [one.token for one in first] == [*range(21, 50), 9]
        assert [one.token for one in second] == [61, 62, 63]
        for i, one in enumerate([*first, *second]):
            assert one.logprob == pytest.approx(float(wanted[1 + i, one.token]), abs=2e-6)
            assert len(one.top) == (3 if i < 30 else 0)
            tops = [p for _, p in one.top]
            assert tops == pytest.approx(wanted[1 + i].topk(len(tops)).values.tolist(), abs=2e-6)
    assert 0 < most <= 2**21


@pytest.mark.torch
def test_logits_that_are_no_numbers_fail_their_request_and_no_other() -> None:
    sampler = a_sampler()
    settings = [*cases.MIXED, {}, {"logprobs": 2}, {"prompt_logprobs": 2}]
    for admission in cases.admissions(settings):
        sampler.admit(admission)
    slots = list(range(len(settings)))
    logits = cases.logits_of(len(settings), V, 5)
    good = sampler.sample(logits.clone(), cases.decode_plan(0, slots, 60))
    assert not good.failed
    for bad in (math.nan, math.inf, -math.inf):
        for row in range(len(settings)):
            fresh = a_sampler()
            for admission in cases.admissions(settings):
                fresh.admit(admission)
            ruined = logits.clone()
            ruined[row, 123 if bad != -math.inf else slice(None)] = bad
            result = fresh.sample(ruined, cases.decode_plan(0, slots, 60))
            assert list(result.failed) == [row]
            assert "60" in result.failed[row]
            assert row not in result.logprobs
            others = [place for place in slots if place != row]
            assert [result.tokens[i] for i in others] == [good.tokens[i] for i in others]
            assert {**good.logprobs, row: None} == {**result.logprobs, row: None}
            result.encode()
    # what has failed stays so until it is released
    assert list(fresh.sample(logits, cases.decode_plan(0, slots, 61)).failed) == [row]
    fresh.admit(cases.admissions(settings)[row])
    assert not fresh.sample(logits, cases.decode_plan(0, slots, 61)).failed


@pytest.mark.torch
def test_prompt_log_probabilities_of_no_numbers_are_reported_as_minus_infinity() -> None:
    sampler = a_sampler(100)
    sampler.begin(
        cases.decode_plan(0, (), 0, admitted=cases.admissions([{"prompt_logprobs": 2}] * 22))
    )
    plan = cases.prompt_plan(4, 20, 1)
    logits = cases.logits_of(plan.num_logits, 100, 9)
    logits[3, 50] = math.nan
    result = sampler.sample(logits, plan)
    assert result.prompt_logprobs[1][2].logprob == -math.inf
    assert not math.isinf(result.prompt_logprobs[1][1].logprob)
    assert not result.failed


@pytest.mark.torch
def test_a_bias_for_a_token_that_is_not_fails_the_request() -> None:
    sampler = a_sampler(100)
    for admission in cases.admissions([{"logit_bias": ((100, 1.0),)}, {}]):
        sampler.admit(admission)
    result = sampler.sample(cases.logits_of(2, 100, 1), cases.decode_plan(0, [0, 1], 50))
    assert result.failed == {0: "logit_bias names token 100 of 100"}
    assert result.tokens[0] == 0


@pytest.mark.torch
def test_a_slot_is_forgotten_before_it_is_given_again() -> None:
    sampler = a_sampler(100)
    sampler.begin(cases.decode_plan(0, (), 0, admitted=cases.admissions(
        [{"repetition_penalty": 5.0, "logit_bias": ((1, 90.0),)}])))  # fmt: skip
    logits = cases.logits_of(1, 100, 1)
    assert chosen(sampler, logits, [0], 50) == [1]
    sampler.begin(cases.decode_plan(1, (), 0, released=[0, 5], admitted=cases.admissions([{}])))
    assert chosen(sampler, logits, [0], 50) == [int(logits.argmax())]


@pytest.mark.torch
def test_extreme_biases_and_penalties() -> None:
    """A vocabulary of three, biases of +-100, penalties at their ends."""
    sampler = a_sampler(3)
    settings = [
        {"logit_bias": ((0, 100.0), (1, -100.0), (2, -100.0)), "temperature": 5.0},
        {"logit_bias": ((0, -100.0), (1, -100.0), (2, -100.0)), "temperature": 1e-6},
        {"repetition_penalty": 1e-6, "temperature": 1.0, "top_p": 1e-9},
        {"repetition_penalty": 1e6, "top_k": 1, "temperature": 1e6},
        {"presence_penalty": -2.0, "frequency_penalty": 2.0, "min_p": 1.0, "temperature": 1.0},
        {"stop": (0, 1, 2), "min_new_tokens": 50},
        {"stop": (0, 2), "min_new_tokens": 50},
    ]
    for admission in cases.admissions(settings):
        sampler.admit(admission)
    logits = cases.logits_of(len(settings), 3, 1)
    for length in range(len(cases.PROMPT), len(cases.PROMPT) + 40):
        result = sampler.sample(logits, cases.decode_plan(0, list(range(len(settings))), length))
        # of a row whose every token ends it and must not, nothing can be chosen
        assert list(result.failed) == [5]
        assert result.tokens[0] == 0
        assert result.tokens[1] == int(logits[1].argmax())
        assert result.tokens[6] == 1
        assert all(0 <= token < 3 for token in result.tokens)


@pytest.mark.ranks
def test_split_vocabularies_choose_what_a_whole_one_does(ranks: Any, kind: str) -> None:
    import torch

    torch.set_num_threads(1)
    for world, splits in (
        (2, [[V, [V // 2, V // 2], "float32"], [V, [V - 7, 7], "bfloat16"], [5, [3, 2], "float32"],
             [V, [], "float32"], [5, [5, 0], "float32"]]),
        (3, [[V, [1001, 1001, V - 2002], "float32"], [1, [1, 0, 0], "bfloat16"]]),
    ):  # fmt: skip
        found = ranks.run("tests.serving.sampler_cases:split", world, cases=splits, kind=kind)
        for i, (vocabulary, _, dtype) in enumerate(splits):
            wanted = cases.run(a_sampler(vocabulary), vocabulary, dtype, slice(None))
            assert all(
                settings == [None] * 5 for settings in (found[r][i] for r in range(1, world))
            )
            for mine, whole in zip(found[0][i], wanted, strict=True):
                compare(mine, whole)


def compare(mine: Any, whole: Any) -> None:
    """Equal but for the last digits of log-probabilities."""
    if isinstance(whole, float):
        assert mine == pytest.approx(whole, abs=2e-6)
    elif isinstance(whole, (list, tuple)):
        assert len(mine) == len(whole)
        for one, other in zip(mine, whole, strict=True):
            compare(one, other)
    else:
        assert mine == whole
