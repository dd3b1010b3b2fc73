"""The public `parallelize`: the flags' names, a plan of its own for a Hugging Face model."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")


@pytest.mark.ranks
def test_a_hugging_face_model_is_split_by_name_alone(ranks) -> None:
    layouts = ["tp2.pp2", "dp2.pp2", "pp4", "dp2.tp2", "dp4:zero=3"]
    for row in ranks.run("tests.jobs.cases:public", world_size=4, layouts=layouts):
        for layout, found in zip(layouts, row, strict=True):
            assert found["loss"] < 1e-5, layout
            assert found["norm"] < 1e-5, layout
