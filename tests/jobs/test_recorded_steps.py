"""How many steps are recorded is checked before anything runs."""

from __future__ import annotations

import pytest

from hocket.jobs.request import request
from hocket.spec.errors import OptionError


@pytest.mark.parametrize(
    "values",
    [
        {"timeline_steps": 0},
        {"timeline_steps": 13},
        {"timeline_steps": 3, "timeline_step": 11},
        {"timeline_steps": 21, "steps": 100},
    ],
)
def test_more_than_there_are_is_refused(values: dict[str, int]) -> None:
    with pytest.raises(OptionError, match="timeline_steps"):
        request({"model": "tiny-llama", "steps": 12, **values})


def test_the_last_ones_can_be_recorded() -> None:
    found = request({"model": "tiny-llama", "steps": 12, "timeline_step": 10, "timeline_steps": 3})
    assert found.options.timeline_steps == 3
