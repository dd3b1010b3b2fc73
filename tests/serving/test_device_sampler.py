"""Sampling on a device chooses what sampling on a CPU does, and reads the device once a step."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from tests.serving import sampler_cases as cases

torch = pytest.importorskip("torch")

from hocket.runtime.mesh import Axis  # noqa: E402
from hocket.runtime.record import Recorder  # noqa: E402
from hocket.serving.engine.device_sampler import DeviceSampler  # noqa: E402
from hocket.serving.engine.sampler import Sampler  # noqa: E402
from hocket.serving.engine.staging import Readback, Staging  # noqa: E402
from hocket.serving.engine.vocabulary import Vocabulary  # noqa: E402
from hocket.serving.scheduling.step import StepPlan  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.timeout(120)]

CHOICES: dict[str, tuple[Any, ...]] = {
    "temperature": (0.0, 0.7, 1.0, 1.5),
    "top_k": (None, 1, 7, 300),
    "top_p": (None, 0.3, 0.95),
    "min_p": (None, 0.1),
}
EDITS: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.4},
    {"presence_penalty": 0.8, "frequency_penalty": 0.4},
    {"logit_bias": ((3, 4.0), (11, -6.0))},
    {"min_new_tokens": 3, "max_new_tokens": 9, "stop": (0, 5)},
    {"logprobs": 2},
    {"logprobs": 0, "repetition_penalty": 0.8, "logit_bias": ((1, 2.0),)},
]


def both(vocabulary: int, rows: int) -> tuple[Sampler, DeviceSampler]:
    whole = Vocabulary(axis=Axis("tp"))
    return (
        Sampler(whole, vocabulary, "cpu", Recorder(), rows),
        DeviceSampler(whole, vocabulary, "cpu", Recorder(), rows),
    )


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


@pytest.mark.parametrize("vocabulary", [50, 4096, 5001])
def test_every_combination_chooses_the_same_tokens(vocabulary: int) -> None:
    """All ways to cut a distribution, each with some edit, several steps, in batches of 48."""
    draw = random.Random(vocabulary)
    settings = []
    for values in itertools.product(*CHOICES.values()):
        cut = dict(zip(CHOICES, values, strict=True))
        settings.append({**cut, **draw.choice(EDITS), "seed": draw.randrange(1000)})
    draw.shuffle(settings)
    for first in range(0, len(settings), 48):
        batch = settings[first : first + 48]
        host, device = both(vocabulary, len(batch))
        slots = list(range(len(batch)))
        for number in range(4):
            plan = cases.decode_plan(number, slots, len(cases.PROMPT) + number)
            if number == 0:
                plan.admitted = cases.admissions(batch)
            logits = cases.logits_of(len(batch), vocabulary, first + number)
            results = []
            for sampler in (host, device):
                sampler.begin(plan)
                results.append(cases.plain(sampler.sample(logits, plan)))
            compare(results[1], results[0])


def test_the_next_step_is_launched_before_the_result_of_the_last_is_read() -> None:
    """Two steps under way give what two steps one after the other give, and the tokens lie on the
    device in between."""
    host, device = both(3000, len(cases.MIXED))
    device.last = torch.full((len(cases.MIXED) + 1,), -7)
    slots = list(range(len(cases.MIXED)))
    plans = [cases.decode_plan(n, slots, len(cases.PROMPT) + n) for n in range(3)]
    plans[0].admitted = cases.admissions(cases.MIXED)
    logits = [cases.logits_of(len(slots), 3000, n) for n in range(3)]
    expected = []
    for plan, rows in zip(plans, logits, strict=True):
        host.begin(plan)
        expected.append(host.sample(rows, plan))
    under_way: list[Any] = []
    for number, (plan, rows) in enumerate(zip(plans, logits, strict=True)):
        device.begin(plan)
        under_way.append(device.launch(rows, plan))
        assert device.last[:-1].tolist() == expected[number].tokens
        if len(under_way) == 2:
            compare(cases.plain(under_way.pop(0).result()), cases.plain(expected[number - 1]))
    compare(cases.plain(under_way.pop().result()), cases.plain(expected[2]))
    assert int(device.last[-1]) == -7  # the slot of padding
    assert device.readback.reads == 3
    assert device._staging.copies == 3


def test_a_slot_that_is_given_again_under_way_keeps_the_failure_of_its_request() -> None:
    _, device = both(100, 2)
    first = cases.decode_plan(0, [0, 1], 40, admitted=cases.admissions([{}, {}]))
    device.begin(first)
    logits = cases.logits_of(2, 100, 1)
    logits[0, 3] = torch.nan
    lost = device.launch(logits, first)
    again = cases.decode_plan(1, [0, 1], 41, admitted=cases.admissions([{}]), released=[0])
    device.begin(again)
    good = device.launch(cases.logits_of(2, 100, 2), again)
    assert list(lost.result().failed) == [0]
    assert good.result().failed == {}


def test_a_plan_that_samples_nothing_reads_nothing() -> None:
    _, device = both(100, 2)
    assert device.sample(torch.zeros(0, 100), StepPlan(4, [], [])).tokens == []
    assert device.readback.reads == 0


def test_staged_columns_arrive_as_they_are() -> None:
    staging = Staging(4, torch.device("cpu"), grows=True)
    for _ in range(3):
        columns = [
            ([1, -2, 3], torch.long),
            ([0.25, 0.5], torch.float64),
            ([7, 8, 9], torch.int32),
            (torch.tensor([1, 255], dtype=torch.uint8), torch.uint8),
            ([], torch.long),
        ]
        found = staging.send(columns)
        assert [one.tolist() for one in found] == [[1, -2, 3], [0.25, 0.5], [7, 8, 9], [1, 255], []]
        assert [one.dtype for one in found] == [dtype for _, dtype in columns]
    assert staging.copies == 3
    fixed = Staging(2, torch.device("cpu"))
    with pytest.raises(AssertionError, match="3 words for a buffer of 2"):
        fixed.send([([1, 2, 3], torch.long)])


def test_more_results_may_be_under_way_than_there_are_buffers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As with more plans in flight on a GPU, where each result stays in its buffer until read."""

    class Event:
        def record(self) -> None: ...
        def synchronize(self) -> None: ...

    monkeypatch.setattr(torch.cuda, "Event", Event)
    readback = Readback(torch.device("cuda"), depth=2)
    given = [torch.full((3,), float(number), dtype=torch.float64) for number in range(5)]
    under_way = [readback.start(values) for values in given]
    assert [each.read() for each in under_way] == [values.tolist() for values in given]
    assert readback.reads == 5
