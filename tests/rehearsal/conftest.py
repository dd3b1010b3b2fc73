"""Worker processes, once for a module's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hocket.jobs.rehearsal_workers import RehearsalWorkers


@pytest.fixture(scope="package")
def workers() -> Iterator[RehearsalWorkers]:
    with RehearsalWorkers() as found:
        yield found


@pytest.fixture
def inside(workers: RehearsalWorkers) -> Callable[..., Any]:
    """`inside("groups", ...)` calls that function of `tests.rehearsal.inside` in a worker."""

    def call(name: str, /, **arguments: Any) -> Any:
        entry = f"tests.rehearsal.inside:{name}"
        (event,) = workers.run([{"task": "call", "entry": entry, "arguments": arguments}])
        return event["value"]

    return call
