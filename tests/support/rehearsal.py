"""A worker process of rehearsals: it imports torch on the fake device, so it is made once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hocket.jobs.rehearsal_workers import RehearsalWorkers


@pytest.fixture(scope="session")
def workers() -> Iterator[RehearsalWorkers]:
    """One process, of about 1 GB, for all tests: another would import for as long again, while the
    other worker of pytest-xdist has a core to itself."""
    with RehearsalWorkers(1) as found:
        yield found


@pytest.fixture
def warm_workers(workers: RehearsalWorkers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a test, rehearsals run on the session's worker process."""
    monkeypatch.setattr(RehearsalWorkers, "__enter__", lambda _: workers)
    monkeypatch.setattr(RehearsalWorkers, "__exit__", lambda *_: None)
