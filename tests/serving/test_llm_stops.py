"""Stop strings as `LLM.generate` reads them."""

from __future__ import annotations

import pytest

from hocket.jobs.serving.llm import _stops
from hocket.spec.errors import OptionError


def test_one_string_is_not_its_letters() -> None:
    assert _stops("end") == _stops(["end"]) == ("end",)
    assert _stops(()) == ()


@pytest.mark.parametrize("given", ["", [".", ""]])
def test_an_empty_one_is_refused(given: str | list[str]) -> None:
    with pytest.raises(OptionError, match="stop string is empty"):
        _stops(given)
