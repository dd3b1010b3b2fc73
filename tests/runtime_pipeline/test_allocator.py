"""Freed memory stays with the process."""

from __future__ import annotations

import sys
from typing import Any

import pytest


@pytest.mark.ranks
@pytest.mark.timeout(120)
@pytest.mark.skipif(sys.platform != "linux", reason="of glibc")
def test_freed_memory_is_not_asked_for_again(ranks: Any) -> None:
    ((before, after),) = ranks.run("tests.runtime_pipeline.cases:faults", 1, backend=None)
    assert before > 1000
    assert after < before / 10
