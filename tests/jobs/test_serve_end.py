"""The end of a server: who says whether all of it ended in time."""

from __future__ import annotations

import asyncio
import types
from typing import Any

import pytest

from hocket.jobs.serving import server as job

pytestmark = pytest.mark.timeout(60)


class Told:
    """What is recorded."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


class Busy:
    """A router on which something runs."""

    running = 1

    def close(self, why: str) -> None:
        assert why


async def nothing(*_: Any) -> None:
    """A front, replicas and a keeper that have nothing to end."""


@pytest.mark.parametrize("whole", [True, False])
def test_a_second_signal_after_the_last_answer_ends_nothing_before_its_time(whole: bool) -> None:
    async def end() -> tuple[bool, list[str]]:
        ends, router, record = job.Ends(), Busy(), Told()
        ends.ask(15)

        def last() -> None:  # both before anybody looks at the router again
            router.running = 0 if whole else 1
            ends.ask(15)

        asyncio.get_running_loop().call_later(0.001, last)
        given: dict[str, Any] = {
            "router": router,
            "replicas": types.SimpleNamespace(ending=False, kill=lambda: None, end=nothing),
            "front": types.SimpleNamespace(close=nothing),
            "keeper": types.SimpleNamespace(ask=nothing),
            "ends": ends,
            "record": record,
        }
        server: Any = types.SimpleNamespace(options=types.SimpleNamespace(drain_seconds=20.0))
        return await job._end(server, **given), record.notes

    drained, notes = asyncio.run(end())
    assert drained == whole
    assert notes[1:] == ([] if whole else ["1 requests were ended before their time"])
