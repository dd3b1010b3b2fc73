"""What `LLM.generate` is given, as it reads it."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from hocket.jobs.serving.llm import _check_samplings, _prompts, _stops
from hocket.serving.request import SamplingParams
from hocket.spec.errors import OptionError


def test_one_string_is_not_its_letters() -> None:
    assert _stops("end") == _stops(["end"]) == ("end",)
    assert _stops(()) == ()


@pytest.mark.parametrize("given", ["", [".", ""]])
def test_an_empty_one_is_refused(given: str | list[str]) -> None:
    with pytest.raises(OptionError, match="stop string is empty"):
        _stops(given)


@pytest.mark.parametrize("given", [[5], 5, None, [None], ["a", 5], b"end", {"a": 1}])
def test_a_stop_string_is_text(given: Any) -> None:
    with pytest.raises(OptionError, match="a stop string is"):
        _stops(given)


def test_prompts_are_texts_or_tokens_of_any_kind() -> None:
    assert _prompts("once") == _prompts(["once"]) == ["once"]
    assert _prompts([1, 2]) == _prompts((1, 2)) == _prompts([[1, 2]]) == [(1, 2)]
    assert _prompts(array("q", [1, 2])) == [(1, 2)]
    assert _prompts(text for text in ("a", "b")) == ["a", "b"]
    assert _prompts(["a", [1], ""]) == ["a", (1,), ""]
    assert _prompts([]) == []
    assert _prompts([[], [3]]) == [(), (3,)]


@pytest.mark.parametrize("given", [None, 7, 1.5, b"once", {"prompt": "once"}])
def test_what_is_no_list_of_prompts_is_refused(given: Any) -> None:
    with pytest.raises(OptionError, match="they are texts, or lists of token ids") as caught:
        _prompts(given)
    assert "llm.generate" in (caught.value.hint or "")


@pytest.mark.parametrize(
    "given", [[None], [1, "a"], ["a", 1], [[1, "a"]], [[1.5]], [b"once"], [{}]]
)
def test_what_is_no_prompt_is_refused(given: Any) -> None:
    with pytest.raises(OptionError, match=r"prompt \d is .*; a prompt is a text"):
        _prompts(given)


def test_samplings_are_samplings() -> None:
    _check_samplings(None, SamplingParams)
    _check_samplings(SamplingParams(), SamplingParams)
    _check_samplings([SamplingParams(), SamplingParams()], SamplingParams)
    for given in ({"temperature": 0}, "greedy", 5, [None], [SamplingParams(), {}]):
        with pytest.raises(OptionError, match="it is a SamplingParams, or one for each prompt"):
            _check_samplings(given, SamplingParams)
