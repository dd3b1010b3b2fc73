"""Worker processes of rehearsals: each imports torch on the fake device, so they are made once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hocket.jobs.rehearsal_workers import RehearsalWorkers


@pytest.fixture(scope="package")
def workers() -> Iterator[RehearsalWorkers]:
    """Of the tests of a folder; ended with its last one, since each holds about 1 GB."""
    with RehearsalWorkers() as found:
        yield found


@pytest.fixture
def warm_workers(workers: RehearsalWorkers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a test, rehearsals run on the workers of its folder."""
    monkeypatch.setattr(RehearsalWorkers, "__enter__", lambda _: workers)
    monkeypatch.setattr(RehearsalWorkers, "__exit__", lambda *_: None)
