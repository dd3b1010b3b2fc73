import pytest

from tests.ranks import RankPool


@pytest.mark.ranks
def test_several_runs_from_one_server(ranks: RankPool) -> None:
    for world_size, start in ((2, 1), (4, 10), (1, 5)):
        total = sum(start + r for r in range(world_size))
        found = ranks.run("tests.launch.cases:add", world_size, start=start)
        assert found == [[total, r, world_size, 1] for r in range(world_size)]
