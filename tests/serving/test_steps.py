"""Plans and results between ranks: their binary form, and buffers that nobody of ours sent."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.serving.request import SamplingParams, TokenLogprobs
from hocket.serving.scheduling.admission import Admission
from hocket.serving.scheduling.frames import FrameError
from hocket.serving.scheduling.step import ALL, LAST, NONE, BatchRow, StepPlan, StepResult

TOKEN = st.integers(0, 2**31 - 1)
SMALL = st.integers(0, 1000)
FLOAT = st.floats(allow_nan=False, width=64)


@st.composite
def samplings(draw: st.DrawFn) -> SamplingParams:
    most = draw(st.integers(1, 2**31 - 1))
    optional = st.none() | st.integers(0, 20)
    return SamplingParams(
        max_new_tokens=most,
        min_new_tokens=draw(st.integers(0, most)),
        temperature=draw(st.floats(0, 1e30)),
        top_k=draw(st.none() | st.integers(1, 2**31 - 1)),
        top_p=draw(st.none() | st.floats(0, 1, exclude_min=True)),
        min_p=draw(st.none() | st.floats(0, 1)),
        repetition_penalty=draw(st.floats(0.01, 10)),
        presence_penalty=draw(st.floats(-2, 2)),
        frequency_penalty=draw(st.floats(-2, 2)),
        logit_bias=tuple(draw(st.lists(st.tuples(TOKEN, st.floats(-100, 100)), max_size=3))),
        seed=draw(st.integers(-(2**63), 2**63 - 1)),
        stop=tuple(draw(st.lists(TOKEN, max_size=3))),
        stop_tokens=tuple(draw(st.lists(TOKEN, max_size=3))),
        ignore_eos=draw(st.booleans()),
        logprobs=draw(optional),
        prompt_logprobs=draw(optional),
        structure=draw(st.none() | st.text(st.characters(codec="utf-8"), max_size=20)),
    )


@st.composite
def plans(draw: st.DrawFn) -> StepPlan:
    slots = draw(st.lists(SMALL, unique=True, max_size=5))
    rows, tokens = [], []
    for slot in slots:
        count = draw(st.integers(1, 4))
        logits = draw(st.sampled_from([NONE, LAST, ALL]))
        blocks = draw(st.lists(SMALL, max_size=3))
        following = draw(st.integers(-1, 100)) if logits == ALL else -1
        rows.append(BatchRow(slot, draw(SMALL), count, logits, blocks or (), following))
        tokens += draw(st.lists(TOKEN, min_size=count, max_size=count))
    admitted = [
        Admission(
            slot=draw(SMALL),
            sampling=draw(samplings()),
            index=draw(SMALL),
            prompt_length=draw(SMALL),
            prompt=tuple(draw(st.lists(TOKEN, max_size=3))),
            generated=tuple(draw(st.lists(TOKEN, max_size=3))),
        )
        for _ in range(draw(st.integers(0, 2)))
    ]
    number = draw(st.integers(0, 2**64 - 1))
    widest = draw(st.sampled_from([0, len(tokens), len(tokens) + 7]))
    return StepPlan(
        number, rows, tokens, admitted, draw(st.lists(SMALL, max_size=3)), widest=widest,
        decoding=draw(st.booleans()),
    )  # fmt: skip


def entries() -> st.SearchStrategy[TokenLogprobs]:
    top = st.lists(st.tuples(TOKEN, FLOAT), max_size=3).map(tuple)
    return st.builds(TokenLogprobs, TOKEN, FLOAT, top)


@st.composite
def results(draw: st.DrawFn) -> StepResult:
    tokens = draw(st.lists(TOKEN, max_size=5))
    place = st.integers(0, len(tokens) - 1) if tokens else st.nothing()
    return StepResult(
        draw(st.integers(0, 2**64 - 1)),
        tokens,
        draw(st.dictionaries(place, entries())),
        draw(st.dictionaries(SMALL, st.lists(entries(), max_size=3), max_size=3)),
        draw(st.dictionaries(place, st.text(st.characters(codec="utf-8"), max_size=9))),
    )


@given(plans())
@settings(max_examples=50)
def test_a_plan_comes_back_as_it_was(plan: StepPlan) -> None:
    assert StepPlan.decode(plan.encode()) == plan


@given(results())
@settings(max_examples=50)
def test_a_result_comes_back_as_it_was(result: StepResult) -> None:
    assert StepResult.decode(result.encode()) == result


@given(plans(), results(), st.data())
@settings(max_examples=30)
def test_what_is_cut_short_or_longer_is_refused(
    plan: StepPlan, result: StepResult, data: st.DataObject
) -> None:
    for frame, kind in ((plan.encode(), StepPlan), (result.encode(), StepResult)):
        cut = data.draw(st.integers(0, len(frame) - 1))
        for wrong in (frame[:cut], frame + b"\0" * data.draw(st.integers(1, 9))):
            with pytest.raises(FrameError, match="malformed"):
                kind.decode(wrong)


@given(plans(), results(), st.data())
@settings(max_examples=60)
def test_what_is_altered_is_refused_or_read_within_bounds(
    plan: StepPlan, result: StepResult, data: st.DataObject
) -> None:
    for frame, kind in ((plan.encode(), StepPlan), (result.encode(), StepResult)):
        wrong = bytearray(frame)
        for _ in range(data.draw(st.integers(1, 4))):
            wrong[data.draw(st.integers(0, len(wrong) - 1))] = data.draw(st.integers(0, 255))
        try:
            found = kind.decode(wrong)
        except FrameError:
            continue
        assert isinstance(found, kind)
        assert len(repr(found)) < 100 * len(wrong) + 2000


@given(st.binary(min_size=60, max_size=200))
@settings(max_examples=50)
def test_noise_is_refused(noise: bytes) -> None:
    for kind, head in ((StepPlan, b"hkSP"), (StepResult, b"hkSR")):
        for wrong in (noise, head + struct.pack("<I", 1) + noise):
            if any(noise[8:]):  # all counts 0 and nothing behind them may be an empty plan
                with pytest.raises(FrameError):
                    kind.decode(wrong)


@pytest.mark.parametrize("place", range(5))
def test_huge_counts_are_refused_before_anything_is_made(place: int) -> None:
    frame = bytearray(StepPlan(1, [BatchRow(0, 0, 1, LAST)], [5]).encode())
    struct.pack_into("<I", frame, 16 + 4 * place, 2**32 - 1)
    with pytest.raises(FrameError, match="malformed"):
        StepPlan.decode(frame)
    frame = bytearray(StepResult(1, [5]).encode())
    struct.pack_into("<I", frame, 16 + 4 * place, 2**32 - 1)
    with pytest.raises(FrameError, match="malformed"):
        StepResult.decode(frame)


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        (StepPlan(0, [BatchRow(0, 0, 2, LAST)], [5]), "rows add 2 tokens, it holds 1"),
        (
            StepPlan(0, [BatchRow(0, 0, 1, LAST), BatchRow(0, 1, 1, LAST)], [5, 6]),
            "a slot has two rows",
        ),
        (StepPlan(0, [BatchRow(0, -1, 1, LAST)], [5]), "a start is negative"),
        (StepPlan(0, [BatchRow(-1, 0, 1, LAST)], [5]), "a slot is negative"),
        (StepPlan(0, [BatchRow(0, 0, 1, 3)], [5]), "logits are of no kind"),
        (StepPlan(0, [BatchRow(0, 0, 0, LAST)], []), "a row adds no token"),
        (StepPlan(0, [BatchRow(0, 0, 2, LAST)], [5, 6], widest=1), "2 tokens, the widest 1"),
        (StepPlan(0, [BatchRow(0, 0, 1, LAST, [-4])], [5]), "an id is negative"),
    ],
)
def test_plans_that_cannot_be_are_refused(plan: StepPlan, why: str) -> None:
    with pytest.raises(FrameError, match=why):
        StepPlan.decode(plan.encode())


def test_an_older_version_is_refused() -> None:
    frame = bytearray(StepPlan(0, [], []).encode())
    struct.pack_into("<I", frame, 4, 99)
    with pytest.raises(FrameError, match="its version is 99, not 1"):
        StepPlan.decode(frame)
    with pytest.raises(FrameError, match="it begins with"):
        StepResult.decode(StepPlan(0, [], []).encode() + bytes(100))


def test_what_a_row_asks_for() -> None:
    rows = [
        BatchRow(0, 0, 3, NONE),
        BatchRow(1, 0, 3, LAST),
        BatchRow(2, 0, 3, ALL, (), 7),
        BatchRow(3, 0, 3, ALL),
    ]
    assert [row.samples for row in rows] == [False, True, False, True]
    assert [row.num_logits for row in rows] == [0, 1, 3, 3]
    assert StepPlan(0, rows, [1] * 12).num_logits == 7
