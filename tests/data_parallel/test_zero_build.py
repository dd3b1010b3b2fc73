"""Under ZeRO-3 a rank that is built never holds its stage: its shares, and the block under way."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest

from tests.rotation import part

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import RankPool

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(200)]

LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 96, "hidden_size": 64, "intermediate_size": 256,
    "num_hidden_layers": 12, "num_attention_heads": 4, "num_key_value_heads": 4,
    "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip
SLACK = 4096
"""Bytes of what is no parameter: rotary frequencies, and one element for each of at most 111
parameters that has no values yet."""


@pytest.mark.parametrize(
    ("layout", "given", "tied"),
    part(
        [
            *itertools.product(
                ("dp2:zero=3", "dp2.tp2:zero=3", "dp2.pp2:zero=3,microbatches=2,schedule=gpipe"),
                ("seed", "directory"),
                (False, True),
            )
        ],
        3,
    ),
)
def test_a_stage_is_never_whole(
    ranks: RankPool, layout: str, given: str, tied: bool, tmp_path: Path
) -> None:
    config = LLAMA | {"tie_word_embeddings": tied}
    size = 2 if layout.startswith("dp2:") else 4
    for found in ranks.run(
        "tests.data_parallel.cases:built", size,
        config=config, layout=layout, directory=str(tmp_path) if given == "directory" else None,
    ):  # fmt: skip
        assert found["equal"]
        # Read: what is held, once, and headers. The same as where the stage is whole.
        assert found["read"] == found["read_whole"]
        assert bool(found["read"]) == (given == "directory")
        # A random layer is made whole, on every rank of tp alike.
        second = found["block"] if given == "directory" else found["whole_block"]
        limit = found["shares"] + found["block"] + second + SLACK
        assert found["peak"] <= limit
        # The bound says something: a stage that is whole, beside nothing, is beyond it.
        assert found["stage"] > limit


@pytest.mark.parametrize(
    ("layout", "tied"),
    part(
        [
            *itertools.product(
                (
                    "dp2:zero=3",
                    "dp2:zero=3,offload=params",
                    "dp2.tp2:zero=3",
                    "dp2.pp2:zero=3,microbatches=2,schedule=gpipe",
                ),
                (False, True),
            )
        ],
        3,
    ),
)
def test_nor_is_one_that_is_saved_resumed_or_exported(
    ranks: RankPool, layout: str, tied: bool, tmp_path: Path
) -> None:
    config = LLAMA | {"tie_word_embeddings": tied}
    size = 2 if layout.startswith("dp2:") else 4
    for found in ranks.run(
        "tests.data_parallel.cases:kept", size, config=config, layout=layout, folder=str(tmp_path)
    ):
        assert found["values"]
        assert found["moments"]
        assert found["exports"]
        limit = 2 * found["block"] + SLACK
        assert found["saving"] <= limit
        assert found["exporting"] <= limit
        assert found["resuming"] <= limit
        assert found["stage"] > limit
        # The count sees what is made: the resumed bytes of a block, and a block that is gathered.
        assert min(found["saving"], found["exporting"], found["resuming"]) >= found["block"]
