"""Reading a parameter that ZeRO-3 has not gathered is an error, and no end of the process."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.families import LLAMA

if TYPE_CHECKING:
    from tests.ranks import RankPool

NAME = "model.layers.0.mlp.up_proj.weight"


@pytest.mark.ranks
@pytest.mark.timeout(120)
def test_what_is_not_gathered_cannot_be_read(ranks: RankPool) -> None:
    for found in ranks.run("tests.data_parallel.cases:reads", 2, config=LLAMA):
        raised = found["raised"]
        assert raised.pop("hook").startswith("model.layers.3.mlp.up_proj.weight is read where")
        assert raised.pop("state_dict").startswith("model.embed_tokens.weight is read where")
        assert raised.pop("copy").startswith("model.embed_tokens.weight is read where")
        assert all(text.startswith(f"{NAME} is read where") for text in raised.values()), raised
        assert found["asked"] == [[48, 32], 48 * 32, "torch.float32", True]
        assert found["printed"].startswith(f"Parameter {NAME} of shape [48, 32]")
        assert found["inside"] == found["after"][0]
        assert found["inside"] == pytest.approx(found["after"][1], rel=1e-4)
        assert found["held"] == 0
        first, second, third = found["losses"]
        assert first > second > third
