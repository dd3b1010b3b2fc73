"""What a driver tells of itself without being asked."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.serving.test_driver import limits, prompt, replica, request, slowly


def test_figures_tell_at_once_that_an_aborted_request_holds_nothing(tmp_path: Path) -> None:
    """Nothing else comes of an abort that leaves the replica idle."""

    async def main() -> None:
        for stages in (1, 2):
            folder = tmp_path / str(stages)
            folder.mkdir()
            bounds = limits(depth=stages)
            async with replica(folder, bounds, stages=stages, before=slowly) as (client, _):
                stream = client.submit(request("a", prompt(1, 5), 100))
                while not client.stats.get("running"):
                    await anext(stream)
                stream.cancel()
                async with asyncio.timeout(20):
                    while client.stats["running"] or client.stats["blocks_used"]:
                        await asyncio.sleep(0.01)

    asyncio.run(main())
