"""Warm ranks for tests: one fork server for the whole session, one fork per rank and call.

    def test_sum(ranks):
        assert ranks.run("tests.runtime.cases:total", world_size=4, start=3) == [18] * 4

    # tests/runtime/cases.py
    def total(context, start):
        return int(all_reduced(torch.tensor(start + context.rank)))

A case is called in each rank as `case(context, **kwargs)`, with the default process group made
already, and returns plain data (JSON). What it raises, `run` raises: a HocketError as that very
kind, anything else as RankFailure with the rank's own traceback. The server imports the module of a
case before it forks ranks, and what a case imported later before the next: each fork would do it
again. So importing a module of ours must neither compute nor start threads.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

from hocket.launch import Launcher, RankContext
from hocket.launch.rank import load_entry

ROOT = Path(__file__).resolve().parent.parent


class RankPool:
    """A warm launcher, and the results of cases by rank."""

    def __init__(self) -> None:
        self.launcher = Launcher(device="cpu", threads=1, path=[ROOT])
        self._preloaded: set[str] = set()
        self._imported: list[str] = []

    def preload(self, modules: Collection[str]) -> None:
        """Have the server import modules, once."""
        self.launcher.preload([name for name in modules if name not in self._preloaded])
        self._preloaded.update(modules)

    def run(
        self,
        case: str,
        world_size: int,
        *,
        backend: str | None = "gloo",
        timeout: float = 60.0,
        **kwargs: Any,
    ) -> list[Any]:
        """The results of `case` (`module:function`), by rank.

        `backend` None makes no process group; `timeout` bounds each collective, and 30 s more
        each silence.
        """
        results: dict[int, Any] = {}

        def hear(event: dict[str, Any]) -> None:
            if event["event"] == "result":
                results[event["rank"]] = event["value"]
                self._imported += event["imported"]

        self.preload(["tests.ranks", case.partition(":")[0], *self._imported])
        self._imported.clear()
        self.launcher.run(
            "tests.ranks:call",
            world_size,
            {"case": case, "backend": backend, "timeout": timeout, "kwargs": kwargs},
            on_event=hear,
            startup_timeout=timeout + 60.0,
            silence_timeout=timeout + 30.0,
        )
        return [results[rank] for rank in range(world_size)]

    def close(self) -> None:
        self.launcher.close()


def call(context: RankContext, payload: dict[str, Any]) -> None:
    """The rank's side of `RankPool.run`."""
    before = set(sys.modules)
    import torch

    torch.set_num_threads(1)
    backend = payload["backend"]
    if backend is not None:
        if backend == "shm":
            import hocket.runtime.shm  # noqa: F401  registers itself
        context.init_process_group(backend, timeout=payload["timeout"])
    value = load_entry(payload["case"])(context, **payload["kwargs"])
    sys.stdout.flush()
    new = set(sys.modules) - before if context.rank == 0 else set()
    imported = [name for name in new if name.startswith(("hocket.", "transformers.models."))]
    context.emit({"event": "result", "value": value, "imported": sorted(imported)})
