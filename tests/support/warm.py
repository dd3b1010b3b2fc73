"""Jobs in this process, on the session's warm launcher: no test pays for imports twice."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest

import hocket.launch
from tests.ranks import RankPool


class Warm:
    """Stands for `Launcher` in a job: hands out the session's own and does not close it."""

    pool: RankPool | None = None

    def __init__(self, *_: object, preload: Collection[str] = (), **__: object) -> None:
        assert self.pool is not None
        self.pool.preload(preload)
        self.launcher = self.pool.launcher

    def __enter__(self) -> hocket.launch.Launcher:
        return self.launcher

    def __exit__(self, *_: object) -> None:
        return None

    def preload(self, modules: Collection[str]) -> None:
        assert self.pool is not None
        self.pool.preload(modules)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.launcher, name)

    def close(self) -> None:
        return None


@pytest.fixture
def warm(ranks: RankPool, monkeypatch: pytest.MonkeyPatch) -> RankPool:
    """Within a test, jobs run on the session's launcher."""
    monkeypatch.setattr(Warm, "pool", ranks)
    monkeypatch.setattr(hocket.launch, "Launcher", Warm)
    return ranks
