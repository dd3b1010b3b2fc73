"""Functions called in the worker processes of rehearsals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hocket.jobs.rehearsal_workers import RehearsalWorkers


@pytest.fixture
def inside(workers: RehearsalWorkers) -> Callable[..., Any]:
    """`inside("groups", ...)` calls that function of `tests.rehearsal.inside` in a worker."""

    def call(name: str, /, **arguments: Any) -> Any:
        entry = f"tests.rehearsal.inside:{name}"
        (event,) = workers.run([{"task": "call", "entry": entry, "arguments": arguments}])
        return event["value"]

    return call
