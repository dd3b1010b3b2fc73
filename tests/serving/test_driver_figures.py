"""What a driver tells of itself without being asked."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tests.serving.test_driver import limits, prompt, replica, request, slowly
from tests.serving.token_part import TokenPart


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
                async with asyncio.timeout(60):
                    while client.stats["running"] or client.stats["blocks_used"]:
                        await asyncio.sleep(0.01)

    asyncio.run(main())


def test_figures_tell_that_a_request_whose_time_is_over_holds_nothing(tmp_path: Path) -> None:
    """Its end may be told while its last step is still in flight, and that adds nothing to tell."""

    async def main() -> None:
        bounds = limits(depth=2)
        async with replica(tmp_path, bounds, stages=2, before=slowly) as (client, _):
            for number in range(8):  # the end falls at another place between two looks each time
                asked = request(number, prompt(number, 5), 100)
                asked = dataclasses.replace(asked, deadline=0.03 + 0.013 * number)
                found = [output async for output in client.submit(asked)]
                assert found[-1].finish_reason == "deadline"
                async with asyncio.timeout(60):
                    # What was told before it began holds nothing either.
                    while client.stats["finished"] != number + 1 or (
                        client.stats["running"] or client.stats["blocks_used"]
                    ):
                        await asyncio.sleep(0.01)

    asyncio.run(main())


def test_figures_have_the_imbalance_of_experts_where_copies_were_placed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def figures(name: str) -> dict[str, Any]:
        (tmp_path / name).mkdir()
        async with replica(tmp_path / name, limits()) as (client, _):
            _ = [output async for output in client.submit(request("a", prompt(1, 5), 3))]
            return dict(client.stats)

    assert "expert_imbalance" not in asyncio.run(figures("none"))
    monkeypatch.setattr(TokenPart, "expert_imbalance", (1.75, 1.25))
    found = asyncio.run(figures("some"))
    assert found["expert_imbalance"] == {"before": 1.75, "after": 1.25}
