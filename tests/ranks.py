"""Warm ranks for tests: one fork server for the whole session, one fork per rank and call.

    def test_sum(ranks):
        assert ranks.run("tests.runtime.cases:total", world_size=4, start=3) == [18] * 4

    # tests/runtime/cases.py
    def total(context, start):
        return int(all_reduced(torch.tensor(start + context.rank)))

A case is called in each rank as `case(context, **kwargs)`, with the default process group made
already, and returns plain data (JSON). What it raises, `run` raises: a HocketError as that very
kind, anything else as RankFailure with the rank's own traceback.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from hocket.launch import Launcher, RankContext
from hocket.launch.rank import load_entry

ROOT = Path(__file__).resolve().parent.parent


class RankPool:
    """A warm launcher, and the results of cases by rank."""

    def __init__(self) -> None:
        self.launcher = Launcher(device="cpu", threads=1, path=[ROOT])

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
    import torch

    torch.set_num_threads(1)
    backend = payload["backend"]
    if backend is not None:
        if backend == "shm":
            import hocket.runtime.shm  # noqa: F401  registers itself
        context.init_process_group(backend, timeout=payload["timeout"])
    value = load_entry(payload["case"])(context, **payload["kwargs"])
    sys.stdout.flush()
    context.emit({"event": "result", "value": value})
